"""Kinds of devices as data files: memory, rates, links, and what their compilers need; known before JAX starts."""

import dataclasses
import difflib
import functools
import importlib.resources
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources.abc import Traversable
from typing import Any

from zero_jax.errors import UsageError, cut, named
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
class Rates:
    """The share of a chip's figures that its programs reach. Defaults are typical of large arrays, and not fitted.

    Raises UsageError for a share above 1.
    """

    matmul: float = 0.75
    """Of the peak FLOP/s, of products that are not listed: cuBLAS on large ones has 0.7 to 0.8 on A100 and V100."""
    hbm: float = 0.85
    """Of the HBM's bandwidth: a copy has 0.85 to 0.9."""
    links: float = 0.8
    """Of the links' bandwidth: nccl-tests report 0.8 of NVLink (all-reduce, DGX-2 and DGX H100)."""
    ring: float = math.inf
    """Bytes/s of the network for a group that crosses hosts, at most; inf: the bandwidth of `Target.link`."""
    launch: float = 0.0
    """Seconds that a kernel takes before its first byte."""
    band: tuple[float, ...] = ()
    """Seconds of published steps over those predicted, least and most of nine in ten that calibrated nothing; ():
    none was compared (scripts/tables/published.py)."""
    products: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """`matmul` by dtype, and as "bf16 odd" of those whose rows fill no 16 bytes."""
    attention: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict, hash=False)
    """By head dim and direction, as "64 forward": the share s and the length h, of a rate of s x length / (length + h)
    of the peak; FLOPs are of the pairs that a causal mask leaves. Of the nearest head dim where it is not listed."""

    def __post_init__(self):
        shares = {"matmul": self.matmul, "hbm": self.hbm, "links": self.links, **self.products}
        shares |= {name: (values[0] if len(values) == 2 else math.inf) for name, values in self.attention.items()}
        for name, share in shares.items():
            if not 0 < share <= 1:
                raise UsageError(f"rates: {name!r} is {share} of the peak: give a share of at most 1; attention is "
                                 "written as [share, length].")
        if self.band and not (len(self.band) == 2 and self.band[0] <= self.band[1]):
            raise UsageError(f"rates: 'band' is {list(self.band)}: give least and most, over predicted seconds.")
        if wrong := [name for name in self.attention if not re.fullmatch(r"\d+ (forward|backward)", name)]:
            raise UsageError(f"rates: attention {wrong[0]!r} is not written as \"64 forward\" or \"64 backward\".")

    def of_peak(self, dtype: str, kernel: str = "", length: int = 0) -> float:
        """The share of the peak FLOP/s of `dtype`; kernel, length: those of `zero_jax.xla.events.Work`."""
        if not length or not self.attention:
            return self.products.get(f"{dtype} {kernel}", self.products.get(dtype, self.matmul))
        head_dim, direction = kernel.split()
        listed = [name for name in self.attention if name.endswith(direction)] or list(self.attention)
        share, half = self.attention[min(listed, key=lambda name: abs(int(name.split()[0]) - int(head_dim)))]
        return share * length / (length + half)


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
    host_link_bandwidth: float = 0.0
    """Between the device and its host's memory, in bytes/s per direction; 0: not known."""
    host_memory_bandwidth: float = 0.0
    """A device's share of its host's memory bandwidth, reads and writes together, in bytes/s; 0: not known."""
    disk_bytes: int = 0
    """A device's share of the disks of its host; 0: its host has none of its own, or they are not known."""
    disk_read_bandwidth: float = 0.0
    """Of that share, in bytes/s, where nothing is written at the same time; 0: not known."""
    disk_write_bandwidth: float = 0.0
    """The same of writes, where nothing is read."""
    rates: Rates = Rates()
    """What its programs reach of these figures; in a file also the name of a chip whose rates these are."""
    gpu: Gpu | None = None
    tpu: Tpu | None = None
    examples: tuple[str, ...] = ()
    """Targets that the tests compile for."""
    kind: str = ""
    """`jax.Device.device_kind` where that is not `name`."""
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


def _read(text: str, file: str) -> Chip:
    try:
        chip = _record(Chip, tomllib.loads(text), f"target file {file}")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"target file {file} is not TOML: {error}") from error
    except UsageError:
        raise
    except ValueError as error:  # an integer of thousands of digits, a date that there is not
        raise UsageError(f"target file {file} has a value that is none: {error}") from error
    if (chip.gpu is None) == (chip.tpu is None):
        raise UsageError(f"target file {file}: needs one of the tables [gpu] and [tpu]")
    if missing := sorted({"bf16", "f32"} - set(chip.peak_flops)):
        raise UsageError(f"target file {file}: field 'peak_flops.{missing[0]}' is missing")
    return chip


_LENGTHS = Mapping[str, tuple[float, ...]]


def _record(kind: Any, table: Mapping[str, Any], where: str, within: str = "") -> Any:
    """`table` as the dataclass `kind`; `where` and `within` are for the errors: its file, its name in there."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in table:
        if name not in fields:
            near = within + nearest(cut(name), fields)
            raise UsageError(f"{where}: unknown field {named(within + name)}, nearest is {near!r}")
    for name, field in fields.items():
        if field.default is field.default_factory is dataclasses.MISSING and name not in table:
            raise UsageError(f"{where}: field {within + name!r} is missing")
    values = {name: _value(fields[name].type, value, where, within + name) for name, value in table.items()}
    try:
        return kind(**values)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _value(kind: Any, value: Any, where: str, name: str) -> Any:
    """`value` of the field `name`, whose type is `kind`; numbers are positive."""
    if kind == Rates and str(value) in chip_files():
        return dataclasses.replace(built_in(str(value)).rates, band=())
    if (record := {Gpu | None: Gpu, Tpu | None: Tpu, Rates: Rates}.get(kind)) and isinstance(value, dict):
        return _record(record, value, where, f"{name}.")
    if (item := {Mapping[str, float]: float, _LENGTHS: tuple[float, ...]}.get(kind)) and isinstance(value, dict):
        return {key: _value(item, each, where, f"{name}.{key}") for key, each in value.items()}
    if (item := {tuple[each, ...]: each for each in (int, str, float)}.get(kind)) and isinstance(value, list):
        return tuple(_value(item, each, where, name) for each in value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or kind is not str and not value > 0:
        names = {int: "a positive whole number", float: "a positive number", str: "a text",
                 Rates: "a table, or the name of a chip that has one"}
        raise UsageError(f"{where}: field {named(name)} is {named(value)} and should be "
                         f"{names.get(kind, 'a table or a list')}")
    return value


@functools.cache
def chip_files() -> dict[str, Traversable]:
    """The files of zero_jax/xla/chips by the name of their chip."""
    folder = importlib.resources.files("zero_jax.xla") / "chips"
    return {file.name.removesuffix(".toml"): file for file in sorted(folder.iterdir(), key=lambda file: file.name)}


@functools.cache
def built_in(name: str) -> Chip:
    """The chip that is called `name` in targets: one of `chip_files`."""
    return _read(chip_files()[name].read_text(encoding="utf-8"), f"{name}.toml")


def named_chip(name: str) -> Chip:
    """The chip of that name in targets, or of the file at a path that ends in .toml; raises UsageError for others."""
    if name in chip_files():
        return built_in(name)
    if not name.endswith(".toml"):
        raise UsageError(f"chip={name} is not known: give a chip file, or one of {', '.join(chip_files())}.")
    return read_chip(name)


def nearest(word: str, words: Iterable[str]) -> str:
    """The one of `words` that is most like `word`."""
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]
