"""From the gradient to the next state: each device updates its own shard of parameters, moments and averages."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint as constrain

from zero_jax.sharding.compute_params import gather_compute_params
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.stored_update import update_stored
from zero_jax.state import ZeroState
from zero_jax.step.gradients import ForwardOutput
from zero_jax.step.guard import GuardLogic
from zero_jax.step.losses import learning_rates
from zero_jax.step.metrics import values
from zero_jax.step.rounding import round_stochastically, widened
from zero_jax.tree import map_named
from zero_jax.typing import Gradients, Metrics, Params, PRNGKey

ROUNDING = 0xB16
"""Folded into a step's key for the noise of stochastic rounding, which the model's streams must not share."""


def unscaled_gradients(state: ZeroState, grads: Gradients, *, layout: Layout, guard: GuardLogic, stochastic: bool
                       ) -> Gradients:
    """`grads`, reduced and multiplied by the loss scale, on their shards: in the dtype of the update, and unscaled."""
    grads = jax.tree.map(constrain, grads, layout.gradients)
    grads = jax.tree.map(lambda grad, param: grad.astype(
        jnp.promote_types(param.dtype, jnp.float32) if stochastic else param.dtype), grads, state.params)
    if guard.loss_scale is not None:
        grads = jax.tree.map(lambda grad: grad / state.guard.scale.astype(grad.dtype), grads)
    return grads


def apply_update(
    state: ZeroState, output: ForwardOutput, grads: Gradients, *, key: PRNGKey,
    optimizer: optax.GradientTransformationExtraArgs, layout: Layout, guard: GuardLogic, stochastic: bool,
    ema: float | None
) -> tuple[ZeroState, Metrics]:
    """(The state after a step, its metrics), from what `unscaled_gradients` returned.

    A step that `guard` finds bad leaves all but `state.guard` as it was. ema: decay of the parameters' moving average.
    `output.loss` may be None where gradients are the user's: then the norm alone is judged.
    """
    grad_norm = optax.tree.norm(grads)

    # First, the optimizer, and what follows from the new parameters.
    stored = jax.tree.map(constrain, state.params, layout.gradients)
    params = _with_written(stored, output.written or {}, layout)
    old_params, old_opt_state = widened((params, state.opt_state)) if stochastic else (params, state.opt_state)
    updates, opt_state = update_stored(layout, optimizer, grads, old_opt_state, old_params, value=output.loss)
    new_params = optax.apply_updates(old_params, updates)
    if stochastic:
        new_params, opt_state = round_stochastically(
            (new_params, opt_state), (params, state.opt_state), jax.random.fold_in(key, ROUNDING))
    new_params = jax.tree.map(constrain, new_params, layout.gradients)
    average = None if ema is None else jax.tree.map(
        lambda old, param: (ema * old + (1 - ema) * param.astype(old.dtype)).astype(old.dtype), state.ema, new_params)

    # Second, the guard: a bad step changes nothing.
    step, variables, guard_state, guard_metrics = state.step + 1, output.variables, state.guard, {}
    if guard.active:
        is_good, guard_state = guard.judge(state.guard, 0.0 if output.loss is None else output.loss, grad_norm)
        step, new_params, opt_state, variables, average = jax.tree.map(
            lambda after, before: jnp.where(is_good, after, before),
            (step, new_params, opt_state, variables, average),
            (state.step, stored, state.opt_state, state.variables, state.ema))
        guard_metrics = {"bad": guard_state.bad, "skipped": guard_state.skipped,
                         "stopped": guard.stopped(guard_state)}
        if guard.loss_scale is not None:
            guard_metrics["loss_scale"] = state.guard.scale

    # Third, at stages 1 and 2 what the model reads is gathered anew.
    weights = gather_compute_params(new_params, layout, state.weights)
    new_state = ZeroState(
        step=step, params=new_params, weights=weights, frozen=state.frozen, opt_state=opt_state, variables=variables,
        ema=average, guard=guard_state, rng=state.rng)
    metrics = {"grad_norm": grad_norm, **guard_metrics, **learning_rates(opt_state)}
    if output.loss is not None:
        metrics["loss"] = output.loss
    return new_state, {**step_metrics(metrics), **values(output.metrics)}


def step_metrics(metrics: Metrics) -> Metrics:
    """The metrics that a step itself reports: float32 scalars."""
    return jax.tree.map(lambda metric: jnp.asarray(metric, jnp.float32), metrics)


def _with_written(params: Params, written: dict[str, Any], layout: Layout) -> Params:
    """`params` with what the model itself wrote into some of them in its forward pass, as an NNX module may."""
    def put(name: str, param: jax.Array, stored_shape: Any, sharding: Any) -> jax.Array:
        if name not in written:
            return param
        return constrain(stored_shape.store(written[name].astype(param.dtype)), sharding)

    return map_named(put, params, layout.stored_shapes.params, layout.gradients) if written else params
