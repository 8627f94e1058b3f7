"""Target topologies as people and clouds write them: GPUs by count, machines by type, slices by number of cores."""

import re
from collections.abc import Collection, Mapping

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
