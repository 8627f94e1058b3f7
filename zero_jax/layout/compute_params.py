"""The compute copy of the weights: gathered from the master weights, in the compute dtype.

Stages 0 to 2 store one. A step of stage 3 may make one for its microbatches (`step_weights`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import dynamic_update_slice_in_dim, slice_in_dim
from jax.lax import optimization_barrier as barrier
from jax.sharding import PartitionSpec as P

from zero_jax.gather.gather import compute_spec, gather_sequence, gathered
from zero_jax.gather.quantized.gather import GatherCodes
from zero_jax.layout.layout import Layout
from zero_jax.layout.slices import on_one_slice
from zero_jax.sharding.mesh import constrain
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.partition import names_of
from zero_jax.tree import leaf_bytes, map_named, named_leaves

MAX_GATHER_BYTES = 2**30
"""Bytes of a leaf that are gathered at a time: what XLA gathers along a minor dim is in a transposed buffer first."""

LONG_AXIS = 16
"""Chips of a mesh axis from which on what is gathered over all others is small: a 16th of the weights at most."""


def gather_compute_params(params: Any, layout: Layout, donated: Any = None) -> Any:
    """The compute weights from the master weights `params`, which are sharded as gradients; None if there is no copy.

    Each shard is cast or quantised before it is gathered, so that the compute dtype or codes are sent. A stack of
    layers of more than `MAX_GATHER_BYTES` bytes per device is gathered some layers at a time into the donated previous
    copy `donated`, so that no buffer grows with depth (the paper's C_B).
    """
    if layout.state.weights is None:
        return None
    if (one := layout.one_slice) is not None:
        each = jax.vmap(lambda *trees: gather_compute_params(trees[0], one, *trees[1:]), spmd_axis_name=one.axes.slices)
        return each(params, *[] if donated is None else [donated])
    return gather_copy(params, layout.gradients, layout.state.weights, layout.stored_shapes.params, layout, donated)


def gather_stored_params(params: Any, layout: Layout, old: Any) -> Any:
    """`params`, sharded as gradients, gathered into `old` where the state stores them whole, and in chunks.

    At stages 1 and 2 without a copy in a narrower dtype. Else `params` as they are.
    """
    if not layout.gathers_in_chunks or layout.state.weights is not None:
        return params
    return gather_copy(params, layout.gradients, layout.state.params, layout.stored_shapes.params, layout, old)


def gather_copy(params: Any, shards: Any, likes: Any, stored_shapes: Any, layout: Layout, donated: Any = None) -> Any:
    """`params`, of the shardings `shards`, cast and gathered to be as `likes`; see `gather_compute_params`."""
    in_chunks = _gathered_chunks(params, shards, likes, layout, donated) if layout.gathers_in_chunks else {}

    def copy(name: str, param: jax.Array, shard: Any, like: Any, stored_shape: Any, donated: Any = None) -> jax.Array:
        if name in in_chunks:
            return constrain(in_chunks[name], layout.mesh, like.sharding.spec)
        codes = _codes(name, layout) if like.sharding.spec != shard.spec else None  # a sharded copy gathers nothing
        layers, target = stored_shape.identity_dim(layout.reads[name].stacked), compute_spec(shard.spec, layout.axes)
        param = param if codes is not None else param.astype(like.dtype)
        if layers is None or shard.spec == target or like.sharding.spec != target:  # no slices, or no whole weights
            return whole(param, shard.spec, codes, like)
        iterations = _iterations(like.shape[layers], leaf_bytes(like.sharding.shard_shape(like.shape), like.dtype))
        if iterations == 1:
            return whole(param, shard.spec, codes, like)
        donated = jnp.zeros(like.shape, like.dtype) if donated is None else donated
        return _gather_iterations(param, donated, layout.axes, shard.spec, layers, iterations, codes)

    def whole(param: jax.Array, spec: P, codes: GatherCodes | None, like: Any) -> jax.Array:
        return constrain(_from_all(param, layout.axes, spec, like.sharding.spec, codes, like.dtype), layout.mesh,
                         like.sharding.spec)

    return map_named(copy, params, shards, likes, stored_shapes, *[] if donated is None else [donated])


def _from_all(param: jax.Array, axes: MeshAxes, spec: P, target: P, codes: GatherCodes | None = None, dtype: Any = None
              ) -> jax.Array:
    """`param`, sharded by `spec`, gathered to be sharded by `target`; from codes whole, in `dtype`."""
    kept, after = [name for name in names_of(target) if name != axes.tensor], target
    if codes is not None:
        kept, after = [], compute_spec(spec, axes)

    def fun(shard: jax.Array) -> jax.Array:
        return gathered(shard, axes, spec, kept) if codes is None else _by_codes(shard, axes, codes, dtype)

    return jax.shard_map(on_one_slice(fun, axes), mesh=axes.mesh, in_specs=spec, out_specs=after, check_vma=False)(
        param)


def _by_codes(shard: jax.Array, axes: MeshAxes, codes: GatherCodes, dtype: Any) -> jax.Array:
    return codes.decode(gathered(codes.encode_shard(shard), axes, codes.sent), dtype, split=(axes.tensor,))


def _codes(name: str, layout: Layout) -> GatherCodes | None:
    return None if layout.quantized is None else layout.quantized.gathers.get(name)


def _gathered_chunks(params: Any, shards: Any, likes: Any, layout: Layout, donated: Any) -> dict[str, jax.Array]:
    """Those leaves of `gather_copy` by name that are gathered in chunks, into `donated`; none where that is None."""
    if donated is None:
        return {}
    leaves = {name: (param.astype(like.dtype), shard.spec, like, into) for (name, param), shard, like, into in zip(
        named_leaves(params), *map(jax.tree.leaves, (shards, likes, donated)), strict=True)
        if _codes(name, layout) is None and shard.spec != like.sharding.spec}
    sizes = {name: leaf_bytes(like.sharding.shard_shape(like.shape), like.dtype)
             for name, (_, _, like, _) in leaves.items()}
    chunks = [chunk for name, (_, spec, like, _) in leaves.items() for chunk in cut(
        name, like.shape, (spec, like.sharding.spec), sizes[name], chunk_bytes(sum(sizes.values())))]
    names = {chunk.name for chunk in chunks}
    first = {name: _gathered_first(leaves[name][1], layout) for name in names}

    def begin(name: str, param: jax.Array) -> jax.Array:
        return _from_all(param, layout.axes, leaves[name][1], first[name]) if first[name] != leaves[name][1] else param

    def gather_chunk(name: str, part: jax.Array) -> jax.Array:
        return _from_all(part, layout.axes, first[name], leaves[name][2].sharding.spec)

    return gather_chunks(chunks, {name: leaves[name][0] for name in names}, {
        name: leaves[name][3] for name in names}, gather_chunk, begin)


def _gathered_first(spec: P, layout: Layout) -> P:
    """From `spec`, that of which chunks are gathered: on v5e whole over all axes but a long last one.

    Within an update XLA for v5e sends one gather, whichever comes first: the few bytes of the first axis kept those of
    the second from being sent so (71.9 instead of 91.8 % asynchronous, 6.7B at stage 2 on `v5e:16x16`, 1 x 2048
    tokens; predicted 1,260 instead of 1,225 ms).
    """
    *first, last = gather_sequence(spec, layout.axes)
    left = set(names_of(first[-1])) - set(names_of(last)) if first else set()
    is_long = layout.axes.built_for.sends_within_products and all(
        layout.mesh.shape[axis] >= LONG_AXIS for axis in left)
    return first[-1] if first and is_long else spec


def cast_compute_params(params: Any, layout: Layout) -> Any:
    """The shards of the compute weights, before they are gathered; None if there is no copy.

    Those that are sent as codes are not cast: they are encoded from the master weights.
    """
    codes = {} if layout.quantized is None or layout.stage.shards_params else layout.quantized.gathers
    weights = layout.state.weights
    return None if weights is None else map_named(
        lambda name, param, like: param if name in codes else param.astype(like.dtype), params, weights)


def _iterations(layers: int, size: int) -> int:
    """The number of equal iterations in which `layers` layers of `size` bytes in total are gathered."""
    return next((iterations for iterations in range(1, layers)
                 if layers % iterations == 0 and size <= iterations * MAX_GATHER_BYTES), layers)


def _gather_iterations(param: jax.Array, donated: jax.Array, mesh_axes: MeshAxes, spec: P, dim: int, iterations: int,
                       codes: GatherCodes | None = None) -> jax.Array:
    """`param`, sharded by `spec`, gathered into `donated` in so many slices of `dim`; as codes where there are some.

    A `shard_map`, and on a GPU one row of the result per iteration: otherwise XLA gives the result the memory layout of
    what it gathers and transposes it at the end, which takes as much memory again. On a TPU rows would need a copy, for
    its tiles, and are not needed.
    """
    rows = not mesh_axes.is_tpu

    def fill(param: jax.Array, donated: jax.Array) -> jax.Array:
        size = param.shape[dim] // iterations

        def step(index: jax.Array, result: jax.Array) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(param, index * size, size, dim)
            part = gathered(part, mesh_axes, spec) if codes is None else _by_codes(
                part, mesh_axes, codes, result.dtype)
            if rows:
                return jax.lax.dynamic_update_slice_in_dim(result, part.reshape(1, -1), index, 0)
            return jax.lax.dynamic_update_slice_in_dim(result, part, index * size, dim)

        result = donated.reshape(iterations, -1) if rows else donated
        return jax.lax.fori_loop(0, iterations, step, result).reshape(donated.shape)

    whole = compute_spec(spec, mesh_axes)
    return jax.shard_map(fill, mesh=mesh_axes.mesh, in_specs=(spec, whole), out_specs=whole, check_vma=False)(
        param, donated)


CHUNK_BYTES = 2**25
"""Bytes on a device of what is gathered at a time, of a small model; of a large one `NUM_CHUNKS` decide."""
NUM_CHUNKS = 64
"""About so many are all leaves of a large model, since each takes time to compile."""
MIN_BYTES = 2**20
"""Of a leaf that is gathered in chunks; the others are gathered whole, as small as they are."""
IN_FLIGHT = 2
"""So many chunks may be sent, or wait to be copied, at a time: the memory that they take together."""
ALIGNED = 128
"""Of the last two dims of an array chunks have a multiple of so many elements, which are whole tiles of a TPU."""


class Chunk(NamedTuple):
    """Elements `start` to `stop` of dim `dim` of the leaf `name`."""

    name: str
    dim: int
    start: int
    stop: int


def chunk_bytes(total: int) -> int:
    """How large a chunk is of leaves that take `total` bytes on a device."""
    return max(CHUNK_BYTES, math.ceil(total / NUM_CHUNKS))


def cut(name: str, shape: Sequence[int], specs: Sequence[P], size: int, chunk: int) -> list[Chunk]:
    """The chunks of about `chunk` bytes of a leaf of `size` on a device; none where it is small, or cannot be cut.

    specs: those with which it is sharded and gathered; a dim that either of them splits is not cut. At least two, since
    XLA takes one that is all of the leaf for the leaf.
    """
    for dim, length in enumerate(shape):
        aligned = ALIGNED if dim >= len(shape) - 2 else 1
        if size < MIN_BYTES or any(spec[dim] for spec in specs if dim < len(spec)) or length <= aligned:
            continue
        count = min(max(2, math.ceil(size / chunk)), length)
        step = math.ceil(math.ceil(length / count) / aligned) * aligned
        return [Chunk(name, dim, start, min(start + step, length)) for start in range(0, length, step)]
    return []


def gather_chunks(chunks: Sequence[Chunk], shards: Mapping[str, jax.Array], into: Mapping[str, jax.Array],
                  gather: Callable[[str, jax.Array], jax.Array], begin: Callable[[str, jax.Array], jax.Array]
                  ) -> dict[str, jax.Array]:
    """`into`, whose leaves are whole, with `chunks` of `shards`, which `gather` gathers; traceable.

    One begins when the chunk `IN_FLIGHT` before it is in its place, whichever leaves they are of.
    begin: what is done with a leaf's shards before its first chunk, such as to gather them over some of the axes.
    """
    results, sent, begun = dict(into), list[tuple[Chunk, jax.Array]](), dict[str, jax.Array]()

    def write() -> str:
        chunk, value = sent.pop(0)
        results[chunk.name] = dynamic_update_slice_in_dim(results[chunk.name], value, chunk.start, chunk.dim)
        return chunk.name

    for chunk in chunks:
        written = write() if len(sent) == IN_FLIGHT else None

        def behind(value: jax.Array, written: str | None = written) -> jax.Array:
            if written is not None:
                value, results[written] = barrier((value, results[written]))
            return value

        if chunk.name not in begun:
            begun[chunk.name] = begin(chunk.name, behind(shards[chunk.name]))
        part = behind(slice_in_dim(begun[chunk.name], chunk.start, chunk.stop, axis=chunk.dim))
        sent.append((chunk, gather(chunk.name, part)))
    while sent:
        write()
    return results
