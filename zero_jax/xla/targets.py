"""Target topologies by name: chips as data files (memory, rates, links) and slices of them, known before JAX starts."""

import dataclasses
import difflib
import functools
import importlib.resources
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any

from zero_jax.errors import UsageError, cut, named, printable
from zero_jax.files import read_regular

MAX_FILE_BYTES, MAX_LINE = 1 << 16, 1000
"""Of a target file; those of zero_jax/xla/chips have up to 2 KiB. Characters of a line of it."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What only a GPU has: its host, and what XLA's compiler needs to know of it. Sizes in bytes."""

    gpus_per_host: int
    """At most."""
    capability: str
    """CUDA compute capability, such as 8.0 or 9.0a."""
    core_count: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    """At most, where a block opts in."""
    nvlink_hosts: int = 1
    """Hosts whose GPUs reach one another over NVLink."""
    compile_as: str = ""
    """The compute capability to compile for, where the chip's own is no longer supported."""


@dataclasses.dataclass(frozen=True)
class Tpu:
    """What only a TPU has: its torus, and its names in libtpu."""

    topology: str
    """Name of its slices in libtpu, before the colon."""
    host: tuple[int, ...]
    """The block of chips that one host holds, by torus dim."""
    max_chips: int
    """Chips of the largest slice."""
    ring: int
    """A dim of a multiple of this many chips has wrap-around links; in 3 dims only where all dims have them."""
    chip_config: str = ""
    """Name of libtpu's chip configuration; empty: its default."""
    devices_per_chip: int = 1
    """Devices that JAX sees of one chip."""
    die_bandwidth: float = math.inf
    """Between the devices of one chip, in bytes/s per direction."""
    min_jax: str = ""
    """Older versions of JAX read its compiled programs with the libtpu that they pin, and with no newer one."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of device, read from its file in zero_jax/xla/chips. Figures are per device, as JAX counts devices."""

    name: str
    memory_bytes: int
    """What programs can use."""
    memory_bandwidth: float
    """In bytes/s."""
    host_memory_bytes: int
    """A device's share of its host's memory."""
    link_bandwidth: float
    """In bytes/s per direction: of all NVLinks of a GPU together, of one ICI link of a TPU chip."""
    network_bandwidth: float
    """In bytes/s per direction: a device's share of the network between hosts (GPU) or slices (TPU)."""
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    """Dense FLOP/s of matrix products by HLO dtype, f8 for all 8-bit floats; f32 at JAX's default precision."""
    gpu: Gpu | None = None
    tpu: Tpu | None = None
    examples: tuple[str, ...] = ()
    """Targets that the tests compile for."""
    note: str = ""
    """What a reader of predictions for it has to know."""

    @property
    def platform(self) -> str:
        """Its name in JAX: cuda or tpu."""
        return "cuda" if self.gpu else "tpu"

    def forms(self, name: str) -> tuple[str, ...]:
        """How targets of this chip, called `name`, are written: one form per number of dims."""
        if self.tpu:
            return (f"{name}:{'x'.join('XYZ'[: len(self.tpu.host)])}",)
        return f"{name}:GPUS", f"{name}:HOSTSxGPUS_PER_HOST"


