"""The optimizers that the command line offers, with the bytes of state of each, and its schedules."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax


def _adafactor(learning_rate: Any, weight_decay: Any) -> optax.GradientTransformation:
    # Its own decay does not follow the schedule; AdamW's does, and so does this one.
    return optax.chain(
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate))


def _sgd(learning_rate: Any, weight_decay: Any) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate, momentum=0.9))


OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": optax.adamw,  # 8 bytes for each parameter, at fp32
    "adamw-bf16-momentum": functools.partial(optax.adamw, mu_dtype=jnp.bfloat16),  # 6
    "adafactor": _adafactor,  # a row and a column of each matrix; 4 where a matrix is small
    "lion": optax.lion,  # 4
    "lion-bf16-momentum": functools.partial(optax.lion, mu_dtype=jnp.bfloat16),  # 2
    "sgd-momentum": _sgd,  # 4
    "lamb": optax.lamb,  # 8
}
"""By name, each a function of `learning_rate` and `weight_decay`. optax has no 8-bit states, but bf16 and factors."""


Shape = Callable[[float, float, int, int], optax.Schedule]
"""Of (peak, final rate, steps after the warmup, steps of the decay at the end) after the warmup."""


def _wsd(peak: float, final: float, steps: int, decay: int) -> optax.Schedule:
    return optax.join_schedules([optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay)],
                                [steps - decay])


SCHEDULES: Mapping[str, Shape] = {
    "cosine": lambda peak, final, steps, decay: optax.cosine_decay_schedule(peak, steps, final / peak if peak else 0.0),
    "linear": lambda peak, final, steps, decay: optax.linear_schedule(peak, final, steps),
    "wsd": _wsd,  # warmup, stable, decay: arXiv 2404.06395, section 4
    "constant": lambda peak, final, steps, decay: optax.constant_schedule(peak),
}
"""By name."""


def make_schedule(name: str, *, peak: float, final: float, steps: int, warmup: int, decay: int) -> optax.Schedule:
    """The learning rate by the number of updates before a step: that of the first step is `schedule(0)`.

    It rises from 0 in `warmup` steps to `peak`, which step number warmup + 1 has, and would reach `final` (cosine,
    linear, wsd) in the step after the last.

    Args:
      name: one of SCHEDULES.
      peak: the largest rate.
      final: the rate at the end.
      steps: of the run.
      warmup: of them, fewer than `steps`.
      decay: steps at the end in which wsd falls; at most `steps - warmup`.
    """
    after = SCHEDULES[name](peak, final, steps - warmup, decay)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
