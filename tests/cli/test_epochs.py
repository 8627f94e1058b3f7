"""`train --epochs`: the steps of whole passes over the data, known before the schedule, and when a run goes on."""

import dataclasses
import io
import re

import pytest
from rich.console import Console
from support.command_line import refused
from support.run_log import losses

from zero_jax.cli.config_file import expand_config
from zero_jax.cli.train_config import InspectConfig, TrainConfig
from zero_jax.cli.training.train import train
from zero_jax.errors import UsageError

SMALL = TrainConfig(model="support.pairs:small", batch_size=8, seq_len=8, max_bytes=900, eval_every=100, samples=0,
                    save_every=100)


@pytest.mark.slow
def test_epochs_are_steps_of_whole_batches_and_a_run_goes_on_to_more(tmp_path):
    said = io.StringIO()
    one = train(dataclasses.replace(SMALL, epochs=1, out=tmp_path / "a"), console=Console(file=said, width=200))
    tokens = int(re.search(r"Data: ([\d,]+) tokens to train", said.getvalue())[1].replace(",", ""))
    batches = (tokens - 1) // SMALL.seq_len // SMALL.batch_size
    assert one.steps == one.steps_taken == batches > 1
    assert f"--epochs 1: {batches} batches each, {batches} steps." in said.getvalue()
    assert f"steps = {batches}\n" in (tmp_path / "a/config.toml").read_text()
    quiet = Console(quiet=True)
    train(dataclasses.replace(SMALL, steps=batches, out=tmp_path / "b"), console=quiet)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")  # by the same schedule
    train(dataclasses.replace(SMALL, steps=batches + 20, out=tmp_path / "c"), console=quiet)
    assert losses(tmp_path / "a") != {n: loss for n, loss in losses(tmp_path / "c").items() if n <= batches}  # control
    again = dataclasses.replace(SMALL, epochs=2, out=tmp_path / "a", resume=True)
    more = train(again, console=quiet)
    assert (more.steps, more.steps_taken) == (2 * batches, batches)
    assert train(again, console=quiet).steps_taken == 0  # negative control: the second pass is taken


def test_steps_and_epochs_are_one_or_the_other(tmp_path):
    for args in (["--steps", "700", "--epochs", "2"], ["--max-steps", "9", "--num-train-epochs", "2"]):
        assert "--steps and --epochs both say when the run ends: give one" in refused("train", *args)
    with pytest.raises(UsageError, match="steps=9 and epochs=2 both say"):
        TrainConfig(steps=9, epochs=2)
    settled = TrainConfig(epochs=2).settled(4)  # negative control: one of them is taken
    assert (settled.steps, settled.epochs) == (8, None)
    with pytest.raises(UsageError, match="inspect trains nothing"):
        InspectConfig(epochs=2)
    with pytest.raises(UsageError, match="a dry run reads no data: give steps"):
        TrainConfig(epochs=2, dry_run=True, out=tmp_path).check()
    with pytest.raises(UsageError, match="ends after the last of steps=8"):
        TrainConfig(epochs=2, profile="3:9").settled(4)


def test_a_flag_of_either_wins_over_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("steps = 9\nseed = 1\n")
    configs = {"train": TrainConfig}
    assert expand_config(["train", "--config", str(file), "--num-train-epochs=2"], configs) == [
        "train", "--seed=1", "--num-train-epochs=2"]
    assert "--steps=9" in expand_config(["train", "--config", str(file), "--stage", "2"], configs)  # negative control
