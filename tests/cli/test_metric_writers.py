"""Metrics in TensorBoard's files and in a run of Weights & Biases: those of train.jsonl; missing packages."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
from support.command_line import ROOT, message, run
from support.tensorboard_files import scalars

from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.metrics_log import MetricsLog, metric_writers

WANDB = """
import json, pathlib
class Run:
    def __init__(self, **options): self.rows = [options]
    def log(self, scalars, step): self.rows.append([step, scalars])
    def finish(self): pathlib.Path(self.rows[0]["dir"], "wandb.json").write_text(json.dumps(self.rows))
def init(**options):
    if options["config"].get("fails"): raise RuntimeError("no API key")
    return Run(**options)
"""


def write(log, steps):
    for step in steps:
        log.write(step=step, loss=1 / step, mfu=None, seconds=0.5)
    log.write(step=steps[-1], validation_loss=math.inf, validation_accuracy=0.25)
    log.write(summary={"steps": 3})
    log.close()


def test_tensorboard_gets_the_numbers_of_the_log(tmp_path):
    pytest.importorskip("tensorboardX")
    with metric_writers(("tensorboard",), tmp_path, {}, after=0) as writers:
        write(MetricsLog(tmp_path / "train.jsonl", writers=writers), [1, 2, 3])
    found = scalars(tmp_path / "tensorboard")
    assert set(found) == {"loss", "seconds", "validation_accuracy"}  # and neither what is n/a nor what is not finite
    assert found["loss"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert found["validation_accuracy"] == [(3, 0.25)]
    # Without the writer there is no file: the control.
    write(MetricsLog(tmp_path / "other/train.jsonl"), [1, 2, 3])
    assert scalars(tmp_path / "other/tensorboard") == {}


def test_a_resumed_run_goes_on_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    for after, steps in ((0, [1, 2, 3]), (2, [3, 4])):
        with metric_writers(("tensorboard",), tmp_path, {}, after=after) as writers:
            write(MetricsLog(tmp_path / "train.jsonl", after=after or None, writers=writers), steps)
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["loss"]] == [1, 2, 3, 4]
    # The control: a start that does not say from where has step 3 twice.
    with metric_writers(("tensorboard",), tmp_path / "other", {}, after=0) as writers:
        write(MetricsLog(tmp_path / "other.jsonl", writers=writers), [1, 2, 3])
        write(MetricsLog(tmp_path / "other.jsonl", writers=writers), [3, 4])
    assert [step for step, _ in scalars(tmp_path / "other/tensorboard")["loss"]] == [1, 2, 3, 3, 4]


def test_wandb_gets_the_numbers_of_the_log(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with metric_writers(("wandb",), tmp_path, {"stage": 3}, after=0) as writers:
        write(MetricsLog(tmp_path / "train.jsonl", writers=writers), [1, 2])
    options, *rows = json.loads((tmp_path / "wandb.json").read_text())
    assert options["config"] == {"stage": 3} and options["project"] == "zero_jax"
    assert rows == [[1, {"loss": 1.0, "seconds": 0.5}], [2, {"loss": 0.5, "seconds": 0.5}],
                    [2, {"validation_accuracy": 0.25}]]
    with pytest.raises(ValueError, match="log_to=wandb: no API key. WANDB_MODE=offline"):
        with metric_writers(("wandb",), tmp_path, {"fails": True}, after=0):
            pass
    sys.modules.pop("wandb")  # and not by monkeypatch, which would put it back


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_package_that_is_missing_is_told_before_jax_starts(tmp_path, name, package):
    (tmp_path / "wandb").mkdir()  # as a run of its leaves: no package
    program = ("import sys, importlib.util\nfrom zero_jax.cli import main as cli\nfind = importlib.util.find_spec\n"
               "importlib.util.find_spec = lambda name, *rest: None if name == 'tensorboardX' else find(name, *rest)\n"
               f"assert cli.main(['train', '--log-to', '{name}']) == 2\nassert 'jax' not in sys.modules\n")
    if name == "wandb" and importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert f"--log-to {name}: the package {package} is not installed: pip install 'zero-jax[{name}]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_package_that_is_there_is_no_error():
    pytest.importorskip("tensorboardX")
    TrainConfig(log_to=("tensorboard",)).check_packages()
    with pytest.raises(ValueError, match="log_to='tensorbord' is unknown. Did you mean 'tensorboard'"):
        TrainConfig(log_to=("tensorbord",))  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_dry_run_trains_and_writes_nothing(tmp_path):
    args = ["train", "--dry-run", "--model", "gpt2:tiny", "--batch-size", "8", "--seq-len", "32", "--devices", "8",
            "--out", str(tmp_path / "run")]
    done = run(*args)
    assert done.returncode == 0, message(done)
    for words in ("Dry run, nothing is trained or written; nor are the data read", 'model = "gpt2:tiny"',
                  "Communication by purpose", "8 devices, mesh data 8",
                  "Time: not predicted for the devices that are here"):
        assert words in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_dry_run_for_a_target_predicts_its_time():
    from zero_jax.xla.devices import missing_compiler

    if extra := missing_compiler("h100:8"):
        pytest.skip(f"needs {extra}")
    args = ["train", "--dry-run", "--model", "gpt2:tiny", "--batch-size", "8", "--seq-len", "32", "--target", "h100:8"]
    done = run(*args)
    assert done.returncode == 0, message(done)
    for words in ("Stage 3 on h100:8: 8 devices", "Fits: ", "tokens per second", "MFU, and HFU", "nvlink"):
        assert words in done.stdout
