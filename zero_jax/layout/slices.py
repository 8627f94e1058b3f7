"""A step mapped over slices that train by themselves: each device has the part of one slice."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.layout.layout import Layout
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.stored_shape import StoredShape
from zero_jax.typing import Pytree

OUTER_SCOPE = "zero_outer"
"""In the op_name of all that an outer step computes."""


def on_one_slice(fun: Callable[..., Any], axes: MeshAxes) -> Callable[..., Any]:
    """`fun`, the body of a `jax.shard_map`; mapped over slices it runs without the dim of size 1 that `jax.vmap` adds.

    Why: that dim changes the memory layout, so that XLA:TPU all-reduces what it would scatter (2.5 MB instead of 0.1 MB
    for a GPT-2 of 2 layers and width 256 on v5e:2x4 in two slices), and JAX 0.10 refuses products with a sharding.
    """
    if not axes.slices:
        return fun
    each = jax.custom_batching.custom_vmap(fun)

    def squeezed(axis_size: int, in_batched: list[bool], *values: jax.Array) -> tuple[Any, Any]:
        assert axis_size == 1, axis_size
        own = [value[0] if batched else value for value, batched in zip(values, in_batched, strict=True)]
        out = fun(*own)
        return jax.tree.map(lambda value: jnp.asarray(value)[None], out), jax.tree.map(lambda value: True, out)

    each.def_vmap(squeezed)
    return each


def stacked(leaf: jax.ShapeDtypeStruct, num_slices: int, axes: MeshAxes) -> jax.ShapeDtypeStruct:
    """A leaf of a slice's state as that of all, along a leading dim; whole in each slice where that does not divide."""
    sharding: NamedSharding = leaf.sharding  # type: ignore[assignment]
    over = axes.slices if axes.slices and num_slices % axes.size(axes.slices) == 0 else None
    return jax.ShapeDtypeStruct((num_slices, *leaf.shape), leaf.dtype,
                                sharding=NamedSharding(axes.mesh, P(over, *sharding.spec)))


def stacked_shape(shape: StoredShape, num_slices: int) -> StoredShape:
    """As `stacked`, of the true and stored shape of a leaf."""
    return StoredShape(((num_slices,), *shape.dims), (num_slices, *shape.stored))


def stacked_layout(layout: Layout, num_slices: int) -> Layout:
    """The layout of the states of slices, from that of one: every leaf but the step's number and what is frozen."""
    def stack(tree: Pytree) -> Pytree:
        return jax.tree.map(lambda leaf: stacked(leaf, num_slices, layout.axes), tree)

    def stack_shapes(tree: Pytree) -> Pytree:
        return jax.tree.map(lambda shape: stacked_shape(shape, num_slices), tree)

    fields = ("params", "weights", "opt_state", "variables", "ema", "guard", "rng")
    return dataclasses.replace(
        layout, one_slice=layout,
        state=dataclasses.replace(layout.state, **{name: stack(getattr(layout.state, name)) for name in fields}),
        stored_shapes=dataclasses.replace(
            layout.stored_shapes, **{name: stack_shapes(getattr(layout.stored_shapes, name)) for name in fields}),
        gradients=jax.tree.map(lambda sharding: NamedSharding(
            layout.mesh, P(stack(layout.state.rng).sharding.spec[0], *sharding.spec)), layout.gradients))


def mean_of_slices(leaf: jax.Array) -> jax.Array:
    """The mean over slices in float32 of a floating leaf; of others the first slice's."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf[0]
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)).mean(0).astype(leaf.dtype)
