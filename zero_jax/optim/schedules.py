"""Learning rates over the steps of a run: a linear warmup, and then one of four shapes. They are optax's."""

from collections.abc import Callable, Mapping

import optax

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
