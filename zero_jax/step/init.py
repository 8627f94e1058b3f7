"""The state before the first step, each leaf initialised in its shards."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint as constrain

from zero_jax.sharding.compute_params import gather_compute_params
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.memory.host_arrays import fetch, in_groups
from zero_jax.sharding.memory.offload import as_placed
from zero_jax.sharding.stored_shape import StoredShape
from zero_jax.sharding.stored_update import init_stored
from zero_jax.state import ZeroState
from zero_jax.step.guard import GuardLogic
from zero_jax.typing import OptState, Params, PRNGKey, Pytree, Variables


def initial_state(
    params: Params, frozen: Params, variables: Variables, *, rng: PRNGKey,
    optimizer: optax.GradientTransformationExtraArgs, layout: Layout, guard: GuardLogic
) -> ZeroState:
    """The state from a model's values, in their true shapes and in whatever dtype the model made them; traceable."""

    def put(stored_shape: StoredShape, leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        return constrain(stored_shape.store(leaf.astype(like.dtype)), like.sharding)

    params, frozen = strong(jax.tree.map(
        put, (layout.stored_shapes.params, layout.stored_shapes.frozen), (params, frozen),
        (layout.state.params, layout.state.frozen)))
    return ZeroState(
        step=jnp.zeros((), jnp.int32), params=params, weights=gather_compute_params(params, layout), frozen=frozen,
        opt_state=strong(init_stored(layout, optimizer, params)), variables=strong(variables),
        ema=average_of(params, layout), guard=guard.init(), rng=rng)


def with_new_params(
    state: ZeroState, params: Params, *, optimizer: optax.GradientTransformationExtraArgs, layout: Layout, **fields: Any
) -> ZeroState:
    """`state` before its first step, but from `params`, stored as its own, and with other `fields`.

    Its copies of the parameters, their average and the optimizer's state are deleted and made anew.
    """
    jax.tree.map(lambda leaf: leaf.delete(), (state.weights, state.opt_state, state.ema))

    def derive(params: Params) -> tuple[Params | None, OptState, Params | None]:
        opt_state = strong(init_stored(layout, optimizer, fetch(params)))
        derived = {"opt_state": opt_state, "ema": average_of(fetch(params), layout),
                   "weights": gather_compute_params(fetch(params), layout)}
        derived = as_placed(derived, layout)
        return derived["weights"], derived["opt_state"], derived["ema"]

    like = layout.state.weights, layout.state.opt_state, layout.state.ema
    if layout.host:
        weights, opt_state, ema = in_groups(derive, like)(params)
    else:
        weights, opt_state, ema = jax.jit(derive, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))(params)
    return dataclasses.replace(state, params=params, weights=weights, opt_state=opt_state, ema=ema, **fields)


def average_of(params: Params, layout: Layout) -> Params | None:
    """The moving average before the first step; None where the layout has none."""
    like = layout.state.ema
    return None if like is None else jax.tree.map(lambda param, to: jnp.copy(param).astype(to.dtype), params, like)


def strong(tree: Pytree) -> Pytree:
    """`tree` without weak types: a weakly typed leaf would compile the step twice."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), tree)
