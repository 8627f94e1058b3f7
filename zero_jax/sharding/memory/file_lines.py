"""What a layout has in files, and what a step reads and writes there, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from zero_jax.sharding.param_access import ParamAccess
from zero_jax.tree import leaf_bytes


def file_lines(rows: Sequence[Any], layers: frozenset[str], gradients: Mapping[str, Any],
               reads: Mapping[str, ParamAccess]) -> list[str]:
    """A line for the update's traffic, and more where parameters and gradients are in files; none without files.

    rows: the `Placement` of every leaf. layers: names of the leaves that the model reads layer by layer. gradients: in
    files, by the name of the parameter, as `jax.ShapeDtypeStruct`s with shardings.
    """
    disk = [row for row in rows if row.memory == "disk"]
    if not disk:
        return []
    read = sum(row.device_bytes for row in disk if row.name.partition("/")[0] not in ("weights", "frozen"))
    written = sum(row.device_bytes for row in disk if not row.name.startswith("frozen/"))
    if not layers:
        return [f"read from and written to disk by each step: {read:,} bytes each way for each device, and a copy of "
                "the parameters that are in memory is written; two generations"]
    size = sum(row.device_bytes for row in disk if row.name in layers)
    by_layer = {name.partition("/")[2] for name in layers}
    lines = [
        f"read from and written to disk by the update: {read:,} and {written:,} bytes for each device, and a copy of "
        "the parameters that are in memory is written; two generations",
        f"parameters read from disk layer by layer: {size:,} bytes forward and as many backward for each device: "
        + ", ".join(sorted(by_layer)),
        "parameters in device memory, of no stacked layers or with small shards: "
        + (", ".join(sorted(set(reads) - by_layer)) or "none")]
    if gradients:
        size = sum(leaf_bytes(like.sharding.shard_shape(like.shape), like.dtype) for like in gradients.values())
        lines.append(f"gradients written to disk by backward, layer by layer, and read by the update: {size:,} bytes "
                     f"for each device: {', '.join(sorted(gradients))}")
    return lines
