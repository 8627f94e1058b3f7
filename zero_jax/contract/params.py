"""What a step may send for each parameter, and what it must: exact for every leaf, padding included."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

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
    traffic = [*_trainable(layout, num_microbatches), *_frozen(layout, num_microbatches)]
    keys = [(re.sub(r"\d+", "", each.name), each.size) for each in traffic]
    copies = Counter(keys)
    splits = [tuple(axes_by_dim(sharding.spec)) for sharding in _shardings(layout)]
    return tuple(dataclasses.replace(each, copies=copies[key], splits=split)
                 for each, key, split in zip(traffic, keys, splits, strict=True))


def _shardings(layout: Layout) -> list[NamedSharding]:
    """Of each gradient, and then of each frozen parameter."""
    return [*jax.tree.leaves(layout.gradients), *(leaf.sharding for leaf in jax.tree.leaves(layout.state.frozen))]


def param_pieces(layout: Layout) -> dict[int | tuple[int, ...], str]:
    """Elements of each buffer that may be sent of a parameter -> its name."""
    pieces: dict[int | tuple[int, ...], str] = {}
    state, stored_shapes = layout.state, layout.stored_shapes
    for (name, leaf), sharding, stored_shape in zip(
            [*named_leaves(state.params), *named_leaves(state.frozen)], _shardings(layout),
            [*jax.tree.leaves(stored_shapes.params), *jax.tree.leaves(stored_shapes.frozen)], strict=True):
        parts = _num_parts(leaf.shape, sharding)
        for shape in (leaf.shape, stored_shape.shape):
            pieces |= dict.fromkeys(_piece_sizes(shape, layout.reads[name], parts, layout.axes.sizes), name)
        if codes := _codes(layout, name):
            message = parts * codes.message_size
            shape = (leaf.size // (parts * codes.num_values), message)  # of all layers, and of one
            pieces |= dict.fromkeys(_piece_sizes(shape, ParamAccess((0,)), parts, layout.axes.sizes), name)
    return pieces


def _trainable(layout: Layout, num_microbatches: int) -> Iterator[ParamTraffic]:
    """What the gathers of a trainable parameter and the reduction of its gradient send."""
    stage, at_least = layout.stage, min_itemsize(layout.axes.platform)
    weights = dict(named_leaves(layout.state.params if layout.state.weights is None else layout.state.weights))
    uses = dict(named_leaves(layout.uses))  # no entry where the parameter is used as it is stored
    for (name, leaf), sharding, stored_shape in zip(
            named_leaves(layout.state.params), jax.tree.leaves(layout.gradients),
            jax.tree.leaves(layout.stored_shapes.params), strict=True):
        use, parts, tensor_size = uses.get(name), _num_parts(leaf.shape, sharding), _tensor_size(sharding, layout.axes)
        size, shards = leaf.size / tensor_size, parts // tensor_size
        dtypes = (weights[name].dtype,) * 2 if use is None else (use.dtype, use.reduce)
        read, reduce = (np.dtype(dtype).itemsize for dtype in dtypes)
        gathers = 1 - 1 / shards
        if stage.shards_params and use is not None:
            gathers = _gathers(layout, use, shards, num_microbatches)
        elif layout.disk and not stage.shards_params:
            gathers = 0.0  # after the walk over the files, by a program of its own
        replicas = layout.axes.size(*layout.axes.step_names) // parts
        scattered, summed = size * (1 - 1 / shards), 2 * size / shards * (1 - 1 / replicas)
        traffic = ParamTraffic(
            name, size, scattered if gathers else 0.0, scattered if shards > 1 else summed, read, reduce,
            gathered_bytes=size * max(read, at_least) * gathers,
            reduced_bytes=max(reduce, at_least) * (scattered + summed))
        yield _as_read(layout, stored_shape, _in_codes(layout, traffic, size / shards, gathers))


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


def _frozen(layout: Layout, num_microbatches: int) -> Iterator[ParamTraffic]:
    """Frozen parameters are gathered only."""
    at_least, uses = min_itemsize(layout.axes.platform), dict(named_leaves(layout.uses))
    for (name, leaf), stored_shape in zip(
            named_leaves(layout.state.frozen), jax.tree.leaves(layout.stored_shapes.frozen), strict=True):
        parts, tensor_size = _num_parts(leaf.shape, leaf.sharding), _tensor_size(leaf.sharding, layout.axes)
        size, itemsize = leaf.size / tensor_size, leaf.dtype.itemsize
        once, use = size * (1 - tensor_size / parts), uses.get(name)
        gathers = 0.0 if use is None or not layout.stage.shards_params else _gathers(
            layout, use, parts // tensor_size, num_microbatches)
        traffic = ParamTraffic(
            name, size, once, 0.0, itemsize, itemsize, gathered_bytes=size * gathers * max(itemsize, at_least))
        yield _as_read(layout, stored_shape, _in_codes(layout, traffic, leaf.size / parts, gathers))


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


def _as_read(layout: Layout, stored_shape: StoredShape, traffic: ParamTraffic) -> ParamTraffic:
    """`traffic`, and how the model reads the parameter."""
    access, use = layout.reads[traffic.name], dict(named_leaves(layout.uses)).get(traffic.name)
    kept = 0.0
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


def _piece_sizes(shape: Shape, access: ParamAccess, parts: int, mesh: Mapping[str, int]) -> set[int]:
    """Elements of what may be sent of a leaf: all of it or a slice of a loop, whole or sharded over some axes."""
    whole = math.prod(shape)
    loop_slice = whole // max(1, math.prod(shape[dim] for dim in access.stacked) * access.num_tiles)
    num_shards = {math.prod(sizes) for count in range(len(mesh) + 1)
                  for sizes in itertools.combinations(mesh.values(), count)}
    return {size // shards for size in (whole, loop_slice) for shards in num_shards
            if parts % shards == 0 and size // shards > 1}
