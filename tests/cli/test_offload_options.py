"""Where the command line puts the state: what goes together, known before JAX starts."""

import dataclasses
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from support.command_line import ROOT, run_process

from zero_jax.cli.chosen import with_chosen_offload
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.step_from_config import devices_of, step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train
from zero_jax.errors import UsageError
from zero_jax.offload.offload import Offload
from zero_jax.step.disk.step import DiskTrainStep


@pytest.mark.parametrize("options, message", [
    ({"offload": "disk-parameters", "offload_disk": "/tmp/x"}, "unknown. Did you mean .*disk"),
    ({"offload": "disk", "offload_disk": __file__}, "is no folder"),
    ({"offload": "auto", "offload_gib": 2.0, "offload_disk": __file__}, "is no folder"),
    ({"offload": "auto", "offload_gib": -1.0}, "give a number above 0"),
    ({"offload": "optimizer", "offload_fraction": 0.0}, "above 0 and at most 1")])
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(**options)


def test_a_new_run_does_not_overwrite_the_states_of_another(tmp_path):
    folder = tmp_path / "states" / "process-00000-of-00001"
    folder.mkdir(parents=True)
    (tmp_path / "text.txt").write_text("words " * 5000)
    options = {"offload": "disk", "offload_disk": tmp_path / "states", "data": (str(tmp_path / "text.txt"),),
               "out": tmp_path / "run", "model": "gpt2:tiny", "seq_len": 32}
    TrainConfig(**options).check()
    (folder / "commit-1.json").write_text("{}")
    with pytest.raises(UsageError, match="has the states of a run: --resume goes on"):
        TrainConfig(**options).check()


SMALL = TrainConfig(model="gpt2:tiny", batch_size=8, seq_len=16, steps=6, max_bytes=50_000, eval_every=6, samples=0,
                    save_every=2, stage=2, attention="xla")