@dataclasses.dataclass(frozen=True)
class Link:
    """The links that a collective over a group of devices crosses."""

    name: str
    """nvlink, network, ici, die, or none for a group of one."""
    bandwidth: float
    """In bytes/s: what each device of the group sends, while it receives as much, in a ring or its like."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A target topology: a chip, how many of them, and the text that named it. Memory and rates are `chip`'s."""

    text: str
    chip: Chip
    dims: tuple[int, ...]
    """TPU: chips by torus dim. GPU: hosts and GPUs per host."""

    @property
    def num_devices(self) -> int:
        """All devices, as JAX counts them."""
        return math.prod(self.dims) * (self.chip.tpu.devices_per_chip if self.chip.tpu else 1)

    @property
    def num_hosts(self) -> int:
        """Hosts, each with a process."""
        tpu = self.chip.tpu
        if not tpu:
            return self.dims[0]
        return math.prod(math.ceil(dim / block) for dim, block in zip(self.dims, tpu.host, strict=True))

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Which torus dims close to a ring; none on GPU."""
        if not self.chip.tpu:
            return ()
        rings = tuple(dim % self.chip.tpu.ring == 0 for dim in self.dims)
        return rings if len(rings) < 3 else (all(rings),) * 3

    def link(self, coords: Sequence[tuple[int, ...]]) -> Link:
        """The links between the devices of a group, and their bandwidth.

        GPU: within an NVLink domain a device sends at the rate of its NVLinks. Across domains NCCL runs as many rings
        as the group has GPUs per domain, each over its own network card: a device sends at the rate of those cards
        together, and at most at that of its NVLinks.

        TPU: the group spans some axes of the torus, which all send at once: two links per axis where the group fills
        a ring, else one, since the last chip of a line has no other. Where it takes every n-th chip of an axis, n
        groups share those links. Where it has only some devices of a chip, the others use the rest.

        Args:
          coords: where each device of the group is, from `zero_jax.xla_devices.coords`: (host, number) of a GPU,
            torus coordinates and then the core of a TPU.
        """
        if len(coords) < 2:
            return Link("none", math.inf)
        return self._ici(coords, self.chip.tpu) if self.chip.tpu else self._nvlink(coords)

    def _nvlink(self, coords: Sequence[tuple[int, ...]]) -> Link:
        chip = self.chip
        domains = Counter(host // chip.gpu.nvlink_hosts for host, _ in coords)  # pyright: ignore
        if len(domains) == 1:
            return Link("nvlink", chip.link_bandwidth)
        return Link("network", min(chip.link_bandwidth, chip.network_bandwidth * min(domains.values())))

    def _ici(self, coords: Sequence[tuple[int, ...]], tpu: Tpu) -> Link:
        chips = Counter(coord[:-1] for coord in coords)
        if len(chips) == 1:
            return Link("die", tpu.die_bandwidth)
        links = 0.0
        for axis, (dim, wrap) in enumerate(zip(self.dims, self.wrap, strict=True)):
            at = sorted({chip[axis] for chip in chips})
            if len(at) > 1:
                step = max(b - a for a, b in zip(at, at[1:], strict=False))
                links += (2 if wrap and step * len(at) == dim else 1) / step
        share = min(chips.values()) / tpu.devices_per_chip
        return Link("ici", links * self.chip.link_bandwidth * share)


def target_of(text: str) -> Target:
    """The target that `text` names.

    `h100:8`, `h100:16x8` (hosts x GPUs per host), `v5p:4x4x8` (a torus), or `./mychip.toml:4x8` with a chip file.

    Raises ValueError for an unknown chip, impossible dims, or a file that does not describe a chip.
    """
    if not isinstance(text, str):
        raise UsageError(f"target={printable(repr(text))}: give a text, as \"h100:8\"; {_known()}")
    name, _, size = text.rpartition(":") if ":" in text else (text, "", "")
    if name not in _files() and not name.endswith(".toml"):
        near = _nearest(name, [known for known in _files() if known.startswith(name)] or _files())
        raise UsageError(f"unknown target {text!r}, nearest is {_nearest(text, _chip(near).examples)!r}; {_known()}")
    chip = read_chip(name) if name.endswith(".toml") else _chip(name)
    forms = chip.forms(name)
    dims = tuple(int(dim) if dim.isdecimal() else 0 for dim in size.split("x"))
    if len(dims) not in [form.removeprefix(name).count("x") + 1 for form in forms] or min(dims) < 1:
        near = f"nearest is {_nearest(text, chip.examples)!r}; {_known()}" if chip.examples else _known()
        raise UsageError(f"target {text!r} is not written as {' or '.join(forms)}, {near}")
    if chip.tpu:
        _check_slice(text, chip.tpu, dims)
        return Target(text, chip, dims)
    hosts, gpus = (1, *dims)[-2:]
    if chip.gpu and gpus > chip.gpu.gpus_per_host:
        raise UsageError(f"target {text!r}: a host has at most {chip.gpu.gpus_per_host} GPUs; write it as {forms[1]}")
    return Target(text, chip, (hosts, gpus))


def known_targets() -> tuple[str, ...]:
    """One or two targets of each chip; other sizes are written alike."""
    return tuple(example for name in _files() for example in _chip(name).examples)


def read_chip(path: str) -> Chip:
    """The chip that the file at `path` describes, in the format of those in zero_jax/xla/chips.

    Raises ValueError, with the file and the field, for what is missing, unknown or not of its type.
    """
    try:
        text = read_regular(path, MAX_FILE_BYTES).decode()
        if max(map(len, text.splitlines()), default=0) > MAX_LINE:  # tomllib takes the square of a key's length
            raise UsageError(f"target file {path} has a line of more than {MAX_LINE:,} characters: break it.")
        return _read(text, path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"target file {path} cannot be read: {error}") from error


def _check_slice(text: str, tpu: Tpu, dims: tuple[int, ...]) -> None:
    if math.prod(dims) > tpu.max_chips:
        raise UsageError(f"target {text!r}: a slice has at most {tpu.max_chips} chips")
    if any(dim > 1 and dim % block for dim, block in zip(dims, tpu.host, strict=True)):
        raise UsageError(f"target {text!r}: hosts hold {'x'.join(map(str, tpu.host))} chips, and do not divide it")


def _read(text: str, file: str) -> Chip:
    try:
        chip = _record(Chip, tomllib.loads(text), f"target file {file}")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"target file {file} is not TOML: {error}") from error
    except ValueError as error:  # an integer of thousands of digits, a date that there is not
        raise UsageError(f"target file {file} has a value that is none: {error}") from error
    if (chip.gpu is None) == (chip.tpu is None):
        raise UsageError(f"target file {file}: needs one of the tables [gpu] and [tpu]")
    if missing := sorted({"bf16", "f32"} - set(chip.peak_flops)):
        raise UsageError(f"target file {file}: field 'peak_flops.{missing[0]}' is missing")
    return chip


def _record(kind: Any, table: Mapping[str, Any], where: str, within: str = "") -> Any:
    """`table` as the dataclass `kind`; `where` and `within` are for the errors: its file, its name in there."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in table:
        if name not in fields:
            near = within + _nearest(cut(name), fields)
            raise UsageError(f"{where}: unknown field {named(within + name)}, nearest is {near!r}")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in table:
            raise UsageError(f"{where}: field {within + name!r} is missing")
    return kind(**{name: _value(fields[name].type, value, where, within + name) for name, value in table.items()})


