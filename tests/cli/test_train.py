"""A training run from end to end: its files, its summary, and that it learns."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
import typing
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from support.command_line import run
from support.covering import weekly
from support.oracle import slow
from support.run_log import losses, rows

import zero_jax
from models import gpt2
from zero_jax.cli.options.data import BYTES
from zero_jax.cli.reports import report
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train
from zero_jax.cli.weights.generate import generate, next_logits
from zero_jax.data import corpus
from zero_jax.precision import POLICIES
from zero_jax.stages import STAGES

ROOT = Path(__file__).parents[2]
TINY = TrainConfig(model="gpt2:tiny", batch_size=8, seq_len=32, max_bytes=200_000, eval_every=2, steps=3)


def train_args(out: Path, *args: str) -> list[str]:
    short = ["--model", "gpt2:tiny", "--batch-size", "8", "--seq-len", "32", "--max-bytes", "200000"]
    return ["train", *short, "--out", str(out), *args]


@pytest.mark.slow
def test_model_parallelism_is_an_option_and_changes_no_number(tmp_path):
    found = []
    for options in ((), ("--tensor", "2", "--context", "2", "--sequence-parallel", "--remat", "full",
                         "--partition-activations", "yes")):
        out = tmp_path / str(len(options))
        done = run(*train_args(out, "--steps", "3", "--devices", "8", *options))
        assert done.returncode == 0, done.stderr
        found.append([*losses(out).values()])
    assert len(found[0]) == 3 and found[1] == pytest.approx(found[0], rel=1e-5)


def test_the_command_writes_log_and_curve(tmp_path):
    (tmp_path / "options.toml").write_text(
        'steps = 3\neval-every = 3\ndevices = 8\nreplica = 2\nschedule = "constant"\nwarmup = 0.34\n'
        'log-to = ["tensorboard"]\nprofile = "steps=2:3"\n')
    done = run(*train_args(tmp_path, "--config", str(tmp_path / "options.toml"), "--eval-every", "2"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.txt", "checkpoints", "config.toml", "loss.png", "options.toml", "profile", "report.html", "tensorboard",
        "train.jsonl"]
    told = (tmp_path / "profile/summary.txt").read_text()
    assert told.startswith("In 2 steps operations took ") and "matrix products " in told and "all-gather" in told
    assert told in done.stdout and list((tmp_path / "profile").glob("**/*.xplane.pb"))
    page = (tmp_path / "report.html").read_text()
    assert "gpt2:tiny, ZeRO stage 3, 8 cpu devices" in page and page.count("<svg") >= 7
    assert "Where the time went" in page and "continued by the model" in page
    first, *logged, last = rows(tmp_path)
    assert first["config"]["stage"] == 3 and len(first["devices"]) == 8 and first["baselines"]["bigram model"] > 1
    steps = [row for row in logged if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert set(steps[0]) == {
        "step", "loss", "grad_norm", "learning_rate", "skipped", "seconds", "tokens_per_second", "tflops_per_device",
        "mfu", "hfu", "memory_bytes", "data_wait"}
    row = steps[-1]
    assert row["tokens_per_second"] == pytest.approx(8 * 32 / row["seconds"], rel=1e-3) and row["mfu"] is None
    # 6 FLOPs for each token and parameter of a product, of blocks and output layer; and causal attention's, half.
    products = 2 * 12 * 64**2 + 256 * 64 + 2 * 32 * 64
    assert row["tflops_per_device"] * 8e12 * row["seconds"] == pytest.approx(6 * 8 * 32 * products, rel=1e-3)
    assert [row["step"] for row in logged if "validation_loss" in row] == [2, 3]
    # The default, a cosine, would have 0.55 of the peak in the third.
    np.testing.assert_allclose([row["learning_rate"] for row in steps], [0, 3e-3, 3e-3], rtol=1e-5)
    assert "not the default:\nmodel = " in done.stdout
    assert 'schedule = "constant"' in (tmp_path / "config.toml").read_text()
    assert last["summary"]["evaluation"]["validation_loss"] == logged[-1]["validation_loss"]
    evaluation = next(row for row in logged if "validation_loss" in row)
    assert np.exp(evaluation["validation_loss"]) == pytest.approx(evaluation["validation_perplexity"])
    assert 0 <= evaluation["validation_accuracy"] <= 1
    for words in (" parameters, N = 4 shards", "Mesh: replica 2 x data 4, 8 cpu devices; stage 3 (P_os+g+p), 4 shards.",
                  "the peak of a cpu is not known", "of it ", "sent by each device per step", "HFU are left out",
                  "temporaries", "continued by the model"):
        assert words in done.stdout


def learned(out, stage):
    """The summary of 30 steps at this stage."""
    config = dataclasses.replace(TINY, stage=stage, steps=30, eval_every=30, seq_len=64, samples=0, out=out)
    return train(config, console=Console(quiet=True))


@pytest.mark.slow
def test_a_checkout_that_is_not_installed_trains(tmp_path, monkeypatch):
    version = metadata.version

    def uninstalled(package):
        if package == "zero-jax":
            raise metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(metadata, "version", uninstalled)
    assert run("--version").stdout.startswith("zero_jax not installed (jax 0.")
    assert zero_jax.__version__ == "not installed"
    done = run(*train_args(tmp_path, "--steps", "1", "--samples", "0", "--save-every", "0", "--eval-batches", "1"))
    assert done.returncode == 0, done.stderr
    assert "held out.\nEvaluation: 1 of the 40 batches held out (--eval-batches 1).\n" in done.stdout, done.stdout
    assert "(zero-jax not installed, jax 0." in (tmp_path / "config.toml").read_text()


@pytest.mark.slow
def test_it_learns(tmp_path):
    found = learned(tmp_path, 3)
    first = rows(tmp_path)[1]["loss"]
    assert first > 5 and found.loss < 4 and found.validation_loss < 4


@pytest.mark.slow
def test_stages_agree(tmp_path):
    found = [learned(tmp_path / str(stage), stage) for stage in (0, 3)]
    # Sums are taken in another order.
    np.testing.assert_allclose(found[0].validation_loss, found[1].validation_loss, rtol=1e-3)
    assert found[0].baselines == found[1].baselines


@pytest.mark.slow
def test_an_nnx_model_in_bf16_on_token_ids(tmp_path):
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint16))
    config = dataclasses.replace(TINY, model="gpt2_nnx:tiny", precision="bf16", stage=2, max_bytes=None,
                                 data=(str(tmp_path / "ids.npy"),), out=tmp_path / "out")
    summary = train(config, console=Console(quiet=True))
    assert summary.steps == 3 and summary.curve == tmp_path / "out/loss.png"
    continued = summary.samples[0].splitlines()[-1]
    assert all(0 <= int(token) < 256 for token in continued.split())


@pytest.mark.parametrize(("number", "status", "word"), [
    (signal.SIGINT, 130, "interrupted"), slow(signal.SIGHUP, 129, "preempted")])
def test_ctrl_c_saves_and_keeps_log_and_curve(tmp_path, number, status, word):
    short = ["--no-html", "--model", "support.pairs:small", "--seq-len", "8", "--samples", "0", "--steps", "100000"]
    command = [sys.executable, "-W", "error", "-m", "zero_jax", *train_args(tmp_path), *short]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        log, deadline = tmp_path / "train.jsonl", time.monotonic() + 200
        while not (log.exists() and len(log.read_text().splitlines()) > 3) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        try:
            output, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == status and "Traceback" not in errors, errors
    assert word in output and (tmp_path / "loss.png").exists()
    assert f"({signal.Signals(number).name})" in output and "--resume continues from there" in output
    summary = rows(tmp_path)[-1]["summary"]
    assert summary[word] and summary["signal"] == number
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(summary["steps"])]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    (tmp_path / "bad.py").write_text(
        "import flax.linen as nn\nimport jax.numpy as jnp\nPRESETS = {'nan': None}\n"
        "class Bad(nn.Module):\n    @nn.compact\n    def __call__(self, tokens):\n"
        "        return nn.Embed(256, 256)(tokens) * jnp.nan\n"
        "def build(config):\n    return Bad()\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = run(*train_args(tmp_path / "out"), "--model", "bad:nan")
    assert done.returncode == 1 and done.stderr.startswith("error: The loss of step 1 is nan")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("change", [{"stage": 4}, {"precision": "fp8"}, {"devices": 0}, {"warmup": 2.0}, {"data": ()}])
def test_a_config_that_makes_no_run(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(TINY, **change)


def test_the_choices_of_the_config_are_those_of_the_library():
    fields = typing.get_type_hints(TrainConfig)
    assert typing.get_args(fields["stage"]) == tuple(stage.number for stage in STAGES)
    assert typing.get_args(fields["precision"]) == tuple(POLICIES)
    assert BYTES == corpus.BYTE_VOCAB_SIZE


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@weekly("precision", ["fp32", "bf16"])
def test_the_formulas_of_the_table_are_the_stages(stage, precision):
    step = zero_jax.make_zero_train_step(gpt2.build(gpt2.PRESETS["tiny"]), stage, precision=precision)
    batch = {name: jax.ShapeDtypeStruct((8, 16), np.int32) for name in ("inputs", "targets")}
    layout = step.layout(batch)
    expected = layout.stage.state_bytes(
        gpt2.PRESETS["tiny"].num_params, 8, low_precision=layout.state.weights is not None)
    by_formula = report.formulas(layout)
    assert sum(value for _, value in by_formula.values()) == expected
    for kind, (_, value) in by_formula.items():
        held = sum(row.device_bytes for row in layout.placements() if row.name.startswith(kind))
        assert value <= held <= value + 64, kind  # Adam's count
    text = _text(report.state_table(layout))
    assert f"{layout.device_bytes:,}" in text and f"{expected:,.0f}" in text and "mu: blocks" in text
    large = dataclasses.replace(gpt2.PRESETS["1.5b"], vocab_size=10**8)  # numbers of 13 digits
    step = zero_jax.make_zero_train_step(gpt2.build(large), stage, precision=precision)
    layout = step.layout(batch)
    assert f"{layout.device_bytes:,}" in _text(report.state_table(layout))  # nothing is cut
    assert f"{layout.device_bytes:,}" not in _text(report.state_table(layout), width=50)  # negative control


def test_a_tokens_number_in_the_window_is_its_end():
    seen = []

    def count_up(batch):
        seen.append((batch["inputs"].copy(), batch["last"].copy()))
        last = batch["inputs"][np.arange(2), batch["last"]]
        return np.where(np.arange(50) == (last[:, None] + 1), 0.0, -1e9)

    new = generate(count_up, np.array([[1, 2, 3], [11, 12, 13]]), num_tokens=6, length=5, temperature=1.0, seed=0)
    assert new.tolist() == [[4, 5, 6, 7, 8, 9], [14, 15, 16, 17, 18, 19]]
    assert seen[0][0].tolist() == [[1, 2, 3, 0, 0], [11, 12, 13, 0, 0]] and seen[0][1].tolist() == [2, 2]
    assert seen[-1][0][0].tolist() == [4, 5, 6, 7, 8] and seen[-1][1].tolist() == [4, 4]


def test_draws_follow_the_softmax():
    logits = np.log(np.array([0.2, 0.5, 0.3]))
    new = generate(lambda batch: np.tile(logits, (2000, 1)), np.zeros((2000, 1), int), num_tokens=1, length=1,
                   temperature=1.0, seed=0)
    np.testing.assert_allclose(np.bincount(new[:, 0]) / 2000, [0.2, 0.5, 0.3], atol=0.04)


def test_next_logits_are_those_of_the_last_token():
    logits = jax.numpy.arange(2 * 3 * 4).reshape(2, 3, 4)
    found = next_logits(lambda inputs: logits, {"inputs": None, "last": np.array([2, 0])})
    np.testing.assert_array_equal(found, [[8, 9, 10, 11], [12, 13, 14, 15]])


def _text(table: object, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
