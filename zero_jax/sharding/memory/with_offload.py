"""A layout with what an `Offload` names in host memory or in files: which leaves these are, and which are too small."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from zero_jax.errors import UsageError
from zero_jax.sharding.batch import sum_dtype
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.memory.disk_leaves import with_disk
from zero_jax.sharding.memory.host_arrays import on_host
from zero_jax.sharding.memory.kinds import Offload, check_host_memory
from zero_jax.tree import leaf_bytes, map_named, named_leaves

MIN_BYTES = 1024
"""Bytes on each device of the smallest leaf that goes to the host: a copy takes about 10 microseconds, however small,
and all leaves below this are together less than 0.1 % of any model that needs offload."""

MIN_LAYER_BYTES = 4096
"""The same of stacked parameters, of each layer: every one is a copy of its own, forward and backward."""

_NO_COPY = ("the model reads the parameters as they are stored, so that there is no master copy beside them (there is "
            "one with precision=\"bf16\"; at stage 3 not with communication=, gather= or another dtype of reduction)")


def with_offload(layout: Layout, offload: Offload | None) -> Layout:
    """`layout` with what `offload` names in host memory or in files.

    A pure function, so that init, step and restore agree. Raises ValueError where nothing of the state would be there.
    """
    if offload is None:
        return layout
    if offload.disk is None:
        check_host_memory(layout.axes)
    has_copy = layout.state.weights is not None
    if offload.master == "host" and not has_copy:
        raise UsageError(f"Offload(master=\"host\") at stage {layout.stage.number}: {_NO_COPY}: leave master out.")
    master = offload.master or "host"
    parameters = {"frozen": offload.parameters, "weights" if has_copy else "params": offload.parameters}
    fields = {"opt_state": offload.optimizer, "ema": offload.optimizer, **({"params": master} if has_copy else {}),
              **parameters}

    def is_large(name: str, leaf: Any) -> bool:
        field, _, param = name.partition("/")
        shard_bytes = leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        if field in parameters and (stacked := layout.reads[param].stacked):
            if _is_row_of_tiles(layout, leaf.shape, leaf.dtype):
                return False
            return shard_bytes >= MIN_LAYER_BYTES * math.prod(leaf.shape[dim] for dim in stacked)
        return jnp.issubdtype(leaf.dtype, jnp.number) and len(leaf.shape) > 0 and shard_bytes >= MIN_BYTES

    sizes = {name: leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
             for name, leaf in named_leaves(layout.state)
             if fields.get(name.split("/")[0]) == "host" and is_large(name, leaf)}
    host = shared(sizes, layout, offload.fraction) if offload.fraction < 1 else frozenset(sizes)
    if not host:
        raise UsageError(
            f"offload: no leaf of this state would be in host memory at stage {layout.stage.number}: "
            f"{_why_none(layout, offload)}: leave offload out.")
    if offload.disk is not None:
        return with_disk(layout, host)
    gradients = _gradients_in_host_memory(layout, offload) if offload.gradients == "host" else {}
    return dataclasses.replace(layout, host=host, host_gradients=gradients, state=map_named(
        lambda name, leaf: leaf.update(sharding=on_host(leaf.sharding)) if name in host else leaf, layout.state))


def _is_row_of_tiles(layout: Layout, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether a layer of a stack is a row of vectors of less than four bytes, of which XLA:TPU reads no part.

    Rows share a word then: "Sublane slicing size must be multiple of element packing factor" (libtpu 0.0.42.1).
    """
    return layout.axes.is_tpu and len(shape) < 3 and jnp.dtype(dtype).itemsize < 4


def _gradients_in_host_memory(layout: Layout, offload: Offload) -> dict[str, int]:
    """Bytes on each device of the gradients that go down layer by layer; raises ValueError where none does.

    Small stacks stay on the device: the update would bring them up whole, and XLA:GPU left such a stack on the device
    (0.5 MB, biases of 1T parameters). Above an eighth of the buffer the update reads blocks, whatever the states are.
    On TPUs stacks of vectors stay, too: a layer of one is a row of its tiles, and a part of a tile cannot be written.
    """
    smallest = offload.block_bytes(layout.axes.built_for) // 8
    smallest_dims = 3 if layout.axes.is_tpu else 2
    uses, shardings = dict(named_leaves(layout.uses)), dict(named_leaves(layout.gradients))

    def dtype_of(name: str, leaf: Any) -> Any:
        dtype = uses[name].reduce if name in uses else leaf.dtype
        return dtype if layout.microbatches == 1 else sum_dtype(dtype)

    sizes = {name: leaf_bytes(shardings[name].shard_shape(leaf.shape), dtype_of(name, leaf))
             for name, leaf in named_leaves(layout.state.params)}
    gradients = {name: sizes[name] for name, leaf in named_leaves(layout.state.params)
                 if layout.reads[name].stacked == (0,) and smallest < sizes[name] >= MIN_LAYER_BYTES * leaf.shape[0]
                 and len(leaf.shape) >= smallest_dims}
    if not gradients:
        raise UsageError(
            "Offload(gradients=\"host\"): gradients go down as a loop over layers makes them, and none of this model's "
            "loops over stacked layers (nn.scan, nnx.scan) has a parameter whose gradients take more than "
            f"{smallest:,} bytes on each device (an eighth of buffer_bytes), and {MIN_LAYER_BYTES:,} for each layer: "
            "stack the layers, or leave gradients out.")
    return gradients


def _why_none(layout: Layout, offload: Offload) -> str:
    if offload.optimizer == "device" and layout.state.weights is None:
        return _NO_COPY
    return f"the optimizer keeps no array of {MIN_BYTES:,} bytes on a device or more"


def shared(sizes: Mapping[str, int], layout: Layout, fraction: float) -> frozenset[str]:
    """`share_of` the leaves of so many bytes, all that belong to a parameter together.

    A block of an update with a moment on the host and one on the device has copies of the latter: 64.6 MiB of
    temporaries where all on either side have 41 and 28 (four matrices of 4096 x 2048 and less, two H100).
    """
    params = [name for name, _ in named_leaves(layout.state.params)]
    owner = {name: max((param for param in params if name.endswith(f"/{param}")), key=len, default=name)
             for name in sizes}
    groups = dict[str, int]()
    for name, size in sizes.items():
        groups[owner[name]] = groups.get(owner[name], 0) + size
    share = share_of(groups, fraction)
    return frozenset(name for name in sizes if owner[name] in share)


def share_of(sizes: Mapping[str, int], fraction: float) -> frozenset[str]:
    """Names that are at least that fraction of all bytes: the largest that fit into it, and one more.

    sizes: bytes of each. A pure function, so that each process and each restart takes the same.
    """
    wanted, share = fraction * sum(sizes.values()), dict[str, int]()
    by_size = sorted(sizes, key=lambda name: (-sizes[name], name))
    for name in by_size:
        if sum(share.values()) + sizes[name] <= wanted:
            share[name] = sizes[name]
    if (rest := wanted - sum(share.values())) > 0:
        completing = next(name for name in reversed(by_size) if name not in share and sizes[name] >= rest)
        for name in list(share):  # what is not needed beside it
            if sum(share.values()) - sizes[name] + sizes[completing] >= wanted:
                del share[name]
        share[completing] = sizes[completing]
    return frozenset(share)