def _value(kind: Any, value: Any, where: str, name: str) -> Any:
    """`value` of the field `name`, whose type is `kind`; numbers are positive."""
    if kind in (Gpu | None, Tpu | None) and isinstance(value, dict):
        return _record(Gpu if kind == Gpu | None else Tpu, value, where, f"{name}.")
    if kind == Mapping[str, float] and isinstance(value, dict):
        return {key: _value(float, item, where, f"{name}.{key}") for key, item in value.items()}
    if kind in (tuple[int, ...], tuple[str, ...]) and isinstance(value, list):
        return tuple(_value(int if kind == tuple[int, ...] else str, item, where, name) for item in value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or kind is not str and not value > 0:
        names = {int: "a positive whole number", float: "a positive number", str: "a text"}
        raise UsageError(f"{where}: field {named(name)} is {named(value)} and should be "
                         f"{names.get(kind, 'a table or a list')}")
    return value


@functools.cache
def _files() -> dict[str, Traversable]:
    """The files of zero_jax/xla/chips by the name of their chip."""
    folder = importlib.resources.files("zero_jax.xla") / "chips"
    return {file.name.removesuffix(".toml"): file for file in sorted(folder.iterdir(), key=lambda file: file.name)}


@functools.cache
def _chip(name: str) -> Chip:
    return _read(_files()[name].read_text(encoding="utf-8"), f"{name}.toml")


def _known() -> str:
    return f"known: {', '.join(known_targets())}"


def _nearest(word: str, words: Iterable[str]) -> str:
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]
