"""Bad steps: seen by one value that all devices share, and left out of the state.

A device that sees a value that is not finite makes the global loss, the global norm of the gradient, or the number of
new values not finite, and these are what is tested: there is one decision, the same everywhere.
"""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.arguments import is_number, shown, whole
from zero_jax.errors import UsageError
from zero_jax.precision import LossScale
from zero_jax.typing import Metrics, Scalar

_MOST = 2**31 - 1
"""What a counter of steps, an int32, reaches at most."""


class BadStepError(FloatingPointError):
    """Steps in a row were not finite or spiked, more than the guard skips. The state is the one before them."""


@dataclasses.dataclass(frozen=True)
class Guard:
    """What happens to steps that are not finite, or whose loss spikes: the state stays as it was.

    Not finite: the loss, the gradient, or what the step would write of parameters, optimizer state and variables. With
    `offload` the update is written as it is computed, so that of what it writes the variables alone are looked at.

    skip: how many in a row may be skipped; one more raises BadStepError, so that 0 raises at the first. spike: a loss
    above this times the moving average of the good ones is bad too, while that is above zero; None: no such test.
    decay: of that average. warmup: good steps before a spike is looked for.
    """

    skip: int = 0
    spike: float | None = None
    decay: float = 0.98
    warmup: int = 20

    def __post_init__(self) -> None:
        whole("Guard: skip", self.skip, 0)
        whole("Guard: warmup", self.warmup, 1)
        if not (is_number(self.decay) and 0 <= self.decay < 1):
            raise UsageError(f"Guard: decay={shown(self.decay)}: give a number from 0 to below 1.")
        if self.spike is not None and not (is_number(self.spike) and self.spike > 1):
            raise UsageError(f"Guard: spike={shown(self.spike)}: give a finite number above 1, or None for no "
                             "such test.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardState:
    """Scalars. bad: bad steps in a row; skipped: bad steps ever; good: finite steps since the loss scale changed.

    taken, average: number and moving average of the losses of good steps. scale: the loss scale.
    """

    bad: Any
    skipped: Any
    good: Any
    taken: Any
    average: Any
    scale: Any


@dataclasses.dataclass(frozen=True)
class GuardLogic:
    """A guard, a loss scale or both, as what a compiled step does with them."""

    guard: Guard | None
    loss_scale: LossScale | None

    @property
    def active(self) -> bool:
        """Whether there is anything to do; else steps carry no `GuardState`."""
        return self.guard is not None or self.loss_scale is not None

    def init(self) -> GuardState | None:
        """The state before the first step."""
        if not self.active:
            return None
        zero, scale = jnp.zeros((), jnp.int32), self.loss_scale.initial if self.loss_scale else 1.0
        return GuardState(zero, zero, zero, zero, jnp.zeros((), jnp.float32), jnp.asarray(scale, jnp.float32))

    def judge(self, state: GuardState, loss: Scalar, norm: Scalar, stays_finite: Scalar | None = None
              ) -> tuple[Scalar, GuardState]:
        """(whether the step counts, the new state), from the global loss and gradient norm, scalars.

        stays_finite: whether what the step would write is finite, which the loss scale has no part in; None: not asked.
        Once more are bad than may be, no later step counts: the state waits, unchanged, until the error is raised.
        """
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        good, average, scale = finite & ~self.stopped(state), state.average, state.scale
        good = good if stays_finite is None else good & stays_finite
        if self.guard is not None:
            guard = self.guard
            if guard.spike is not None:
                limit = jnp.where(state.average > 0, guard.spike * state.average, jnp.inf)
                good &= ~((state.taken >= min(guard.warmup, _MOST)) & (loss > limit))
            blend = jnp.where(state.taken == 0, 0.0, guard.decay)
            average = jnp.where(good, blend * average + (1 - blend) * loss, average)
        since = jnp.where(finite, state.good + 1, 0)
        if self.loss_scale is not None:
            rule = self.loss_scale
            interval = min(rule.interval, _MOST)
            grown = jnp.where(since >= interval, scale * rule.factor, scale)
            scale = jnp.clip(jnp.where(finite, grown, scale / rule.factor), rule.smallest, rule.largest)
            since = jnp.where(since >= interval, 0, since)
        counted = good.astype(jnp.int32)
        return good, GuardState(
            bad=jnp.where(good, 0, state.bad + 1), skipped=state.skipped + 1 - counted, good=since,
            taken=state.taken + counted, average=average.astype(jnp.float32), scale=scale)

    def stopped(self, state: GuardState) -> Scalar:
        """Whether more steps in a row were bad than may be, a scalar. A loss scale alone stops when it cannot fall."""
        if self.guard is not None:
            return state.bad > min(self.guard.skip, _MOST)
        return (state.bad > 0) & (state.scale <= self.loss_scale.smallest) if self.loss_scale else False


class BadStepMonitor:
    """Raises for bad steps without waiting for the newest: once the guard stopped, the state has not changed since."""

    def __init__(self) -> None:
        self._pending: collections.deque[Metrics] = collections.deque()

    def record(self, metrics: Metrics) -> None:
        """Keeps the metrics of a step that has just been started, or of several, each an array of theirs."""
        self._pending.append(metrics)

    def raise_if_stopped(self, *, waiting: int) -> None:
        """Raises BadStepError if the guard stopped at any but the newest `waiting` steps."""
        while len(self._pending) > waiting:
            metrics = self._pending.popleft()
            stopped = np.ravel(metrics["stopped"])
            if stopped.any():
                self._pending.clear()
                raise BadStepError(explain({name: np.ravel(metrics[name])[stopped.argmax()]
                                            for name in ("loss", "grad_norm") if name in metrics}))


def explain(metrics: Metrics) -> str:
    """Why a step whose metrics say `stopped` is the last, and what to do."""
    seen = ", ".join(f"{what} is {float(metrics[name])}" for name, what in (
        ("loss", "the loss"), ("grad_norm", "the norm of the gradient")) if name in metrics)
    finite = all(np.isfinite(metrics[name]) for name in ("loss", "grad_norm") if name in metrics)
    seen += ", and a parameter, the optimizer's state or a variable would not be finite, or the loss spikes" * finite
    return (f"Steps in a row were bad, more than the guard skips{': ' * bool(seen)}{seen}. The state is the one before "
            "them, bit for bit. Look at the batches, or lower the learning rate, and go on from step.forgive(state).")
