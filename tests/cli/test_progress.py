"""What a run shows while it trains: a live view on a terminal, lines elsewhere, and how long data were waited for."""

import io
import json
import re
import time

import jax.numpy as jnp
import pytest
from rich.console import Console

from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.objectives.text import Causal
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.loop import Loop
from zero_jax.cli.training.metrics_log import MetricsLog
from zero_jax.cli.training.progress import ASCII_BLOCKS, BLOCKS, ProgressReporter, sparkline
from zero_jax.distributed.preemption import Preemption
from zero_jax.distributed.watchdog import Watchdog
from zero_jax.planning.flops import StepFlops

ROW = {"loss": 2.5, "tokens_per_second": 12345.6, "tflops_per_device": 0.0123, "mfu": None, "hfu": 0.5,
       "memory_bytes": 3 << 20, "data_wait": 0.0042}


def shown(terminal: bool, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding, write_through=True)
    console = Console(file=stream, force_terminal=terminal, width=120, color_system=None)
    with ProgressReporter(console, total=40) as progress:
        for step in range(1, 41):
            progress.tick(step, ROW | {"loss": 5.0 - step / 10})
        progress.evaluated(40, {"loss": 1.25, "perplexity": 3.49, "accuracy": 0.5}, " (bigram model: 2.400)")
    return raw.getvalue().decode(encoding)


def test_a_terminal_has_a_curve_and_the_rates():
    text = shown(True)
    assert "40/40" in text and BLOCKS[-1] in text and BLOCKS[0] in text and "loss 1.000" in text
    assert "12,346 tokens/s  0.0123 TFLOP/s/device  HFU 50.0 %  3.0 MiB/device  data wait 4.2 ms" in text
    assert "validation loss 1.250  perplexity 3.490  accuracy 50.0 % (bigram model: 2.400)" in text
    assert text.count("step    2  loss") == 0


def test_elsewhere_there_are_plain_lines():
    lines = shown(False).splitlines()
    assert lines[0].startswith("step     2  loss 4.800  12,346 tokens/s") and len(lines) == 21
    assert not set("".join(lines)) & set(BLOCKS) and "\x1b" not in "".join(lines)


def test_lines_say_what_is_left_and_come_each_minute():
    def lines(every_seconds, row=ROW):
        console = Console(file=io.StringIO(), width=100, color_system=None)
        with ProgressReporter(console, total=4000, every_seconds=every_seconds) as progress:
            for step in range(1, 13):
                progress.tick(step, row)
                time.sleep(0.002)
        return console.file.getvalue().splitlines()

    shown_lines = lines(0.0)
    assert len(shown_lines) == 12 and re.search(r"  left 0:0\d:\d\d$", shown_lines[-1]), shown_lines[-1]
    assert "left" not in shown_lines[0]  # no step before it says how long one takes
    assert lines(60.0) == []  # negative control
    known = lines(0.0, ROW | {"hfu": None, "data_wait": 0.0})[0]
    assert known == "step     1  loss 2.500  12,346 tokens/s  0.0123 TFLOP/s/device  3.0 MiB/device"


def test_a_terminal_without_unicode_has_another_curve():
    assert ASCII_BLOCKS[-1] * 2 in shown(True, "latin-1")


def test_a_curve_has_its_shape_in_any_width():
    assert sparkline([1.0] * 10 + [8.0] * 10, width=4, blocks="01234567") == "0077"
    assert sparkline([]) == "" and len(sparkline([float(i) for i in range(1000)])) == 48


class Slow:
    """Batches that take 20 ms each."""

    waited = 0.02

    def __next__(self):
        time.sleep(self.waited)
        return {}

    def once(self):
        return iter(())


class Pending:
    """A metric that is there once it is asked for, and not before."""

    def is_ready(self):
        return False

    def __float__(self):
        return 1.0


@pytest.mark.parametrize(("loss", "low", "high"), [(jnp.float32(1.0), 0.02, 0.5), (Pending(), 0.0, 0.0)])
def test_data_are_waited_for_only_when_the_devices_are_done(tmp_path, loss, low, high):
    metrics = {"loss": loss, "grad_norm": 1.0, "stopped": 0.0, "bad": 0.0}
    log = MetricsLog(tmp_path / "train.jsonl")
    config = TrainConfig(steps=6, eval_every=6, seq_len=128)
    with ProgressReporter(Console(quiet=True), total=6) as progress, Watchdog(None) as watchdog:
        objective = Causal(config, find_model(config.model))
        Loop(config, objective, lambda state, batch: (state, metrics), lambda state, batch: {}, Slow(), Slow(), log,
             progress, watchdog, Preemption(), {}, StepFlops(1.0, 1.0, 1, None), [], 1024).run(0)
    log.close()
    rows = [row for row in map(json.loads, (tmp_path / "train.jsonl").read_text().splitlines()) if "loss" in row]
    assert len(rows) == 6 and all(row["memory_bytes"] == 1024 and row["mfu"] is None for row in rows)
    # The wait for batch k + 1 is part of the time of step k; before the first batch no step runs.
    assert all(low <= row["data_wait"] <= high for row in rows[1:-1])
    assert rows[0]["data_wait"] >= 0.02 and all(row["data_wait"] <= row["seconds"] for row in rows)
