"""The metrics of a run by step: a JSONL file that a killed run continues, the curve drawn from it, and other writers.

tensorboardX and not `clu.metric_writers`, whose TensorBoard writers import TensorFlow or PyTorch.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_jax.cli.environment import in_folder_of_run
from zero_jax.cli.reports.report import draw_curves
from zero_jax.disk import durable_files
from zero_jax.disk.durable_files import sync
from zero_jax.errors import UsageError

MetricWriter = Callable[[int, Mapping[str, float]], Any]
"""What gets the metrics of each step: its number, and its numbers by name."""


@contextlib.contextmanager
def metric_writers(names: tuple[str, ...], folder: Path, config: Mapping[str, Any], *, after: int
                   ) -> Iterator[list[MetricWriter]]:
    """The writers of these names, open until the end of the `with`.

    Args:
      names: of `tensorboard` and `wandb`.
      folder: of the run.
      config: its options, as plain JSON.
      after: the step from which it continues; 0 for a new one.
    """
    with contextlib.ExitStack() as closing:
        writers = {"tensorboard": lambda: _tensorboard(folder / "tensorboard", after, closing),
                   "wandb": lambda: _wandb(folder, config, closing)}
        yield [writers[name]() for name in names]


def _tensorboard(folder: Path, after: int, closing: contextlib.ExitStack) -> MetricWriter:
    """Of event files; of steps after `after`, which a resumed run takes again, the new ones are shown."""
    from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

    # A file's name has the second of its start: without the suffix a restart within it would write over the file.
    writer = SummaryWriter(str(folder), purge_step=after + 1 if after else None, filename_suffix=f".{after}")
    closing.callback(writer.close)

    def write(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return write


def _wandb(folder: Path, config: Mapping[str, Any], closing: contextlib.ExitStack) -> MetricWriter:
    """Of a run of Weights & Biases; where to, and whether offline, is for its own variables (WANDB_MODE, ...)."""
    import wandb  # pyright: ignore[reportMissingImports]

    try:
        run = wandb.init(project="zero_jax", name=folder.name, dir=str(folder), config=dict(config))
    except Exception as error:  # its own kinds, of no common class: no key, no network
        raise UsageError(f"log_to=wandb: {error}. WANDB_MODE=offline in the environment keeps the run in "
                         f"{folder}/wandb.") from error
    closing.callback(run.finish)
    return lambda step, scalars: run.log(dict(scalars), step=step)


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of the log, without its step.

    >>> scalars_of({"step": 3, "loss": 0.5, "mfu": None, "config": {}})
    {'loss': 0.5}
    """
    return {name: value for name, value in row.items()
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)}


class MetricsLog:
    """The losses of a run by step, and the JSONL file that gets a line for each step."""

    def __init__(self, path: Path, *, after: int | None = None, writes: bool = True,
                 writers: Sequence[MetricWriter] = ()):
        """Starts the file at `path`, or continues it after the step `after`; ValueError where it cannot be written.

        An incomplete last line, of a run that was killed, is removed. Lines of later steps stay, and the new ones are
        appended. Without `writes` there is no file. writers: get the numbers of each line, too.

        Attributes:
          evaluation: the metrics of the last evaluation, as `validation_loss`; empty before the first.
          lost: of the file that is continued, how many steps after `after` it has, which are taken again.
        """
        self.path, self.writers, self._file, self.lost = path, tuple(writers), None, 0
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self.evaluation: dict[str, float] = {}
        if not writes:
            return
        make_folder(path.parent)
        with in_folder_of_run(path):
            if after is not None and path.exists():
                self._read(after)
            self._file = path.open("w" if after is None else "a", encoding="utf-8")
            sync(path.parent)

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
        last = [row for row in rows if "validation_loss" in row and row.get("step", after + 1) <= after][-1:]
        self.evaluation = {name: value for row in last for name, value in row.items() if name != "step"}

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of an evaluation after a step."""
        self.validation.append((step, metrics["loss"]))
        self.evaluation = {f"validation_{name}": value for name, value in metrics.items()}
        self.write(step=step, **self.evaluation)

    def write(self, **row: Any) -> None:
        """Appends a line, which the death of the process does not lose when this returns."""
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        if "step" in row:
            for writer in self.writers:
                writer(row["step"], scalars_of(row))

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

    def draw(self, title: str, baselines: Mapping[str, float], unit: str) -> Path | None:
        """Draws loss.png beside the file and returns its path; None before the first step, and without a file."""
        if not self.train or self._file is None:
            return None
        path = self.path.with_name("loss.png")
        draw_curves(path, title=title, unit=unit, train=self.train, validation=self.validation, baselines=baselines)
        return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of the log at `path`, in order."""
    return list(_rows(path.read_bytes()))


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
    with in_folder_of_run(path, "created"):
        durable_files.make_folder(path)
