"""A function of the model and a batch, such as its loss, from a state: as in training, but nothing changes."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.lax import with_sharding_constraint as constrain

from zero_jax.frontends.model_functions import ModelFunctions, reseeded
from zero_jax.jaxpr.passes import with_jaxpr_passes
from zero_jax.sharding.compute_params import gather_compute_params
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.memory.host_arrays import fetch
from zero_jax.sharding.memory.kinds import params_as_placed
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.state import ZeroState
from zero_jax.step.losses import with_key
from zero_jax.step.metrics import values
from zero_jax.transforms.gather_remat import duplicate_param_reads
from zero_jax.transforms.tiled_products import tile_products
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
    frozen = state.frozen
    if not ema:
        weights, frozen = params_as_placed(weights, frozen, layout)
    variables = state.variables if rng is None else reseeded(model, state.variables, rng)

    def run(weights: Any, frozen: Any, variables: Any, batch: Any) -> Any:
        out, _, _ = model.run(with_key(fun, rng), merge(weights, frozen), variables, rng, batch, layout.uses,
                              train=False, reads=reads)
        return values(out)

    if layout.tiles:  # `fun` may use a weight otherwise than the loss does: that one is gathered whole
        run = with_jaxpr_passes(run, duplicate_param_reads, functools.partial(tile_products, strict=False))
    return run(weights, frozen, variables, batch)
