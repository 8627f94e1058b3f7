"""The training loop: while the devices run one step, the metrics of the one before are read and logged."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zero_jax.checkpoint import durable_files
from zero_jax.checkpoint.durable_files import sync
from zero_jax.cli.report import ProgressReporter, draw_curves, process_bytes, size_text
from zero_jax.cli.train_config import TrainConfig
from zero_jax.data.batches import Batches
from zero_jax.data.prefetch import Prefetched, StarvationMonitor
from zero_jax.distributed.preemption import Preemption
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.errors import UsageError
from zero_jax.step.guard import BadStepError

EVAL_BATCHES = 16

Metrics = tuple[int, dict[str, jax.Array], float]
"""The number of a step, its metrics, and the seconds that it waited for its batch."""


class MetricsLog:
    """The losses of a run by step, and the JSONL file that gets a line for each step."""

    def __init__(self, path: Path, *, after: int | None = None, writes: bool = True):
        """Starts the file at `path`, or continues it after the step `after`; ValueError where it cannot be written.

        An incomplete last line, of a run that was killed, is removed. Lines of later steps stay, and the new ones are
        appended. Without `writes` there is no file.

        Attributes:
          lost: of the file that is continued, how many steps after `after` it has, which are taken again.
        """
        self.path, self._file, self.lost = path, None, 0
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        if not writes:
            return
        make_folder(path.parent)
        try:
            if after is not None and path.exists():
                self._read(after)
            self._file = path.open("w" if after is None else "a", encoding="utf-8")
            sync(path.parent)
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}): choose another folder with out.") from error

    @property
    def last_step(self) -> int:
        """The last step whose loss is known; 0 before the first."""
        return self.train[-1][0] if self.train else 0

    def _read(self, after: int) -> None:
        text = self.path.read_bytes()
        complete = text[: text.rfind(b"\n") + 1]
        if complete != text:
            os.truncate(self.path, len(complete))
        rows = list(_rows(complete))
        self.lost = lost_steps(rows, after)
        for name, losses in (("loss", self.train), ("validation_loss", self.validation)):
            known = {row["step"]: row[name] for row in rows if name in row and row.get("step", after + 1) <= after}
            losses.extend(sorted(known.items()))

    def write(self, **row: Any) -> None:
        """Appends a line, which the death of the process does not lose when this returns."""
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Makes sure that a power loss does not lose what was written. Called before each checkpoint, and by `close`.

        A resumed run therefore has the losses of all steps before its checkpoint. Not called for each line: that would
        take milliseconds of each step.
        """
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Syncs and closes the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # as on a disk that is full: what is closed was written as far as it was
                self.sync()
            self._file.close()

    def draw(self, title: str, bigram: float | None) -> Path | None:
        """Draws loss.png beside the file and returns its path; None before the first step, and without a file."""
        if not self.train or self._file is None:
            return None
        path = self.path.with_name("loss.png")
        baselines = {} if bigram is None else {"bigram model": bigram}
        draw_curves(path, title=title, train=self.train, validation=self.validation, baselines=baselines)
        return path


