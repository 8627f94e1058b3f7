"""The state before the first step, each leaf made where the layout puts it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.guard import Watch
from zero_jax.layout import Layout
from zero_jax.state import ZeroState
from zero_jax.working_copy import working_copy


def initial_state(params: Any, frozen: Any, variables: Any, *, rng: jax.Array, optimizer: Any, layout: Layout,
                  watch: Watch) -> ZeroState:
    """The state from a model's values, in their true shapes and in whatever dtype the model made them; traceable."""

    def put(view: Any, leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.lax.with_sharding_constraint(view.store(leaf.astype(like.dtype)), like.sharding)

    made = jax.tree.map(put, (layout.views.params, layout.views.frozen), (params, frozen),
                        (layout.state.params, layout.state.frozen))
    params, frozen = _strong(made)
    return ZeroState(
        step=jnp.zeros((), jnp.int32), params=params, weights=working_copy(params, layout), frozen=frozen,
        opt_state=_strong(layout.init(optimizer, params)), variables=_strong(variables),
        ema=None if layout.state.ema is None else params, guard=watch.init(), rng=rng)


def restarted(state: ZeroState, params: Any, *, optimizer: Any, layout: Layout, **fields: Any) -> ZeroState:
    """`state` before its first step, but from `params`, stored as its own, and with other `fields`.

    Its copies of the parameters, their average and the optimizer's state are deleted and made anew.
    """
    jax.tree.map(lambda leaf: leaf.delete(), (state.weights, state.opt_state, state.ema))

    def follow(params: Any) -> tuple[Any, Any, Any]:
        ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
        return working_copy(params, layout), _strong(layout.init(optimizer, params)), ema

    kept = layout.shardings
    weights, opt_state, ema = jax.jit(follow, out_shardings=(kept.weights, kept.opt_state, kept.ema))(params)
    return dataclasses.replace(state, params=params, weights=weights, opt_state=opt_state, ema=ema, **fields)


def _strong(tree: Any) -> Any:
    """`tree` without weak types: a weakly typed leaf would compile the step twice."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), tree)
