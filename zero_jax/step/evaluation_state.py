"""The state that a schedule-free optimizer is evaluated with: its average in place of the trained parameters."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from optax.contrib import ScheduleFreeState

from zero_jax.layout.compute_params import gather_compute_params
from zero_jax.layout.layout import Layout
from zero_jax.state import ZeroState
from zero_jax.typing import Params


def evaluation_state_of(layout: Layout) -> Callable[[ZeroState], ZeroState]:
    """What makes of a state of `layout` one with the average in place of its parameters, and of the model's copy.

    It returns a state as it is where the optimizer is none of `optax.contrib.schedule_free`.
    """
    averaged = jax.jit(functools.partial(_averaged, layout), out_shardings=(
        layout.shardings.params, layout.shardings.weights))

    def call(state: ZeroState) -> ZeroState:
        if not _averages(state.opt_state):
            return state
        params, weights = averaged(state.params, state.opt_state)
        return dataclasses.replace(state, params=params, weights=weights)

    return call


def _averaged(layout: Layout, params: Params, opt_state: Any) -> tuple[Params, Params | None]:
    """The average as it is stored, and the model's copy of it."""
    shapes = layout.stored_shapes
    load = functools.partial(jax.tree.map, lambda shape, leaf: shape.load(leaf))
    (found,) = _averages(load(shapes.opt_state, opt_state))
    average = optax.contrib.schedule_free_eval_params(found, load(shapes.params, params))
    stored = jax.tree.map(lambda shape, leaf: shape.store(leaf), shapes.params, average)
    return stored, gather_compute_params(stored, layout)


def _averages(opt_state: Any) -> list[Any]:
    def is_average(each: Any) -> bool:
        return isinstance(each, ScheduleFreeState)

    return [each for each in jax.tree.leaves(opt_state, is_leaf=is_average) if is_average(each)]
