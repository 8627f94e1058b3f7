"""A function of the model and a batch, such as its loss, from a state: as in training, but nothing changes."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.lax import with_sharding_constraint as constrain

from zero_jax.frontends.model_functions import ModelFunctions, reseeded
from zero_jax.sharding.compute_params import gather_compute_params
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.memory_kinds import fetch
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.state import ZeroState
from zero_jax.step.losses import with_key
from zero_jax.step.metrics import values
from zero_jax.tree import merge
from zero_jax.typing import Batch, Loss, PRNGKey


def evaluate(model: ModelFunctions, fun: Loss, layout: Layout, state: ZeroState, batch: Batch, *, ema: bool,
             reads: Mapping[str, ParamAccess], rng: PRNGKey | None = None) -> Any:
    """`fun(model, batch)`, each parameter gathered where it is used; `ema`: with their moving average. Traceable.

    reads: how `fun` reads parameters. rng: of the model's random streams, and of `fun` where it takes one; None: Linen
    modules get none, and NNX modules go on with their own. Each `Metric` is returned as its value.
    """
    weights = state.params if state.weights is None else state.weights
    if ema:
        average = jax.tree.map(
            lambda leaf, param: leaf.astype(param.dtype), fetch(state.ema), state.params)
        gathered = gather_compute_params(average, layout)
        weights = jax.tree.map(constrain, average, layout.shardings.params) if gathered is None else gathered
    variables = state.variables if rng is None else reseeded(model, state.variables, rng)
    out, _, _ = model.run(with_key(fun, rng), merge(weights, state.frozen), variables, rng, batch, layout.uses,
                          train=False, reads=reads)
    return values(out)
