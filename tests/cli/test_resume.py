"""`train --resume`: a run that is killed goes on as if nothing had been, and another run is not mistaken for it."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support import command_line
from support.covering import weekly
from support.run_log import losses, rows

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.train_config import InspectConfig, TrainConfig
from zero_jax.cli.training.metrics_log import MetricsLog
from zero_jax.cli.training.resume import CHANGEABLE, FIXED, differences, fixed
from zero_jax.cli.training.train import train
from zero_jax.errors import DamagedCheckpointError

ROOT = Path(__file__).parents[2]
SMALL = TrainConfig(model="support.pairs:small", batch_size=8, seq_len=8, max_bytes=200_000, eval_every=8, steps=12,
                    samples=0, save_every=4, html=False)
ARGS = ["train", "--model", "support.pairs:small", "--batch-size", "8", "--seq-len", "8", "--max-bytes", "200000",
        "--eval-every", "8", "--steps", "12", "--save-every", "4", "--samples", "0", "--no-html"]
KILLED = """
import os, signal, sys, time
from zero_jax.cli import main
from zero_jax.cli.training.metrics_log import MetricsLog
out, steps, write = sys.argv[1], int(sys.argv[2]), MetricsLog.write

def killed(self, **row):
    write(self, **row)
    if "loss" in row and row["step"] == steps:
        while not os.path.isdir(f"{out}/checkpoints/4"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

MetricsLog.write = killed
main.main([*sys.argv[3:], "--out", out])
"""


def run(out: Path, *args: str) -> command_line.Finished:
    """In this process."""
    return command_line.run(*ARGS, "--out", str(out), *args)


def process(*args: str) -> subprocess.CompletedProcess:
    """Python with `args`, which finds the model of the tests."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-W", "error", *args], cwd=ROOT, env=env, timeout=240, capture_output=True,
                          text=True)


def run_process(out: Path, *args: str) -> subprocess.CompletedProcess:
    return process("-m", "zero_jax", *ARGS, "--out", str(out), *args)


