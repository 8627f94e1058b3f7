"""Schedules of the command line: their rates by hand, and as a run reports them."""

import dataclasses
import json
import math

import numpy as np
import pytest
from rich.console import Console

from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train
from zero_jax.optim.presets import SCHEDULES, make_schedule

PEAK, FINAL, STEPS, WARMUP, DECAY = 0.4, 0.04, 20, 4, 8


def by_hand(name, step):
    """The rate of step number `step` (from 0), written out."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    through = (step - WARMUP) / (STEPS - WARMUP)
    return {"cosine": FINAL + (PEAK - FINAL) * (1 + math.cos(math.pi * through)) / 2,
            "linear": PEAK + (FINAL - PEAK) * through,
            "wsd": PEAK + (FINAL - PEAK) * max(0, step - (STEPS - DECAY)) / DECAY,
            "constant": PEAK}[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_by_hand(name):
    schedule = make_schedule(name, peak=PEAK, final=FINAL, steps=STEPS, warmup=WARMUP, decay=DECAY)
    found = [float(schedule(step)) for step in range(STEPS + 1)]
    np.testing.assert_allclose(found, [by_hand(name, step) for step in range(STEPS + 1)], rtol=1e-5)
    # Negative control: a warmup that is a step longer is seen.
    longer = make_schedule(name, peak=PEAK, final=FINAL, steps=STEPS, warmup=WARMUP + 1, decay=DECAY)
    assert not np.allclose([float(longer(step)) for step in range(STEPS + 1)], found, rtol=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_the_first_step_has_the_peak(name):
    schedule = make_schedule(name, peak=PEAK, final=FINAL, steps=STEPS, warmup=0, decay=DECAY)
    assert float(schedule(0)) == pytest.approx(PEAK)


@pytest.mark.slow
def test_a_run_reports_the_rate_of_each_step(tmp_path):
    config = TrainConfig(model="gpt2:tiny", batch_size=8, seq_len=16, max_bytes=100_000, steps=6, samples=0,
                         save_every=0, out=tmp_path, schedule="wsd", learning_rate=PEAK / 100, warmup=0.34, decay=0.5,
                         final_rate=0.5)
    train(config, console=Console(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    found = [row["learning_rate"] for row in rows if "loss" in row]
    np.testing.assert_allclose(found, np.array([0, 0.5, 1, 1, 1 - 0.5 / 3, 1 - 1 / 3]) * PEAK / 100, rtol=1e-5)


@pytest.mark.parametrize("change, message", [
    ({"schedule": "wds"}, "schedule='wds' is unknown. Did you mean 'wsd'"),
    ({"decay": 0.1}, "--decay 0.1 without --schedule wsd"),
    ({"schedule": "constant", "final_rate": 0.5}, "--final-rate 0.5 with --schedule constant"),
    ({"schedule": "wsd", "warmup": 0.5, "decay": 0.6}, "are more than all steps"),
    ({"schedule": "wsd", "decay": 1.5}, "decay=1.5 is not within 0 to 1"),
    ({"final_rate": -0.1}, "final_rate=-0.1 is not within 0 to 1")])
def test_values_that_do_nothing_or_make_no_schedule(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TrainConfig(), **change)
