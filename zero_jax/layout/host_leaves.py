"""What a layout has in host memory, and what a step moves from and to it, in bytes and in words."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zero_jax.sharding.param_access import ParamAccess


def param_bytes_of(rows: Sequence[Any], params: Collection[str]) -> int:
    """Bytes for each device of the parameters `params`, which the model reads from host memory.

    rows: the `Placement` of every leaf.
    """
    return sum(row.device_bytes for row in _read_rows(rows, params))


def update_bytes_of(rows: Sequence[Any]) -> tuple[int, int]:
    """Bytes for each device that the update reads from host memory, and that it writes there."""
    fields = [(row.name.partition("/")[0], row.device_bytes) for row in rows if row.memory == "host"]
    read = sum(size for field, size in fields if field not in ("weights", "frozen"))
    return read, sum(size for field, size in fields if field != "frozen")


_ROWS = ", or stacks of vectors, whose layers are parts of a TPU's tiles"


def host_lines(rows: Sequence[Any], params: Collection[str], reads: Mapping[str, ParamAccess], *, tiled: bool = False
               ) -> list[str]:
    """A line for the update's traffic, and two for the parameters `params` that the model reads from host memory.

    tiled: on TPUs.
    """
    read, written = update_bytes_of(rows)
    lines = [f"read from and written to host memory by the update: {read:,} and {written:,} bytes for each device"]
    if params:
        by_layer = sorted(name for name in params if reads[name].stacked)
        whole = sorted(set(params).difference(by_layer))
        lines.append(
            f"parameters read from host memory by each microbatch: {param_bytes_of(rows, params):,} bytes forward and "
            f"as many backward for each device; layer by layer: {', '.join(by_layer) or 'none'}; whole: "
            f"{', '.join(whole) or 'none'}")
        small = sorted(set(reads).difference(params))
        lines.append(f"parameters in device memory, since their shards are small{_ROWS * tiled}: "
                     f"{', '.join(small) or 'none'}")
    return lines


def gradient_lines(gradients: Mapping[str, int], reads: Mapping[str, ParamAccess], microbatches: int = 1, *,
                   tiled: bool = False) -> list[str]:
    """Two lines for gradients in host memory, whose bytes `gradients` has; none where it is empty; tiled: on TPUs."""
    if not gradients:
        return []
    size, others = sum(gradients.values()), sorted(set(reads).difference(gradients))
    written = f"{size:,} bytes for each device"
    if microbatches > 1:
        written = (f"sums over microbatches, of which each of {microbatches} reads and writes {size:,} bytes for each "
                   f"device, {microbatches * size:,} each way in a step")
    return [f"gradients written to host memory by backward, layer by layer: {written}, which the update reads, and "
            f"once more where a global norm scales them: {', '.join(sorted(gradients))}",
            f"gradients in device memory, of no stacked layers or with small shards{_ROWS * tiled}: "
            f"{', '.join(others) or 'none'}"]


def _read_rows(rows: Sequence[Any], params: Collection[str]) -> list[Any]:
    has_copy = any(row.name.startswith("weights/") for row in rows)
    fields = ("weights" if has_copy else "params", "frozen")
    return [row for row in rows if row.memory == "host" and row.name.partition("/")[0] in fields
            and row.name.partition("/")[2] in params]