def losses(out):
    """Of all lines, by step; what a step has that was taken twice must be the same."""
    found = {}
    for line in (out / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "loss" in row:
            assert found.setdefault(row["step"], row["loss"]) == row["loss"]
    return found


def said(config):
    """What a run prints, or the error that refuses it."""
    output = io.StringIO()
    try:
        train(config, console=Console(file=output, width=400))
    except ValueError as error:
        return str(error)
    return output.getvalue()


@pytest.mark.slow
def test_a_run_goes_on_from_the_newer_of_its_files_and_its_checkpoints(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("".join(f"{word * word} words " for word in range(4000)))
    config = dataclasses.replace(SMALL, data=(str(tmp_path / "text.txt"),), resume=True)

    def at(name, **changes):
        folder = tmp_path / f"{name}-states"
        return dataclasses.replace(config, out=tmp_path / name, offload="disk", offload_disk=folder, **changes)

    said(at("whole", resume=False, save_every=0))
    step = DiskTrainStep.__call__

    def ends(self, state, batch):
        if int(state.step) == 5:
            raise KeyboardInterrupt
        return step(self, state, batch)

    with monkeypatch.context() as patch:
        patch.setattr(DiskTrainStep, "__call__", ends)
        said(at("run", resume=False))
    assert len(losses(tmp_path / "run")) == 5
    for name in ("damaged", "other", "records"):
        for kind in ("", "-states"):
            shutil.copytree(tmp_path / f"run{kind}", tmp_path / f"{name}{kind}")

    # The files are after step 5, the last checkpoint is that of step 4.
    assert "Resumed after step 5 of 6 from the files" in said(at("run"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 6

    # Refused, and nothing is changed: another run, and a checkpoint that the files do not lead on from.
    files = {path: path.read_bytes() for path in (tmp_path / "other-states").rglob("*.*")}
    assert "belongs to another run: seed=0 saved but seed=1 given" in said(at("other", seed=1))
    with monkeypatch.context() as patch:  # as another mesh does, blocks of another size lay the files out otherwise
        patch.setattr("zero_jax.cli.step_from_config.offload_argument", lambda config: Offload(
            disk=config.offload_disk, buffer_bytes=2**16))
        text = said(at("other"))
        assert "another model, optimizer, mesh or buffer_bytes" in text, text
        assert "after step 5: to go on from it, give the options of that run; to go on from the checkp" in text, text
    shutil.rmtree(tmp_path / "other/checkpoints")
    text = said(at("other"))
    assert "after step 5 of a run that did not go on from the last checkpoint" in text, text
    assert "to go on from the beginning, remove" in text
    assert files == {path: path.read_bytes() for path in files}

    # What cannot be read is neither damaged nor absent.
    with monkeypatch.context() as patch:
        def fails(*args):
            raise OSError(errno.EIO, "I/O")
        patch.setattr("time.sleep", lambda seconds: None)
        patch.setattr(os, "preadv", fails)
        assert "at byte 0 cannot be read ([Errno 5] I/O" in (text := said(at("records"))), text
        assert "give the options" not in text

    # With damaged files the checkpoint is taken, and of none a run that has begun is not begun again.
    for path in (tmp_path / "records-states").rglob("commit-*.json"):
        path.write_text("{}")
    shutil.copytree(tmp_path / "records", tmp_path / "none")
    shutil.rmtree(tmp_path / "none/checkpoints")
    shutil.copytree(tmp_path / "records-states", tmp_path / "none-states")
    assert "There is no checkpoint: remove" in (text := said(at("none"))) and "no generation is whole" in text, text
    assert "The run goes on from the checkpoint after step 4." in said(at("records"))
    assert losses(tmp_path / "records") == losses(tmp_path / "whole")
    for path in (tmp_path / "damaged-states").rglob("generation-*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    text = said(at("damaged"))
    assert "is damaged" in text and "The run goes on from the checkpoint after step 4" in text
    assert losses(tmp_path / "damaged") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_takes_the_placement_that_fits_and_says_why(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("words " * 5000)
    config = TrainConfig(model="gpt2:tiny", batch_size=8, seq_len=32, steps=1, data=(str(tmp_path / "text.txt"),),
                         stage=1, out=tmp_path / "run", offload="auto", offload_gib=4.0)
    placed, plenty = with_chosen_offload(config, objective_of(config), devices_of(config))
    assert (placed.offload, plenty.offload) == ("no", None)
    assert with_chosen_offload(TrainConfig(), None, []) == (TrainConfig(), None)
    tight = dataclasses.replace(config, offload_gib=(plenty.plans["no"].needed_bytes - 4096) / 2**30)
    output, steps = io.StringIO(), []
    monkeypatch.setattr("zero_jax.cli.training.train.step_of", lambda *args, **options: steps.append(
        step_of(*args, **options)) or steps[-1])
    assert train(tight, console=Console(file=output, width=200)).steps == 1
    text = output.getvalue()
    assert "Placement: offload=optimizer with a share of 0." in text and "fits and moves the least" in text
    assert "no offload does not fit" in text
    assert steps[0].layout().host and 'offload = "auto"' in (tmp_path / "run" / "config.toml").read_text()

    # With less host memory files are taken, whose size is named where there is no folder for them.
    monkeypatch.setattr("zero_jax.planning.placement.host_share", lambda devices: 1000)
    tight = dataclasses.replace(tight, out=tmp_path / "other")
    assert "offload=disk: not compared" in (text := said(tight)) and "two generations: give a folder" in text
    tight = dataclasses.replace(tight, offload_disk=tmp_path / "states", out=tmp_path / "files", save_every=0)
    assert "Placement: offload=disk fits and moves the least" in said(tight)
    assert list((tmp_path / "states").glob("process-*/commit-*.json")) and steps[-1].layout().disk
    with pytest.raises(UsageError, match="give offload=disk to go on from them"):
        config = dataclasses.replace(config, out=tmp_path / "third")
        with_chosen_offload(dataclasses.replace(config, offload_disk=tmp_path / "states", resume=True),
                            objective_of(config), devices_of(config))


KILLED = ["train", "--model", "gpt2:tiny", "--batch-size", "8", "--seq-len", "32", "--max-bytes", "200000", "--steps",
          "10", "--eval-every", "10", "--samples", "0", "--stage", "3", "--precision", "bf16", "--save-every", "0",
          "--offload", "disk"]


@pytest.mark.slow
def test_a_killed_run_with_states_in_files_goes_on_bit_for_bit(tmp_path):
    def options(name):
        return [*KILLED, "--out", str(tmp_path / name), "--offload-disk", str(tmp_path / f"{name}-states")]

    def rows(name, key="loss"):
        lines = (tmp_path / name / "train.jsonl").read_text().splitlines()
        return {row["step"]: row[key] for row in map(json.loads, lines) if key in row}

    done = run_process(*options("whole"))
    assert done.returncode == 0, done.stderr
    with subprocess.Popen([sys.executable, "-W", "error", "-m", "zero_jax", *options("killed")], cwd=ROOT,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 240
        while not (tmp_path / "killed/train.jsonl").exists() or (tmp_path / "killed/train.jsonl").read_text().count(
                '"loss"') < 4:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and len(list((tmp_path / "killed-states").glob("*/*.bin"))) >= 2
    done = run_process(*options("killed"), "--resume")
    found = re.search(r"Resumed after step (\d+) of 10 from the files", done.stdout)
    assert done.returncode == 0 and found and 4 <= int(found[1]) < 10, done.stdout + done.stderr
    assert rows("killed") == rows("whole") and len(rows("whole")) == 10
    assert rows("killed", "validation_loss") == rows("whole", "validation_loss") != {}
    # The control: a step that was left out, or taken twice, would show.
    assert len(set(rows("whole").values())) == 10
