"""What a plan and a run take by themselves: one default for both, and a planned command means the same to `train`."""

import dataclasses

import pytest

from zero_jax.cli.flags import read_flags
from zero_jax.cli.options.of_step import SIMULATED_LENGTH, StepOptions
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.train_config import TrainConfig

SHARED = [field.name for field in dataclasses.fields(PlanConfig) if field.name in {
    each.name for each in dataclasses.fields(TrainConfig)} - {"target", "batch_size"}]
FLAGS = [[], ["--model", "gpt2:124m"], ["--model", "llama:3.1-8b", "--stage", "2", "--remat", "full"],
         ["--model", "gpt2:124m", "--seq-len", "64", "--precision", "fp32", "--optimizer", "lion"],
         ["--offload", "optimizer", "--tensor", "2", "--sequence-parallel", "--quantize-gradients", "int8"]]


def both(flags, *more):
    """The options of a plan and of a run that are given the same flags, once their model is known."""
    configs = read_flags("plan", PlanConfig, flags), read_flags("train", TrainConfig, [*flags, *more])
    for config in configs:
        config.check()
    return [{name: getattr(config, name) for name in SHARED} for config in configs]


def test_every_shared_option_has_one_default():
    """Controls: what is compiled for and the batch are not shared, as the changelog says."""
    assert {field.name for field in dataclasses.fields(StepOptions)} < set(SHARED) and len(SHARED) > 25
    defaults = [{field.name: field.default for field in dataclasses.fields(config)} for config in (
        PlanConfig, TrainConfig)]
    assert [name for name in SHARED if defaults[0][name] != defaults[1][name]] == []
    assert [name for name in ("target", "batch_size") if defaults[0][name] != defaults[1][name]] == [
        "target", "batch_size"]


@pytest.mark.parametrize("flags", FLAGS)
def test_the_same_flags_mean_the_same(flags, tmp_path):
    """Of a run on accelerators, here for a target. Control: other flags, other options."""
    plan, train = both(flags, "--dry-run", "--target", "h100:8", "--out", str(tmp_path / "run"))
    assert plan == train and plan["precision"] == ("fp32" if "fp32" in flags else "bf16")
    assert both([*flags, "--accumulate", "1", "--stage", "1"], "--out", str(tmp_path / "run"))[0] != plan


def test_accelerators_that_are_here_count_as_targets(tmp_path, monkeypatch):
    """Controls: simulated devices keep what they can compute in seconds; what is given is kept on both."""
    for name, length in (("gpt2:124m", SIMULATED_LENGTH), ("gpt2:tiny", 64)):
        simulated = TrainConfig(model=name, steps=1, out=tmp_path)
        simulated.check()
        assert (simulated.precision, simulated.seq_len) == ("fp32", length)
    monkeypatch.setattr("zero_jax.cli.train_config.simulates", lambda: False)
    live = TrainConfig(model="gpt2:124m", steps=1, out=tmp_path)
    live.check()
    assert (live.precision, live.seq_len) == ("bf16", 1024)
    given = TrainConfig(model="gpt2:124m", steps=1, seq_len=64, precision="fp32", out=tmp_path)
    given.check()
    assert (given.precision, given.seq_len) == ("fp32", 64)
