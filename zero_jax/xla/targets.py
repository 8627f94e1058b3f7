"""Target topologies by name: slices and hosts of the chips of `xla.chip`, known before JAX starts."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from zero_jax.errors import UsageError, printable
from zero_jax.xla.chip import Chip, Tpu, built_in, chip_files, nearest, read_chip

MAX_GPUS = 1 << 17

CHIPS = {
    "a100": "a100-80gb", "a100-80": "a100-80gb", "a100-40": "a100-40gb", "v100": "v100-32gb", "v5litepod": "v5e",
    "trillium": "v6e", "v7x": "tpu7x", "ironwood": "tpu7x"}
"""Another name of a chip -> its own; of A100 and V100 the one with the more common memory."""

MACHINES = {
    r"a2-highgpu-([1248])g": "a100-40gb", r"a2-ultragpu-([1248])g": "a100-80gb", r"a3-highgpu-([1248])g": "h100",
    r"a3-(?:mega|edge)gpu-(8)g": "h100", r"a3-ultragpu-(8)g": "h200", r"a4-highgpu-(8)g": "b200",
    r"p3dn\.24xlarge": "v100-32gb", r"p4d\.24xlarge": "a100-40gb", r"p4de\.24xlarge": "a100-80gb",
    r"p5\.48xlarge": "h100", r"p5en?\.48xlarge": "h200", r"p6-b200\.48xlarge": "b200",
    r"(?:standard_)?nd96asr_v4": "a100-40gb", r"(?:standard_)?nd96amsr_a100_v4": "a100-80gb",
    r"(?:standard_)?nd96isr_h100_v5": "h100", r"(?:standard_)?nd96isr_h200_v5": "h200"}
"""The type of a machine of Google Cloud, AWS or Azure -> its GPUs: as many as its name says, else 8 (their pages)."""

CORES = {"v4": 2, "v5p": 2, "v5e": 1, "v6e": 1}
"""TPU -> what Google's accelerator types count of each chip: v5p-256 has 128 chips, v6e-256 has 256."""


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

    `h100:8`, `h100:16x8` (hosts x GPUs per host), `v5p:4x4x8` (a torus), or `./mychip.toml:4x8` with a chip file; or in
    another way of `canonical`, as `8xH100`, `p5.48xlarge`, `v5p-256`. The target is named in
    the first.

    Raises ValueError for an unknown chip, impossible dims, or a file that does not describe a chip.
    """
    if not isinstance(text, str):
        raise UsageError(f"target={printable(repr(text))}: give a text, as \"h100:8\"; {_known()}")
    if not text.partition(":")[0].endswith(".toml"):
        text = canonical(text, {name: gpu.gpus_per_host for name in chip_files() if (gpu := built_in(name).gpu)},
                         chip_files())
    name, _, size = text.rpartition(":") if ":" in text else (text, "", "")
    if name not in chip_files() and not name.endswith(".toml"):
        near = nearest(name, [known for known in chip_files() if known.startswith(name)] or chip_files())
        raise UsageError(f"unknown target {text!r}, nearest is {nearest(text, built_in(near).examples)!r}; {_known()}")
    chip = read_chip(name) if name.endswith(".toml") else built_in(name)
    forms = chip.forms(name)
    dims = tuple(int(dim) if dim.isdecimal() else 0 for dim in size.split("x"))
    if len(dims) not in [form.removeprefix(name).count("x") + 1 for form in forms] or min(dims) < 1:
        near = f"nearest is {nearest(text, chip.examples)!r}; {_known()}" if chip.examples else _known()
        raise UsageError(f"target {text!r} is not written as {' or '.join(forms)}, {near}")
    if chip.tpu:
        _check_slice(text, chip.tpu, dims)
        return Target(text, chip, dims)
    hosts, gpus = (1, *dims)[-2:]
    if chip.gpu and gpus > chip.gpu.gpus_per_host:
        raise UsageError(f"target {text!r}: a host has at most {chip.gpu.gpus_per_host} GPUs; write it as {forms[1]}")
    if hosts * gpus > MAX_GPUS:
        raise UsageError(f"target {text!r}: a target has at most {MAX_GPUS} GPUs")
    return Target(text, chip, (hosts, gpus))


def known_targets() -> tuple[str, ...]:
    """One or two targets of each chip; other sizes are written alike."""
    return tuple(example for name in chip_files() for example in built_in(name).examples)


def targets_text() -> str:
    """The chips that there are files of, with their memory and how their targets are written, a line for each."""
    chips = {name: built_in(name) for name in chip_files()}
    return "\n".join(f"{name}: {chip.name}, {chip.memory_bytes / 2**30:.1f} GiB; {' or '.join(chip.forms(name))}, as "
                     f"{', '.join(chip.examples)}" for name, chip in chips.items())


def _check_slice(text: str, tpu: Tpu, dims: tuple[int, ...]) -> None:
    if math.prod(dims) > tpu.max_chips:
        raise UsageError(f"target {text!r}: a slice has at most {tpu.max_chips} chips")
    if any(dim > 1 and dim % block for dim, block in zip(dims, tpu.host, strict=True)):
        raise UsageError(f"target {text!r}: hosts hold {'x'.join(map(str, tpu.host))} chips, and do not divide it")


def _known() -> str:
    return f"known: {', '.join(known_targets())}"


def canonical(text: str, hosts: Mapping[str, int], chips: Collection[str]) -> str:
    """`text` as CHIP:DIMS where it is one of the other ways to write a target, else as it is.

    `8xH100`, `H100:8` and `p5.48xlarge` are `h100:8`; `16x8xH100` and `16xa3-megagpu-8g` are `h100:16x8`; `h100` is a
    host of them; `v5p-256` is `v5p:4x4x8`.

    hosts: chip -> how many a full host has, of GPUs. chips: all that are known.
    """
    written = re.sub(r"\s+", "", text.lower())
    for pattern, chip in MACHINES.items():
        if found := re.fullmatch(rf"(?:(\d+)x)?{pattern}(?::(\d+))?", written):
            first, *count, last = found.groups()
            number = first or last
            return f"{chip}:" + (f"{number}x" if number else "") + (count[0] if count else "8")
    if found := re.fullmatch(r"([a-z0-9]+)-(\d+)", written):
        chip, count = CHIPS.get(found[1], found[1]), int(found[2])
        if chip in CORES and (dims := _torus(chip, count)):
            return f"{chip}:{dims}"
    if found := re.fullmatch(r"(\d+(?:x\d+)?)x?([a-z].*)", written):
        name, dims = found[2], found[1]
    elif found := re.fullmatch(r"(.+?)(?:[:x](\d+(?:x\d+)*))?", written):
        name, dims = found.groups()
    else:
        return text
    chip = CHIPS.get(name, name)
    if chip not in chips:
        return text
    if dims is None:
        return f"{chip}:{hosts[chip]}" if chip in hosts else text
    if chip in hosts and written[0].isdecimal() and dims.isdecimal() and int(dims) > hosts[chip]:
        full, rest = divmod(int(dims), hosts[chip])
        dims = dims if rest else f"{full}x{hosts[chip]}"
    return f"{chip}:{dims}"


def _torus(chip: str, count: int) -> str:
    """The dims of the slice that an accelerator type names by its number; empty where none has that many."""
    size, rest = divmod(count, CORES[chip])
    if rest or size < 1 or size & (size - 1):
        return ""
    doubled = size.bit_length() - 1
    if CORES[chip] == 2:
        return "" if doubled < 2 else "2x2x1" if doubled == 2 else "x".join(
            str(2 ** ((doubled + place) // 3)) for place in range(3))
    return f"{2 ** (doubled // 2)}x{2 ** (doubled - doubled // 2)}"
