"""Reduce-scatter of the devices' values, over one mesh axis after another, in full tiles on a TPU."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier
from jax.sharding import PartitionSpec as P

from zero_jax.gather.quantized.policy import Hop
from zero_jax.gather.quantized.reduce import reduce_quantized
from zero_jax.sharding.mesh import fills_tiles, major_first, tile_block
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.partition import axes_by_dim
from zero_jax.xla.platform import Platform

MAX_UNPADDED_ROWS = 2**14
"""With more rows than this, a TPU all-reduces instead of scattering columns unless the rows are a multiple of four
tiles: XLA finds no size for the chunks. With more rows XLA (jax 0.10) also fails to compile some flatter arrays."""

MAX_FLAT_BYTES = 2**24
"""Larger flat arrays are scattered in several chunks: XLA for v5e all-reduces them whole, together with others (those
of 20 MB of GPT-2 1.5B's, and not of 15), where no barrier is behind them."""

MAX_PADDING = 1 / 20
"""How much of a matrix may be added so that its rows are sent as tiles: of 1600 x 1600 over eight chips a 23rd."""


def reduce_parts(value: jax.Array, mesh_axes: MeshAxes, spec: P, hops: Sequence[Hop] = ()) -> jax.Array:
    """The sum of the devices' `value`s, sharded by `spec`: each device returns its shard. For `jax.shard_map`.

    hops: in which formats they are sent; none: as they are.
    """
    if hops:
        return reduce_quantized(value, mesh_axes, spec, hops)
    mesh, tensor = mesh_axes.mesh, mesh_axes.tensor
    splits = [(dim, tuple(axis for axis in axes if axis != tensor))
              for dim, axes in enumerate(axes_by_dim(spec)) if axes]
    rest = tuple(axis for axis in mesh_axes.step_names
                 if axis != tensor and all(axis not in axes for _, axes in splits))
    if mesh_axes.is_tpu:
        platform = mesh_axes.built_for
        order = _scatter_order(value.size, mesh, splits, platform)
        within_products = platform.sends_within_products
        for dim, axis in order:
            block = tile_block(mesh, axis, platform)
            value = _scatter_tiles(value, axis, mesh.shape[axis], dim, block, within_products, len(order) == 1)
    else:
        for dim, axes in splits:
            for together in mesh_ordered_runs(axes, mesh):
                value = jax.lax.psum_scatter(value, together, scatter_dimension=dim, tiled=True)
    return jax.lax.psum(value, rest) if rest else value


def mesh_ordered_runs(axes: Sequence[str], mesh: Any) -> list[tuple[str, ...]]:
    """`axes` in runs that follow the order of the mesh: one `psum_scatter` for each, the major run first."""
    runs: list[tuple[str, ...]] = []
    for axis in axes:
        follows = runs and mesh.axis_names.index(runs[-1][-1]) < mesh.axis_names.index(axis)
        runs = [*runs[:-1], (*runs[-1], axis)] if follows else [*runs, (axis,)]
    return runs


def _scatter_order(size: int, mesh: Any, splits: Sequence[tuple[int, Sequence[str]]], platform: Platform
                   ) -> tuple[tuple[int, str], ...]:
    """The order of (dim, axis) in which an array of `size` values is scattered.

    `major_first`; or, with an axis for each dim, another one where that saves a tenth of the bytes: the shards of a
    small array fill the tiles of a short axis and not of a long one.
    """
    dims = {axis: dim for dim, axes in splits for axis in axes}
    steps = [(dims[axis], axis) for axis in major_first([axes for _, axes in splits], mesh.axis_names)]

    def sent(order: Sequence[tuple[int, str]]) -> float:
        total, part = 0, size
        for _, axis in order:
            part //= mesh.shape[axis]
            total += (mesh.shape[axis] - 1) * min(part + -part % tile_block(mesh, axis, platform), 2 * part)
        return round(total / size, 1)

    return tuple(steps) if len(steps) > len(splits) else min(itertools.permutations(steps), key=sent)


def _tile_rows(within_products: bool) -> int:
    """The rows of the tiles in which flat parts are sent.

    Of bfloat16 16 x 128 values: of 8 x 128 XLA all-reduces some on v5p (of a width of 1600, over two chips), so that
    they send twice the bytes. Where a product is to send them, XLA views them as 8 x 128, and fails to compile them
    unless they are.
    """
    return 8 if within_products else 16


def _scatter_tiles(value: jax.Array, axis: str, num_shards: int, dim: int, block: int, within_products: bool,
                   widened: bool) -> jax.Array:
    """The sum of `value` over `axis`, of which each of `num_shards` chips keeps its part of `dim`.

    Shards that do not fill tiles are sent as blocks of `block` values, which do: in memory order where they consist of
    full tiles, or `widened` nearly do, else flat and padded. Where half of the bytes or more would be padding, the
    array is all-reduced and sliced: that sends no more, and XLA (jax 0.10) fails to compile some such scatters.
    within_products: whether a v5e is to send them so; widened: whether columns may be added, as wide as memory has
    them: a v5e sends within products what products make, and nothing that is flat. Not over two axes, where steps with
    them are 5 % slower (1.5B at stage 3 on `v5e:16x16`).
    """
    shape = (*value.shape[:dim], value.shape[dim] // num_shards, *value.shape[dim + 1:])
    part = math.prod(shape)
    keeps_order = value.ndim == 2 and dim == 0 and shape[0] % 8 == shape[1] % 128 == part % block == 0
    as_tiles = value.ndim == 1 and part > block and not within_products  # XLA all-reduces it flat: twice the bytes
    if fills_tiles(shape[dim]) and not as_tiles:
        # At most one dim before and one after: dims of size 1, as in the kernel of a 1 x 1 convolution, change the
        # memory layout of the array, and XLA all-reduces it.
        merged = [math.prod(shape[:dim]), value.shape[dim], math.prod(shape[dim + 1:])]
        flat, at = value.reshape([size for size in merged if size > 1]), int(merged[0] > 1)
        if flat.ndim == 2:
            columns = _scatter_columns(flat if at else flat.T, axis)
            return (columns if at else columns.T).reshape(shape)
        return jax.lax.psum_scatter(flat, axis, scatter_dimension=at, tiled=True).reshape(shape)
    if keeps_order:
        return _scatter_rows(value, axis).reshape(shape)
    wide = shape[-1] + -shape[-1] % 128
    if within_products and widened and value.ndim == 2 and dim == 0 and shape[0] % 8 == 0 and (
            math.ceil(shape[0] * wide / block) * block <= (1 + MAX_PADDING) * part):
        return _scatter_rows(jnp.pad(value, ((0, 0), (0, wide - shape[1]))), axis)[:, :shape[1]]
    parts = jnp.moveaxis(value.reshape(*shape[:dim], num_shards, *shape[dim:]), dim, 0).reshape(num_shards, -1)
    if part + -part % block >= 2 * part:
        return jax.lax.psum(parts, axis)[jax.lax.axis_index(axis)].reshape(shape)
    padded = jnp.pad(parts, ((0, 0), (0, -part % block)))
    rows = _tile_rows(within_products)
    summed = [jax.lax.psum_scatter(chunk.reshape(-1, rows, 128), axis, scatter_dimension=0, tiled=True).reshape(-1)
              for chunk in _chunks(padded, block)]
    whole = jnp.concatenate(summed)
    # Without the barrier XLA for v5e makes one slice of this and of the one by which it scatters, which it then does by
    # an all-reduce (a kernel of 64 x 768 on a mesh of 2 x 4).
    whole = optimization_barrier(whole) if within_products and part % block else whole
    return whole[:part].reshape(shape)


def _scatter_rows(value: jax.Array, axis: str) -> jax.Array:
    """The sum of `value`, a matrix of full tiles, of which each chip keeps some rows: sent as tiles, as they lie."""
    columns = value.shape[1] // 128
    tiles = value.reshape(-1, 8, columns, 128).swapaxes(1, 2).reshape(-1, 8, 128)
    # tiled=True: XLA (libtpu 0.0.42 to 0.0.52) fails to compile a scatter that drops its dim if it is to run within a
    # product ("shard_count == subgroup_size").
    summed = jax.lax.psum_scatter(tiles, axis, scatter_dimension=0, tiled=True)
    return summed.reshape(-1, columns, 8, 128).swapaxes(1, 2).reshape(-1, columns * 128)


def _chunks(parts: jax.Array, block: int) -> list[jax.Array]:
    """The columns of `parts` in equal chunks of whole blocks, each of at most `MAX_FLAT_BYTES`."""
    number = math.ceil(parts.nbytes / MAX_FLAT_BYTES)
    size = math.ceil(parts.shape[1] / block / number) * block
    return [parts[:, at:at + size] for at in range(0, parts.shape[1], size)]


def _scatter_columns(value: jax.Array, axis: str) -> jax.Array:
    """The sum of `value`, of which each chip keeps some columns.

    Rows are scattered by this, too, transposed: XLA would pad the shards of a product's rows by up to a tenth.
    """
    rows = value.shape[0]
    padding = -rows % 64 if rows > MAX_UNPADDED_ROWS else 0
    padded = jnp.pad(value, ((0, padding), (0, 0))) if padding else value
    summed = jax.lax.psum_scatter(padded, axis, scatter_dimension=1, tiled=True)
    # Without the barrier XLA for v5e makes one slice of this and of the one by which it scatters within a product, and
    # fails to compile it ("The shape doesn't match when replacing").
    return optimization_barrier(summed)[:rows] if padding else summed