def killed(out: Path, *args: str, steps: int) -> None:
    """A run that is killed, without a chance to do anything, when it has saved and its log has so many steps."""
    done = process("-c", KILLED, str(out), str(steps), *ARGS, *args)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of 12 steps that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    train(dataclasses.replace(SMALL, out=out), console=Console(quiet=True))
    return out


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The folder of a run that was killed after it had saved, in the middle of a line of its log."""
    out = tmp_path_factory.mktemp("interrupted")
    killed(out, steps=7)
    assert (out / "checkpoints/4").is_dir() and len(losses(out)) == 7
    with (out / "train.jsonl").open("a") as log:
        log.write('{"step": 9, "lo')
    return out


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, interrupted, whole):
    out = shutil.copytree(interrupted, tmp_path / "run")
    done = run(out, "--resume")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "Resumed after step 4 of 12" in done.stdout
    assert losses(out) == losses(whole) and len(losses(whole)) == 12
    assert losses(out, "validation_loss") == losses(whole, "validation_loss")
    heads = [row["resumed_after"] for row in rows(out) if "config" in row]
    assert heads == [0, 4]
    assert sorted(int(path.name) for path in (out / "checkpoints").iterdir()) == [8, 12]
    assert all(0 <= row["data_wait"] < 60 for row in rows(out) if "loss" in row)
    # The control: from the checkpoint with other batches, the losses are others.
    assert losses(whole)[9] != losses(whole)[10]


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ("--precision", "bf16", "--stage", "2", "--ema", "0.9", "--model", "gpt2:tiny"),
    ("--optimizer", "adafactor", "--stage", "1", "--accumulate", "2", "--devices", "4", "--model",
     "gpt2:tiny"),
    ("--precision", "fp16", "--max-bad-steps", "2", "--model", "gpt2_nnx:tiny")])
def test_runs_of_all_kinds_go_on(tmp_path, options):
    assert run_process(tmp_path / "whole", *options).returncode == 0
    killed(tmp_path / "killed", *options, steps=6)
    assert run_process(tmp_path / "killed", *options, "--resume").returncode == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_on_other_devices_at_another_stage(tmp_path, interrupted, whole):
    out = shutil.copytree(interrupted, tmp_path / "run")
    done = run_process(out, "--resume", "--stage", "1", "--devices", "2")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "which was saved at stage 3 on 8 devices" in done.stdout
    found, expected = losses(out), losses(whole)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4)


def resumed_text(out: Path, **options) -> str:
    """What `train --resume` says of a run like SMALL in `out`, with `options`."""
    console = Console(file=io.StringIO(), width=1000)
    train(dataclasses.replace(SMALL, out=out, resume=True, **options), console=console)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def plain(whole, tmp_path_factory):
    """The losses of that run with two more steps."""
    out = shutil.copytree(whole, tmp_path_factory.mktemp("plain") / "run")
    resumed_text(out, steps=14)
    return losses(out)


def test_more_steps_go_on_bit_for_bit(tmp_path, whole):
    """The control: with a schedule that ends with the steps, a run of 8 of them is not how one of 12 begins."""
    def take(name: str, schedule: str, steps: int) -> dict[int, float]:
        text = resumed_text(tmp_path / name, schedule=schedule, steps=steps)
        texts.append(text)
        return losses(tmp_path / name)

    texts: list[str] = []
    expected = take("whole", "constant", 12)
    assert take("more", "constant", 8) == {step: expected[step] for step in range(1, 9)}
    assert take("more", "constant", 12) == expected and len(expected) == 12
    assert "Changed after step 8: steps 8 -> 12.\nThe schedule goes on at step 9, whose" in texts[-1]
    assert take("less", SMALL.schedule, 8) != {step: loss for step, loss in losses(whole).items() if step < 9}


@weekly("changes, said, position", [
    ({}, "", 14),
    ({"learning_rate": 0.03}, "; learning_rate 0.003 -> 0.03.", 14),
    ({"batch_size": 16}, "batch_size 8 -> 16; ", 8),  # 12 batches of 8 are 6 of 16
    ({"data": ("models",)}, "data ['python'] -> ['models']; steps 12 -> 14. The data are read from their begin", 2)],
        default=2)
def test_what_changed_is_said_and_the_run_goes_on(whole, plain, tmp_path, changes, said, position):
    """The control: without other changes than more steps the losses are those of a run that goes on so."""
    out = shutil.copytree(whole, tmp_path / "run")
    changes = {name: (str(ROOT / "models"),) if name == "data" else value for name, value in changes.items()}
    text = resumed_text(out, steps=14, **changes)
    assert said.replace("models", str(ROOT / "models")) in text and "Resumed after step 12 of 14" in text
    assert "Changed after step 12: " in text and "steps 12 -> 14" in text
    saved = Checkpoints(out / "checkpoints", read_only=True).manifest()
    assert saved.step == 14 and saved.data["position"] == position
    found = losses(out)
    assert {step: found[step] for step in range(1, 13)} == losses(whole) and sorted(found) == [*range(1, 15)]
    assert (found == plain) == (not changes)


def test_a_finished_run_says_what_to_do(whole, tmp_path, monkeypatch):
    monkeypatch.delenv("MAKELEVEL", raising=False)
    out = shutil.copytree(whole, tmp_path / "run")
    more = f"--config {out}/config.toml --resume --steps 24"
    assert f"All 12 steps of this run are taken. More of them: python -m zero_jax train {more}." in resumed_text(out)
    assert "Changed" not in resumed_text(out)
    with pytest.raises(ValueError, match="steps=8: the run in .* has taken 12 steps already: give more, as steps=24"):
        resumed_text(out, steps=8)
    again = f"--resume continues from there, as in python -m zero_jax train {more};"
    assert again in run(out).stderr
    monkeypatch.setenv("MAKELEVEL", "1")  # `make train` once more
    assert f'as in make train ARGS="{more}";' in run(out).stderr
    assert f'ARGS="--config {out}/config.toml --resume";' in run(out, "--steps", "20").stderr  # it is not finished
    (out / "config.toml").unlink()
    assert 'ARGS="--resume --steps 24";' in run(out).stderr


@pytest.mark.parametrize("option, values, message", [
    ("--ema", "0.9", "--ema None saved but --ema 0.9 given"),
    ("--optimizer", "lion", "--optimizer 'adamw' saved but --optimizer 'lion' given"),
])
def test_another_run_is_refused(whole, option, values, message):
    before = (whole / "train.jsonl").read_bytes()
    said = command_line.refused(*ARGS, "--out", str(whole), "--resume", option, values)
    assert message in said and "belongs to another run" in said
    assert (whole / "train.jsonl").read_bytes() == before


@pytest.mark.parametrize("change", [{"seed": 1}, {"model": "gpt2_nnx:tiny"}, {"ema": 0.5}, {"precision": "bf16"}])
def test_every_option_that_matters_is_compared(whole, change):
    name = next(iter(change))
    with pytest.raises(ValueError, match=rf"belongs to another run: {name}=.* saved but {name}=.* given\. Give"
                       ) as told:
        train(dataclasses.replace(SMALL, out=whole, resume=True, **change), console=Console(quiet=True))
    assert told.traceback and not (whole / "checkpoints.lock").exists()  # what is told of holds what the run had


def test_what_may_change_and_what_may_not_are_all_options():
    free = {"stage", "devices", "replica", "tensor", "context", "sequence_parallel", "overlap", "offload",
            "offload_disk", "offload_fraction", "offload_gib", "tiling", "partition_activations",
            "remat", "accumulate", "reduce", "gather", "max_bad_steps", "eval_every", "eval_batches", "save_every",
            "max_to_keep", "resume", "out", "save_to", "local_checkpoints", "local_every", "samples", "distributed",
            "heartbeat", "hang_after", "hang_exit", "check_replicas", "prefetch",
            "epochs", "log_to", "html", "profile", "dry_run", "target", "prefetch_weights",
            "attention", "loss_chunks", "chip", "hpz"}
    matter = {*FIXED, *CHANGEABLE}
    assert matter | free == {field.name for field in dataclasses.fields(TrainConfig)} and not free & matter
    assert not {*FIXED} & {*CHANGEABLE}
    assert json.loads(json.dumps(fixed(SMALL), allow_nan=False)) == fixed(SMALL)


def test_a_run_of_an_earlier_version_goes_on():
    """It saved no schedule, for example, and what it did is the default of today."""
    earlier = ("schedule", "decay", "final_rate", "eval_data")
    saved = {name: value for name, value in fixed(SMALL).items() if name not in earlier}
    assert differences(saved, SMALL) == []
    other = dataclasses.replace(SMALL, model="gpt2:small", seed=1)
    assert differences(saved, other) == [
        "model='support.pairs:small' saved but model='gpt2:small' given", "seed=0 saved but seed=1 given"]
    assert differences(None, SMALL)


def test_a_new_run_does_not_touch_the_checkpoints_of_another(whole):
    done = run(whole)
    assert done.returncode == 2
    assert "has checkpoints of an earlier run, up to step 12: --resume continues" in done.stderr
    assert dataclasses.replace(SMALL, out=whole, resume=True).check()
    assert InspectConfig(**{**vars(SMALL), "out": whole}).check()


@pytest.mark.slow
def test_there_may_be_nothing_to_go_on_from(tmp_path):
    config = dataclasses.replace(SMALL, out=tmp_path, resume=True, steps=2, save_every=0)
    summary = train(config, console=Console(quiet=True))
    assert (summary.steps, summary.steps_taken) == (2, 2)
    assert not (tmp_path / "checkpoints").exists()


def test_checkpoints_that_are_all_damaged_are_not_nothing(whole, tmp_path):
    """Without the files that say that they are complete; the run would start again, and remove them and its log."""
    out = shutil.copytree(whole, tmp_path / "run")
    for file in out.glob("checkpoints/*/commit_success.txt"):
        file.unlink()
    log = (out / "train.jsonl").read_bytes()
    with pytest.raises(DamagedCheckpointError, match="is intact: .*12 is damaged: .*commit_success.txt is gone"):
        train(dataclasses.replace(SMALL, out=out, resume=True), console=Console(quiet=True))
    assert (out / "train.jsonl").read_bytes() == log and len([*out.glob("checkpoints/*")]) == 2


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do(whole, tmp_path):
    before = losses(whole)
    summary = train(dataclasses.replace(SMALL, out=whole, resume=True), console=Console(quiet=True))
    assert (summary.steps, summary.steps_taken) == (12, 0) and losses(whole) == before
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints/12")
    summary = train(dataclasses.replace(SMALL, out=again, resume=True), console=Console(quiet=True))
    assert (summary.steps, summary.steps_taken) == (12, 4) and summary.items_per_second > 0


def test_the_log_goes_on(tmp_path):
    history = MetricsLog(tmp_path / "train.jsonl")
    for step in (1, 2, 3):
        history.write(step=step, loss=float(step))
    history.write(step=2, validation_loss=9.0)
    history.close()
    with (tmp_path / "train.jsonl").open("a") as log:
        log.write('{"step": 4')
    again = MetricsLog(tmp_path / "train.jsonl", after=2)
    assert again.train == [(1, 1.0), (2, 2.0)] and again.validation == [(2, 9.0)]
    again.write(step=3, loss=3.5)
    again.close()
    assert losses(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.5}
    MetricsLog(tmp_path / "train.jsonl").close()
    assert (tmp_path / "train.jsonl").read_text() == ""


def test_the_log_says_how_many_steps_are_lost(tmp_path):
    path, found = tmp_path / "train.jsonl", []
    for after, last in ((None, 7), (4, 6), (4, 4), (4, 5), (0, 0)):
        log = MetricsLog(path, after=after)
        found.append(log.lost)
        log.write(resumed_after=after or 0)
        for step in range((after or 0) + 1, last + 1):
            log.write(step=step, loss=0.5)
            log.write(step=step, validation_loss=0.5)
        log.close()
    assert found == [0, 3, 2, 0, 5]


def test_the_log_is_on_the_disk_before_a_checkpoint(tmp_path, monkeypatch):
    """The control: without the last sync before a checkpoint, a power loss leaves a log that lacks a step before it."""
    on_disk, at_saves, fsync, save = [b"", b""], [], os.fsync, Checkpoints.save

    def recorded(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("train.jsonl"):
            on_disk.append((tmp_path / "train.jsonl").read_bytes())
        fsync(descriptor)

    def saved(self, *args, at, **options):
        at_saves.append((at, *on_disk[-2:]))
        return save(self, *args, at=at, **options)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(Checkpoints, "save", saved)
    config = dataclasses.replace(SMALL, out=tmp_path, steps=3, save_every=1)
    train(config, console=Console(quiet=True))

    def steps_left(text, after):
        (tmp_path / "left.jsonl").write_bytes(text + bytes(20))  # after a power loss some file systems have zeros
        left = MetricsLog(tmp_path / "left.jsonl", after=after)
        left.close()
        return [step for step, _ in left.train]

    assert [at for at, _, _ in at_saves] == [1, 2, 3]
    for at, before, log in at_saves:
        assert steps_left(log, at) == list(range(1, at + 1))
        assert steps_left(before, at) == list(range(1, at))
