"""What a step may send for each parameter, and what it must: exact for every leaf, padding included."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zero_jax.contract.report import ParamTraffic
from zero_jax.gather.gather import ParamUse, compute_spec
from zero_jax.gather.quantized.gather import GatherCodes
from zero_jax.gather.quantized.reduce import sent_bytes
from zero_jax.layout.layout import Layout
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.sharding.partition import axes_by_dim, parts_of
from zero_jax.sharding.stored_shape import StoredShape
from zero_jax.tree import named_leaves
from zero_jax.typing import Shape


def min_itemsize(platform: str) -> int:
    """Bytes of the narrowest element that is sent: XLA:CPU sends bfloat16 as float32."""
    return 4 if platform == "cpu" else 1


def param_traffic(layout: Layout, num_microbatches: int = 1) -> tuple[ParamTraffic, ...]:
    """Of each parameter of `layout`, the trainable ones first."""
    traffic = list(_traffic(layout, num_microbatches))
    keys = [(re.sub(r"\d+", "", each.name), each.size) for each in traffic]
    copies = Counter(keys)
    splits = [tuple(axes_by_dim(sharding.spec)) for _, _, sharding, _ in _leaves(layout)]
    return tuple(dataclasses.replace(each, copies=copies[key], splits=split)
                 for each, key, split in zip(traffic, keys, splits, strict=True))


def _leaves(layout: Layout) -> list[tuple[str, Any, NamedSharding, StoredShape]]:
    """(Name, leaf, its gradient's sharding, or its own, stored shape) of each parameter, the trainable ones first."""
    state, stored = layout.state, layout.stored_shapes
    shardings = [*jax.tree.leaves(layout.gradients), *(leaf.sharding for leaf in jax.tree.leaves(state.frozen))]
    return [(*pair, sharding, stored_shape) for pair, sharding, stored_shape in zip(
        [*named_leaves(state.params), *named_leaves(state.frozen)], shardings,
        [*jax.tree.leaves(stored.params), *jax.tree.leaves(stored.frozen)], strict=True)]


def param_buffers(layout: Layout) -> dict[int | tuple[int, ...], str]:
    """Elements of each buffer that may be sent of a parameter -> its name."""
    buffers: dict[int | tuple[int, ...], str] = {}
    for name, leaf, sharding, stored_shape in _leaves(layout):
        parts = _num_parts(leaf.shape, sharding)
        for shape in (leaf.shape, stored_shape.shape):
            buffers |= dict.fromkeys(_buffer_sizes(shape, layout.reads[name], parts, layout.axes.sizes), name)
        if codes := _codes(layout, name):
            message = parts * codes.message_size
            shape = (leaf.size // (parts * codes.num_values), message)  # of all layers, and of one
            buffers |= dict.fromkeys(_buffer_sizes(shape, ParamAccess((0,)), parts, layout.axes.sizes), name)
    return buffers


def _traffic(layout: Layout, num_microbatches: int) -> Iterator[ParamTraffic]:
    """What the gathers of each parameter send, and the reduction of its gradient; frozen ones are gathered only."""
    stage, at_least = layout.stage, min_itemsize(layout.axes.platform)
    weights = dict(named_leaves(layout.state.params if layout.state.weights is None else layout.state.weights))
    uses = dict(named_leaves(layout.uses))  # no entry where the parameter is used as it is stored
    frozen = dict(named_leaves(layout.state.frozen))
    for name, leaf, sharding, stored_shape in _leaves(layout):
        use, parts, tensor_size = uses.get(name), _num_parts(leaf.shape, sharding), _tensor_size(sharding, layout.axes)
        size, shards = leaf.size / tensor_size, parts // tensor_size
        scattered, gathers = size * (1 - 1 / shards), 0.0
        if stage.shards_params and use is not None:
            gathers = _gathers(layout, use, shards, num_microbatches)
        elif name not in frozen and (stage.shards_params or not layout.disk):  # else by a program after the files' walk
            gathers = 1 - 1 / shards
        if name in frozen:
            read = reduce = leaf.dtype.itemsize
            traffic = ParamTraffic(name, size, scattered, 0.0, read, reduce)
        else:
            dtypes = (weights[name].dtype,) * 2 if use is None else (use.dtype, use.reduce)
            read, reduce = (np.dtype(dtype).itemsize for dtype in dtypes)
            replicas = layout.axes.size(*layout.axes.step_names) // parts
            summed = 2 * size / shards * (1 - 1 / replicas)
            traffic = ParamTraffic(
                name, size, scattered if gathers else 0.0, scattered if shards > 1 else summed, read, reduce,
                reduced_bytes=max(reduce, at_least) * (scattered + summed))
        traffic = dataclasses.replace(traffic, gathered_bytes=size * max(read, at_least) * gathers)
        yield _as_read(layout, use, stored_shape, _in_codes(layout, traffic, size / shards, gathers))


def _gathers(layout: Layout, use: ParamUse, shards: int, num_microbatches: int) -> float:
    """What a step of stage 3 sends to gather a parameter that is in `shards`, over its size.

    Each microbatch gathers it forward and backward, or in forward alone, or the step does so once for all of them; in
    part, where the copy stays sharded over the hpZ axes. Tiles of a checkpointed product may be gathered once more in
    backward, since those that compute its result again are gone when its gradient is computed.
    """
    whole, within = 1 - 1 / shards, 1 - 1 / parts_of(use.stored, {
        name: layout.axes.size(name) for name in use.secondary or layout.axes.zero})
    if layout.kept_bytes:
        return num_microbatches * whole
    if layout.step_weights is None:
        again = use.tiles is not None and layout.reads[use.tiles.name].checkpointed
        return num_microbatches * (whole + within + again * whole)
    if not use.secondary:
        return whole
    return whole - within + num_microbatches * 2 * within


def _in_codes(layout: Layout, traffic: ParamTraffic, shard: float, gathers: float) -> ParamTraffic:
    """`traffic`, where the parameter or its gradient is quantised: messages of `shard` values are sent.

    gathers: which share of the whole parameter a device sends for all gathers of a step.
    """
    quantized = layout.quantized
    if quantized is None:
        return traffic
    name, axes = traffic.name, layout.axes
    if codes := _codes(layout, name):
        whole = shard / codes.num_values * axes.zero_size * codes.message_bytes
        traffic = dataclasses.replace(traffic, gathers_codes=True, gathered=whole * traffic.gathered / traffic.size,
                                      gathered_bytes=whole * gathers)
    if name in quantized.gradients:
        num_values = int(shard) // quantized.layers[name]
        sent = quantized.layers[name] * sum(each for _, each in sent_bytes(num_values, axes, quantized.hops))
        traffic = dataclasses.replace(traffic, reduces_codes=True, reduced=sent, reduced_bytes=sent)
    return traffic


def _codes(layout: Layout, name: str) -> GatherCodes | None:
    """How the messages of a parameter are made, of each layer, or of each tile of one."""
    codes = None if layout.quantized is None else layout.quantized.gathers.get(name)
    tiles = None if codes is None else dict(named_leaves(layout.uses))[name].tiles
    return codes if codes is None or tiles is None else codes.tile(tiles.dim, tiles.count)


def _as_read(layout: Layout, use: ParamUse | None, stored_shape: StoredShape, traffic: ParamTraffic) -> ParamTraffic:
    """`traffic`, and how the model reads the parameter."""
    access, kept = layout.reads[traffic.name], 0.0
    if access.tiles and use is not None and use.copies:
        kept = traffic.size / parts_of(use.stored, {name: layout.axes.size(name) for name in use.secondary})
    return dataclasses.replace(
        traffic, slices=math.prod(stored_shape.shape[dim] for dim in access.stacked) * access.num_tiles,
        tiles=access.num_tiles, kept=kept, is_read=access.count > 0,
        up_front=access.on_entry or access.on_entry_if_padded and not stored_shape.is_identity)


def _num_parts(shape: Shape, sharding: NamedSharding) -> int:
    """Into how many parts a leaf is sharded."""
    return math.prod(shape) // max(1, math.prod(sharding.shard_shape(tuple(shape)))) or 1


def _tensor_size(sharding: NamedSharding, axes: MeshAxes) -> int:
    """Into how many parts tensor parallelism splits a leaf."""
    return axes.tensor_size if any(entry is not None for entry in compute_spec(sharding.spec, axes)) else 1


def _buffer_sizes(shape: Shape, access: ParamAccess, parts: int, mesh: Mapping[str, int]) -> set[int]:
    """Elements of what may be sent of a leaf: all of it or a slice of a loop, whole or sharded over some axes."""
    whole = math.prod(shape)
    loop_slice = whole // max(1, math.prod(shape[dim] for dim in access.stacked) * access.num_tiles)
    num_shards = {math.prod(sizes) for count in range(len(mesh) + 1)
                  for sizes in itertools.combinations(mesh.values(), count)}
    return {size // shards for size in (whole, loop_slice) for shards in num_shards
            if parts % shards == 0 and size // shards > 1}
