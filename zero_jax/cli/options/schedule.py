"""The options of the learning rate. Nothing here imports JAX."""

import dataclasses
from typing import Any, Literal, get_args

from zero_jax.cli.model_lookup import nearest
from zero_jax.errors import UsageError

ScheduleName = Literal["cosine", "linear", "wsd", "constant"]

DECAY, FINAL_RATE = 0.2, 0.1
"""Fraction of the steps in which wsd decays, and the last rate as a fraction of the peak, where none is given."""


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """The learning rate by step."""

    schedule: ScheduleName = "cosine"
    """Of the learning rate after its warmup: cosine or linear, down to final_rate; wsd: constant, then linear in the
    last steps; or constant."""

    learning_rate: float = 3e-3
    """Peak of the schedule."""

    warmup: float = 0.1
    """Fraction of the steps that warm up linearly, since early gradients are large."""

    decay: float | None = None
    """With wsd: fraction of the steps that decay, at the end. None: 0.2."""

    final_rate: float | None = None
    """Learning rate at the end, as a fraction of its peak. None: 0.1, or 1 where the schedule is constant."""

    def check_schedule(self) -> None:
        """Raises ValueError for values out of range, and for those that this schedule does not use."""
        names = list(get_args(ScheduleName))
        if self.schedule not in names:
            raise UsageError(f"schedule={self.schedule!r} is unknown{nearest(self.schedule, names)}")
        for name, value, high in (("learning_rate", self.learning_rate, 10), ("warmup", self.warmup, 1),
                                  ("decay", self.decay, 1), ("final_rate", self.final_rate, 1)):
            if value is not None and not 0 <= value <= high:
                raise UsageError(f"{name}={value} is not within 0 to {high}.")
        if self.schedule == "wsd" and self.warmup + self._decay > 1:
            raise UsageError(f"warmup={self.warmup} and decay={self._decay} are more than all steps: give fractions "
                             "whose sum is at most 1.")

    @property
    def _decay(self) -> float:
        return DECAY if self.decay is None else self.decay

    def schedule_arguments(self, steps: int) -> dict[str, Any]:
        """The arguments of `zero_jax.optim.schedules.make_schedule` for a run of so many steps, but for its name."""
        warmup = min(round(self.warmup * steps), steps - 1)
        final = FINAL_RATE if self.final_rate is None else self.final_rate
        return {"peak": self.learning_rate, "final": final * self.learning_rate, "steps": steps, "warmup": warmup,
                "decay": min(round(self._decay * steps), steps - warmup)}
