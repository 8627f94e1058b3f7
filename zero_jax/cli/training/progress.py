"""The progress of a run: a view on a terminal, elsewhere a line for every twentieth of the steps, or each minute."""

import datetime
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from zero_jax.cli.reports.measures import TEXT, Measures
from zero_jax.cli.reports.report import size_text

BLOCKS = "".join(map(chr, range(0x2581, 0x2589)))
"""A lower eighth of a character's cell, two, and so on up to all of it."""
ASCII_BLOCKS = "_.,-=+*#"
SPARKLINE_WIDTH = 48


def sparkline(values: Sequence[float], *, width: int = SPARKLINE_WIDTH, blocks: str = BLOCKS) -> str:
    """A curve in at most `width` characters, each the mean of its share of `values`; what is not finite is left out.

    >>> sparkline([0.0, 1.0, 2.0, 7.0], blocks="01234567"), sparkline([3.0, 3.0, float("nan")], blocks="01")
    ('0127', '00')
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    ends = [len(finite) * i // count for i in range(count + 1)] if count else []
    means = [sum(finite[a:b]) / (b - a) for a, b in zip(ends, ends[1:], strict=False)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(blocks[round((mean - low) / (high - low) * (len(blocks) - 1)) if high > low else 0]
                   for mean in means)


def rates_text(row: Mapping[str, Any], measures: Measures = TEXT) -> str:
    """The speed, utilisation, memory and wait of a step, from its row in the log; what is not known is left out."""
    used = "".join(f"  {name.upper()} {100 * row[name]:.1f} %" for name in ("mfu", "hfu") if row[name] is not None)
    wait = f"  data wait {1000 * row['data_wait']:.1f} ms" * (row["data_wait"] >= 1e-4)
    return (f"{row[measures.rate]:,.0f} {measures.items}/s  {row['tflops_per_device']:.3g} TFLOP/s/device{used}  "
            f"{size_text(row['memory_bytes'])}/device{wait}")


class ProgressReporter:
    """The live view of a run on a terminal, or its lines. Use it in a `with`."""

    def __init__(self, console: Console, *, total: int, measures: Measures = TEXT, every_seconds: float = 60.0):
        """every_seconds: without a terminal, after which there is a line, beside one for each twentieth."""
        self._every_seconds, self._said = every_seconds, time.monotonic()
        self._console, self._every, self._measures = console, max(1, total // 20), measures
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task("", total=total)
        self._losses: list[float] = []
        self._row: Mapping[str, Any] = {}
        self._evaluation = ""
        self._live = Live(get_renderable=self.view, console=console, refresh_per_second=2)

    def __enter__(self) -> "ProgressReporter":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def view(self) -> Group:
        """What the terminal shows: the bar, the curve of the loss, and the rates of the last step."""
        parts: list[Any] = [self._progress.get_renderable()]
        if self._losses:
            utf = self._console.encoding.lower().startswith("utf")
            curve = sparkline(self._losses, blocks=BLOCKS if utf else ASCII_BLOCKS)
            parts.append(Text(f"loss {self._losses[-1]:.3f}  {curve}  {self._evaluation}"))
            parts.append(Text(rates_text(self._row, self._measures)))
        return Group(*parts)

    def tick(self, step: int, row: Mapping[str, Any]) -> None:
        """Step number `step` is done; row: its metrics, as in the log."""
        self._progress.update(self._task, completed=step)
        self._row, loss = row, row.get("loss", math.nan)
        self._losses.append(loss)
        now = time.monotonic()
        if not self._console.is_terminal and (step % self._every == 0 or now - self._said >= self._every_seconds):
            self._said = now
            self.say(f"step {step:5d}  loss {loss:.3f}  {rates_text(row, self._measures)}{self._left()}")

    def _left(self) -> str:
        """The time that the steps that are left will take, at the rate of the last ones; empty before two of them."""
        left = self._progress.tasks[0].time_remaining
        return "" if not left else f"  left {datetime.timedelta(seconds=round(left))}"

    def evaluated(self, step: int, metrics: Mapping[str, float], beside: str) -> None:
        """An evaluation after step number `step`: its loss and measures, and what to compare them with."""
        self._evaluation = f"validation {metrics['loss']:.3f}"
        shown = "".join(f"  {label} {value}" for label, value in self._measures.shown(metrics).items())
        self.say(f"step {step:5d}  validation loss {metrics['loss']:.3f}{shown}{beside}")

    def say(self, text: str) -> None:
        """A line above the view."""
        self._console.print(text, soft_wrap=True)
