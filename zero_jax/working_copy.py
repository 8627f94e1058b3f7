"""The copy of the parameters that the model reads at stages 0 to 2 where it computes in a narrower dtype."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero_jax.gather import GATHER_SCOPE, between, gather, names_of, used
from zero_jax.layout import Layout
from zero_jax.mesh import on_torus
from zero_jax.tree import leaf_bytes, map_named

BUFFER = 2**30
"""Bytes of a leaf that are gathered at a time: what XLA gathers along a minor dim lies in a transposed buffer first."""


def working_copy(params: Any, layout: Layout, last: Any = None) -> Any:
    """What the model reads of `params` that lie as gradients do: cast on the shard, then gathered; None if no copy.

    The wire carries the compute dtype. A leaf with layers of more than `BUFFER` bytes on a device is gathered some
    layers at a time, in place of its part of the copy `last`, so that no buffer grows with depth (C_B).
    """
    if layout.state.weights is None:
        return None

    def copy(name: str, param: jax.Array, shard: Any, like: Any, view: Any, last: Any = None) -> jax.Array:
        param, layers = param.astype(like.dtype), view.alone(layout.reads[name].stacked)
        if layers is None or used(shard.spec) == shard.spec:  # nothing to slice, or nothing to gather
            return gather(param, layout.mesh, shard.spec)
        rounds = _rounds(like.shape[layers], leaf_bytes(like.sharding.shard_shape(like.shape), like.dtype))
        if rounds == 1:
            return gather(param, layout.mesh, shard.spec)
        last = jnp.zeros(like.shape, like.dtype) if last is None else last
        return _gather_rounds(param, last, layout.mesh, shard.spec, layers, rounds)

    return map_named(copy, params, layout.gradients, layout.state.weights, layout.views.params,
                     *[] if last is None else [last])


def _rounds(layers: int, size: int) -> int:
    """In how many equal rounds so many layers, together of `size` bytes, are gathered."""
    return next((rounds for rounds in range(1, layers) if layers % rounds == 0 and size <= rounds * BUFFER), layers)


def _gather_rounds(param: jax.Array, last: jax.Array, mesh: Mesh, spec: P, dim: int, rounds: int) -> jax.Array:
    """`param`, which lies as `spec` says, gathered into `last` in `rounds` slices of `dim`.

    Manual, and on a GPU a row of the result for each round: by itself XLA gives the whole of it the layout of what it
    gathers, and transposes it at the end, which takes as much memory again. The tiles of a TPU cannot become rows
    without a copy, and need not.
    """
    rows = not on_torus(mesh)

    def fill(param: jax.Array, last: jax.Array) -> jax.Array:
        size = param.shape[dim] // rounds

        def step(index: jax.Array, whole: jax.Array) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(param, index * size, size, dim)
            with jax.named_scope(GATHER_SCOPE):
                for before, after in itertools.pairwise(between(spec, mesh)):
                    axes = tuple(axis for axis in names_of(before) if axis not in names_of(after))
                    split = next(at for at, entry in enumerate(before) if axes[0] in names_of(P(entry)))
                    part = jax.lax.all_gather(part, axes, axis=split, tiled=True)
            if rows:
                return jax.lax.dynamic_update_slice_in_dim(whole, part.reshape(1, -1), index, 0)
            return jax.lax.dynamic_update_slice_in_dim(whole, part, index * size, dim)

        whole = last.reshape(rounds, -1) if rows else last
        return jax.lax.fori_loop(0, rounds, step, whole).reshape(last.shape)

    return jax.shard_map(fill, mesh=mesh, in_specs=(spec, used(spec)), out_specs=used(spec), check_vma=False)(
        param, last)
