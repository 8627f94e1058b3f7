"""From the gradient to the next state: each device on its own part of parameters, moments and averages."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint as constrain

from zero_jax.gradients import Told
from zero_jax.guard import Watch
from zero_jax.layout import Layout
from zero_jax.losses import learning_rates
from zero_jax.rounding import round_stochastically, widened
from zero_jax.state import ZeroState
from zero_jax.working_copy import working_copy

ROUNDING = 0xB16
"""Folded into a step's key for the noise of stochastic rounding, which the model's streams must not share."""


def updated(state: ZeroState, told: Told, grads: Any, *, key: jax.Array, optimizer: Any, layout: Layout, watch: Watch,
            stochastic: bool, ema: float | None) -> tuple[ZeroState, dict[str, Any]]:
    """(the state after a step, its metrics), from the gradient, reduced and multiplied by the loss scale.

    A step that `watch` finds bad leaves all but `guard` as it was. ema: decay of the parameters' moving average.
    """
    grads = jax.tree.map(constrain, grads, layout.gradients)
    grads = jax.tree.map(lambda grad, param: grad.astype(
        jnp.promote_types(param.dtype, jnp.float32) if stochastic else param.dtype), grads, state.params)
    if watch.loss_scale is not None:
        grads = jax.tree.map(lambda grad: grad / state.guard.scale.astype(grad.dtype), grads)
    norm = optax.tree.norm(grads)
    params = jax.tree.map(constrain, state.params, layout.gradients)
    before = widened((params, state.opt_state)) if stochastic else (params, state.opt_state)
    updates, opt_state = layout.update(optimizer, grads, before[1], before[0], value=told.loss)
    new = optax.apply_updates(before[0], updates)
    if stochastic:
        new, opt_state = round_stochastically(
            (new, opt_state), (params, state.opt_state), jax.random.fold_in(key, ROUNDING))
    new = jax.tree.map(constrain, new, layout.gradients)
    average = None if ema is None else jax.tree.map(
        lambda old, param: (ema * old + (1 - ema) * param).astype(old.dtype), state.ema, new)
    step, variables, guard, told_bad = state.step + 1, told.variables, state.guard, {}
    if watch.active:
        good, guard = watch.judge(state.guard, told.loss, norm)
        step, new, opt_state, variables, average = jax.tree.map(
            lambda after, before: jnp.where(good, after, before), (step, new, opt_state, variables, average),
            (state.step, params, state.opt_state, state.variables, state.ema))
        told_bad = {"bad": guard.bad, "skipped": guard.skipped, "stopped": watch.stopped(guard)}
        if watch.loss_scale is not None:
            told_bad["loss_scale"] = state.guard.scale
    after = ZeroState(
        step=step, params=new, weights=working_copy(new, layout, state.weights), frozen=state.frozen,
        opt_state=opt_state, variables=variables, ema=average, guard=guard, rng=state.rng)
    metrics = {"loss": told.loss, "grad_norm": norm, **told_bad, **learning_rates(opt_state), **told.metrics}
    return after, jax.tree.map(lambda metric: jnp.asarray(metric, jnp.float32), metrics)