def _rows(text: bytes) -> Iterator[dict[str, Any]]:
    """The lines of a log; what a power loss left of a line is skipped."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                yield row


def lost_steps(rows: Iterable[dict[str, Any]], after: int) -> int:
    """How many steps the last run of a log has taken beyond the step `after`, from which the next one continues."""
    last = 0
    for row in rows:
        last = row.get("resumed_after", row["step"] if "loss" in row or "skipped" in row else last)
    return max(0, last - after)


def make_folder(path: Path) -> None:
    """Creates the folder and its parents; raises ValueError where that fails."""
    try:
        durable_files.make_folder(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be created ({error.strerror}): choose another folder with out.") from error


@dataclasses.dataclass
class Loop:
    """The compiled step and evaluator, both sets of batches, and where to report.

    save, copy: called with (step number, state) when a checkpoint, or a local copy, is due, or None.
    compare: with the state every `check_replicas` steps and before a save, or None.
    memory: text printed with each step.
    seconds, timed_steps: of training, without validation and saving. preempted: whether a signal ended the loop.
    """

    config: TrainConfig
    step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Any], jax.Array]
    batches: Prefetched
    held_out: Batches
    log: MetricsLog
    progress: ProgressReporter
    watchdog: Watchdog
    preemption: Preemption
    bigram: float | None
    memory: str
    save: Callable[[int, Any], Any] | None = None
    compare: Callable[[Any], Any] | None = None
    copy: Callable[[int, Any], Any] | None = None
    seconds: float = 0.0
    timed_steps: int = 0
    preempted: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Since the start, not counting validation and saving."""
        return self.config.batch_size * self.config.seq_len * self.timed_steps / self.seconds if self.seconds else 0.0

    def run(self, state: Any, *, after: int = 0) -> Any:
        """The state after all remaining steps; donates `state`, which is that after the step `after`.

        Raises BadStepError after more than `max_bad_steps` consecutive steps that are not finite.
        """
        waiting: Metrics | None = None
        self._clock, saved = time.perf_counter(), after
        self._starvation = StarvationMonitor()
        for number in range(after + 1, self.config.steps + 1):
            if self.preemption.asked(number):
                return self._leave(number - 1, state, waiting, saved)
            self.watchdog.beat(f"step {number}")
            state, metrics = self.step(state, next(self.batches))
            if waiting:
                self._record(*waiting)
            waiting = number, metrics, self.batches.waited
            saves = self.save and (number % self.config.save_every == 0 or number == self.config.steps)
            if self.compare and (saves or number % self.config.check_replicas == 0):
                if waiting:
                    self._record(*waiting)
                waiting = None
                self.watchdog.beat(f"comparing copies after step {number}")
                self.compare(state)
                self._clock = time.perf_counter()
            if self.save and saves:
                if waiting:
                    self._record(*waiting)  # before saving: the log has the losses, and a bad step raises here
                waiting = None
                self.watchdog.rest()
                self.log.sync()
                self.save(number, state)
                self._clock, saved = time.perf_counter(), number
            if self.copy and number % (self.config.local_every or 1) == 0:
                if waiting:
                    self._record(*waiting)
                waiting = None
                self.copy(number, state)
                self._clock = time.perf_counter()
            if number % self.config.eval_every == 0 or number == self.config.steps:
                if waiting:
                    self._record(*waiting)
                waiting = None
                self._validate(number, state)
        self.watchdog.rest()
        return state

    def _leave(self, number: int, state: Any, waiting: Metrics | None, saved: int) -> Any:
        """Saves, when the run is asked to end after the step `number`."""
        self.preempted = True
        if waiting:
            self._record(*waiting)
        self.watchdog.rest()
        if self.save and number > saved:
            self.log.sync()
            self.save(number, state)
        outcome = "saved, and --resume continues from there" if self.save and number else "nothing is saved"
        name = signal.Signals(self.preemption.signal or signal.SIGTERM).name
        self.progress.say(f"Asked to end ({name}) after step {number}: {outcome}.")
        return state

    def _record(self, number: int, metrics: dict[str, jax.Array], data_wait: float) -> None:
        row = {name: float(value) for name, value in metrics.items()}  # blocks until the step is done
        now = time.perf_counter()
        seconds = now - self._clock
        rate = self.config.batch_size * self.config.seq_len / seconds
        self.seconds, self.timed_steps, self._clock = self.seconds + seconds, self.timed_steps + 1, now
        stopped, bad = row.pop("stopped"), row.pop("bad")
        if stopped:
            raise BadStepError(
                f"The loss of step {number} is {row['loss']}, the norm of its gradient {row['grad_norm']}, and "
                f"{self.config.max_bad_steps} consecutive such steps are skipped: give a lower learning_rate than "
                f"{self.config.learning_rate}, a lower grad_clip_norm than {self.config.grad_clip_norm}, or a larger "
                "max_bad_steps.")
        if bad:
            self.progress.say(f"step {number:5d}  skipped: loss {row['loss']}, norm of the gradient {row['grad_norm']}")
            row = {name: value for name, value in row.items() if np.isfinite(value)}
        else:
            self.log.train.append((number, row["loss"]))
        self.log.write(step=number, **row, tokens_per_second=round(rate, 1), data_wait=round(data_wait, 6))
        if message := self._starvation.observe(waited=data_wait, seconds=seconds):
            self.progress.say(f"step {number:5d}  {message}")
        self.progress.tick(number, loss=row.get("loss", math.nan), tokens_per_second=self.tokens_per_second,
                         memory=f"{self.memory}, process peak {size_text(process_bytes())}")

    def _validate(self, number: int, state: Any) -> None:
        # One after another: two programs with collectives at once may deadlock on simulated devices.
        losses = []
        for batch in itertools.islice(self.held_out.once(), EVAL_BATCHES):
            self.watchdog.beat(f"validation after step {number}")
            losses.append(float(self.evaluate(state, batch)))
        self.watchdog.rest()
        loss = float(np.mean(losses))
        self.log.validation.append((number, loss))
        self.log.write(step=number, validation_loss=loss)
        beside = "" if self.bigram is None else f" (bigram model: {self.bigram:.3f})"
        self.progress.say(f"step {number:5d}  validation loss {loss:.3f}{beside}")
        self._clock = time.perf_counter()
