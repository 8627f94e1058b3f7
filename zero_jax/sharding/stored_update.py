"""An optimizer's init and update on a layout's arrays as they are stored; traceable."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.sharding.layout import Layout
from zero_jax.sharding.stored_optimizer import StoredPlacement, run_on_stored
from zero_jax.sharding.stored_shape import identity_shape
from zero_jax.typing import Gradients, OptState, Params

UPDATE_SCOPE = "zero_update"
"""In the op_name of all that the optimizer computes."""


def init_stored(layout: Layout, optimizer: optax.GradientTransformationExtraArgs, params: Params) -> OptState:
    """`optimizer.init(params)`, of parameters as they are stored."""
    placements = _placements(layout)
    if placements is None:
        return optimizer.init(params)
    param_placements, state_placements = placements
    return run_on_stored(optimizer.init, (param_placements,), state_placements)(params)


@jax.named_scope(UPDATE_SCOPE)
def update_stored(layout: Layout, optimizer: optax.GradientTransformationExtraArgs, grads: Gradients,
                  opt_state: OptState, params: Params, **extra: Any) -> tuple[Any, OptState]:
    """`optimizer.update(grads, opt_state, params, **extra)`, of trees as they are stored: (updates, new state)."""
    placements = _placements(layout)
    if placements is None:
        return optimizer.update(grads, opt_state, params, **extra)
    param_placements, state_placements = placements
    extra_placements = jax.tree.map(lambda value: StoredPlacement(identity_shape(jnp.shape(value))), extra)

    def update(grads: Any, state: Any, params: Any, extra: Any) -> Any:
        return optimizer.update(grads, state, params, **extra)

    return run_on_stored(
        update, (param_placements, state_placements, param_placements, extra_placements),
        (param_placements, state_placements))(grads, opt_state, params, extra)


def _placements(layout: Layout) -> tuple[Any, Any] | None:
    """A `StoredPlacement` for each gradient and leaf of the optimizer's state; None where all is stored as it is."""
    shapes = layout.stored_shapes
    if all(stored_shape.is_identity for stored_shape in jax.tree.leaves((shapes.params, shapes.opt_state))):
        return None
    return (jax.tree.map(StoredPlacement, shapes.params, layout.gradients),
            jax.tree.map(lambda stored_shape, leaf: StoredPlacement(stored_shape, leaf.sharding), shapes.opt_state,
                         layout.state.opt_state))
