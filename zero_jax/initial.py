"""The state before the first step, each leaf made where the layout puts it."""

from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.guard import Watch
from zero_jax.layout import Layout
from zero_jax.state import ZeroState
from zero_jax.update import working_copy


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


def _strong(tree: Any) -> Any:
    """`tree` without weak types: a weakly typed leaf would compile the step twice."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), tree)
