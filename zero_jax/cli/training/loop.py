"""The training loop: while the devices run one step, the metrics of the one before are read and logged."""

import dataclasses
import itertools
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.cli.objectives.objective import Objective
from zero_jax.cli.reports.report import device_bytes
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.evaluation import evaluate
from zero_jax.cli.training.metrics_log import MetricsLog
from zero_jax.cli.training.profile import Profile
from zero_jax.cli.training.progress import ProgressReporter
from zero_jax.data.batches import NumberedBatches
from zero_jax.data.prefetch import Prefetched, StarvationMonitor
from zero_jax.distributed.preemption import Preemption
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.planning.flops import StepFlops
from zero_jax.step.guard import BadStepError

Metrics = tuple[int, dict[str, jax.Array]]
"""The number of a step and its metrics."""


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step as numbers; blocks until it is done."""
    return {name: float(value) for name, value in metrics.items()}


@dataclasses.dataclass
class Loop:
    """The compiled step and evaluator, both sets of batches, and where to report.

    objective: what a step takes, and what an evaluation measures. evaluate: its sums of (state, batch). baselines:
    losses to compare with, by name. flops: of a step. devices: whose memory is reported, or else that of the compiled
    step, memory_bytes.
    save, copy: called with (step number, state) when a checkpoint, or a local copy, is due, or None.
    before: called with the number of a step that will be on the disk when it returns, and with its batch read; or None.
    read: the metrics of a step as numbers, once it is done.
    profile, summarize: what traces some of the steps, and says in words where their time went: `profile_text`.
    compare: with the state every `check_replicas` steps and before a save, or None.
    durations: seconds of each step, without validation and saving. preempted: whether a signal ended the loop.
    """

    config: TrainConfig
    objective: Objective
    step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Any], dict[str, jax.Array]]
    batches: Prefetched
    held_out: NumberedBatches
    log: MetricsLog
    progress: ProgressReporter
    watchdog: Watchdog
    preemption: Preemption
    baselines: Mapping[str, float]
    flops: StepFlops
    devices: Sequence[Any]
    memory_bytes: int
    save: Callable[[int, Any], Any] | None = None
    compare: Callable[[Any], Any] | None = None
    copy: Callable[[int, Any], Any] | None = None
    profile: Profile | None = None
    summarize: Callable[[], str] | None = None
    before: Callable[[int], Any] | None = None
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = plain_metrics
    profile_text: str = ""
    durations: list[float] = dataclasses.field(default_factory=list, repr=False)
    preempted: bool = False

    @property
    def items_per_second(self) -> float:
        """Tokens or images, since the start, not counting validation and saving."""
        seconds = sum(self.durations)
        return self.objective.items_per_step * len(self.durations) / seconds if seconds else 0.0

    @property
    def median_seconds(self) -> float | None:
        """Of a step; None before the first."""
        return statistics.median(self.durations) if self.durations else None

    def run(self, state: Any, *, after: int = 0) -> Any:
        """The state after all remaining steps; donates `state`, which is that after the step `after`.

        Raises BadStepError after more than `max_bad_steps` consecutive steps that are not finite.
        """
        self._waiting: Metrics | None = None
        self._clock, self._data_wait, self._saved = time.perf_counter(), 0.0, after
        self._starvation = StarvationMonitor()
        for number in range(after + 1, self.config.steps + 1):
            if self.preemption.asked(number):
                return self._leave(number - 1, state)
            if self.profile and self.profile.starts(number):
                self._drain()
                self.profile.start()
            self.watchdog.beat(f"step {number}")
            batch = self._next_batch()
            if self.before:
                self.before(number)
            state, metrics = self.step(state, batch)
            self._drain()
            self._waiting = number, metrics
            if self.before:
                self._drain()  # a run that goes on after this step finds its loss in the log
            if self.profile and self.profile.ends(number):
                self._drain()
                self._end_profile()
            self._after_step(number, state)
        self.watchdog.rest()
        return state

    def _after_step(self, number: int, state: Any) -> None:
        """What is due after a step: comparing copies, saving, copying, evaluating; the step is recorded before."""
        saves = self.save and (number % self.config.save_every == 0 or number == self.config.steps)
        if self.compare and (saves or number % self.config.check_replicas == 0):
            self._drain()
            self.watchdog.beat(f"comparing copies after step {number}")
            self.compare(state)
            self._clock = time.perf_counter()
        if self.save and saves:
            self._drain()  # before saving: the log has the losses, and a bad step raises here
            self.watchdog.rest()
            self.log.sync()
            self.save(number, state)
            self._clock, self._saved = time.perf_counter(), number
        if self.copy and number % (self.config.local_every or 1) == 0:
            self._drain()
            self.copy(number, state)
            self._clock = time.perf_counter()
        if number % self.config.eval_every == 0 or number == self.config.steps:
            self._drain()
            self._validate(number, state)

    def _drain(self) -> None:
        """Records the step that was dispatched last, once it is done."""
        waiting, self._waiting = self._waiting, None
        if waiting:
            self._record(*waiting)

    def _end_profile(self) -> None:
        assert self.profile is not None
        self.watchdog.rest()
        self.profile.stop()
        if self.summarize:
            self.profile_text = self.summarize()
            self.progress.say(f"Profile of steps in {self.profile.folder}. {self.profile_text}")
        self._clock = time.perf_counter()

    def _next_batch(self) -> Any:
        """The next batch; measures how long the devices may have waited for it.

        They did not where the step before is not done yet when the batch is there. Otherwise it is not known when that
        ended, and all of the time counts.
        """
        batch = next(self.batches)
        loss: Any = self._waiting and self._waiting[1]["loss"]  # `is_ready` is not in the types of jax.Array
        busy = self._waiting is not None and not loss.is_ready()
        self._data_wait += 0.0 if busy else self.batches.waited
        return batch

    def _leave(self, number: int, state: Any) -> Any:
        """Saves, when the run is asked to end after the step `number`."""
        self.preempted = True
        self._drain()
        self.watchdog.rest()
        if self.save and number > self._saved:
            self.log.sync()
            self.save(number, state)
        outcome = "saved, and --resume continues from there" if self.save and number else "nothing is saved"
        name = signal.Signals(self.preemption.signal or signal.SIGTERM).name
        self.progress.say(f"Asked to end ({name}) after step {number}: {outcome}.")
        return state

    def _record(self, number: int, metrics: dict[str, jax.Array]) -> None:
        row = self.read(metrics)  # blocks until the step is done
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        data_wait, self._data_wait = self._data_wait, 0.0
        self.durations.append(seconds)
        stopped, bad = row.pop("stopped"), row.pop("bad")
        if stopped:
            raise BadStepError(self._bad_step_text(number, row))
        if bad:
            self.progress.say(f"step {number:5d}  skipped: loss {row['loss']}, norm of the gradient {row['grad_norm']}")
            row = {name: value for name, value in row.items() if np.isfinite(value)}
        else:
            self.log.train.append((number, row["loss"]))
        row |= self._rates(seconds) | {"data_wait": round(data_wait, 6)}
        self.log.write(step=number, **row)
        if message := self._starvation.observe(waited=data_wait, seconds=seconds):
            self.progress.say(f"step {number:5d}  {message}")
        self.progress.tick(number, row)

    def _bad_step_text(self, number: int, row: Mapping[str, float]) -> str:
        config = self.config
        return (f"The loss of step {number} is {row['loss']}, the norm of its gradient {row['grad_norm']}, and "
                f"{config.max_bad_steps} consecutive such steps are skipped: give a lower learning_rate than "
                f"{config.learning_rate}, a lower grad_clip_norm than {config.grad_clip_norm}"
                + (", or a larger max_bad_steps." if config.diloco_every is None else "."))

    def _rates(self, seconds: float) -> dict[str, float | None]:
        """What a step of so many seconds comes to: the fields of its line in the log beside its metrics."""
        return {
            "seconds": round(seconds, 6),
            self.objective.measures.rate: round(self.objective.items_per_step / seconds, 1),
            "tflops_per_device": self.flops.tflops(seconds), "mfu": self.flops.mfu(seconds),
            "hfu": self.flops.hfu(seconds), "memory_bytes": device_bytes(self.devices) or self.memory_bytes}

    def _validate(self, number: int, state: Any) -> None:
        def sums(batch: Any) -> dict[str, jax.Array]:
            self.watchdog.beat(f"validation after step {number}")
            return self.evaluate(state, batch)

        metrics = self.objective.metrics(
            evaluate(sums, itertools.islice(self.held_out.once(), self.config.eval_batches)))
        self.watchdog.rest()
        self.log.evaluated(number, metrics)
        self.progress.evaluated(number, metrics, "".join(
            f" ({name}: {value:.3f})" for name, value in self.baselines.items()))
        self._clock = time.perf_counter()
