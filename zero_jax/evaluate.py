"""A function of the model and a batch, such as its loss, from a state: as in training, but nothing changes."""

from typing import Any

import jax
from jax.lax import with_sharding_constraint as constrain

from zero_jax.functional import Functional
from zero_jax.layout import Layout
from zero_jax.losses import Loss
from zero_jax.state import ZeroState
from zero_jax.tree import merge
from zero_jax.working_copy import working_copy


def evaluated(model: Functional, fun: Loss, layout: Layout, state: ZeroState, batch: Any, *, ema: bool) -> Any:
    """`fun(model, batch)`, each parameter gathered where it is used; `ema`: with their moving average. Traceable."""
    weights = state.params if state.weights is None else state.weights
    if ema:
        copy = working_copy(state.ema, layout)
        weights = jax.tree.map(constrain, state.ema, layout.shardings.params) if copy is None else copy
    out, _ = model.run(fun, merge(weights, state.frozen), state.variables, None, batch, layout.uses, train=False)
    return out
