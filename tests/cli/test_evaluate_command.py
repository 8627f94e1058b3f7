"""`evaluate`: the perplexity of a file, each token once, by NumPy; windows, strides and what is refused."""

import dataclasses
import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import command_line

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.resume import fixed
from zero_jax.cli.weights import saved_model
from zero_jax.cli.weights.evaluate_command import evaluate_command, windows
from zero_jax.cli.weights.file_configs import EvaluateConfig
from zero_jax.errors import UsageError

RUN = TrainConfig(model="support.pairs:small", batch_size=8, seq_len=8)
TEXT = "A short text, whose bytes are no multiple of a window\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(the folder of a run, its parameters)."""
    folder = tmp_path_factory.mktemp("run")
    step = step_of(RUN, find_model(RUN.model), jax.devices())
    state = step.init(jax.random.key(0), {name: np.zeros((8, 8), np.int32) for name in ("inputs", "targets")})
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(step, state, at=1, config=fixed(RUN), wait=True)
    return folder, jax.tree.map(np.asarray, step.params(state))


@pytest.fixture(autouse=True)
def devices_that_are_there(monkeypatch):
    monkeypatch.setattr(saved_model, "simulate_devices", lambda _: None)  # JAX has started with eight


def nats(params, text):
    """The sum over the bytes of a text but the first, each predicted from the one before it."""
    ids = np.frombuffer(text.encode(), np.uint8)
    logits = (params["layers_0"]["embedding"][ids[:-1]] @ params["layers_1"]["kernel"] + params["layers_1"]["bias"]
              ).astype(np.float64)
    return float((np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(ids) - 1), ids[1:]]).sum())


def config(folder, *files, **options):
    return EvaluateConfig(str(folder), model=RUN.model, text=tuple(map(str, files)), **options)


@pytest.mark.parametrize("options", [{}, {"stride": 3, "seq_len": 7}, {"batch_size": 1, "seq_len": 64}])
def test_each_token_of_all_files_counts_once(tmp_path, saved, options):
    """The model sees one byte alone, so that every window and stride has the same sum."""
    folder, params = saved
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": "rows here"}\n{"text": "x"}\n')
    found = evaluate_command(config(folder, tmp_path / "a.txt", tmp_path / "b.jsonl", **options))
    texts = [TEXT, "two", "rows here", "x"]
    assert (found.texts, found.bytes) == (4, sum(map(len, texts)))
    assert found.tokens == sum(map(len, texts)) - 4
    expected = sum(nats(params, text) for text in texts[:3])
    assert found.nats == pytest.approx(expected, rel=1e-6)
    assert found.as_json()["perplexity"] == pytest.approx(math.exp(expected / found.tokens), rel=1e-6)
    assert found.as_json()["bits_per_byte"] == pytest.approx(expected / math.log(2) / found.bytes, rel=1e-6)
    whole = TEXT[:len(TEXT) // 8 * 8 + 1]  # the control: without the last short window it is another number
    assert abs(nats(params, whole) / (len(whole) - 1) - nats(params, TEXT) / (len(TEXT) - 1)) > 1e-3


@pytest.mark.parametrize(("number", "length", "stride"), [(2, 4, 4), (9, 4, 4), (10, 4, 1), (11, 4, 3), (3, 8, 8)])
def test_windows_have_every_target_once_with_the_context_of_a_stride(number, length, stride):
    ids, seen = np.arange(100, 100 + number), []
    for inputs, targets, weights in windows(ids, length, stride):
        at = np.flatnonzero(weights)
        assert (targets[at] == inputs[at] + 1).all() and len(inputs) == len(targets) == len(weights) == length
        seen += targets[at].tolist()
        assert not seen[:-len(at)] or at[0] >= length - stride or stride == length  # the control: context before it
    assert seen == list(range(101, 100 + number))
    assert not list(windows(ids[:1], length, stride))


class SumModel(nn.Module):
    """Logits of the sum of all tokens so far: what a window has before a token matters."""

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(256)(jnp.cumsum(nn.one_hot(tokens, 256), 1))


def test_more_context_is_another_number(tmp_path, saved, monkeypatch):
    """With a stride of 1 each token but the first window's has seq_len tokens before it; by hand."""
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(size=(256, 256)).astype(np.float32), np.zeros(256, np.float32)
    step = step_of(RUN, dataclasses.replace(find_model(RUN.model), build=lambda _: SumModel()), jax.devices())
    batch = {name: np.zeros((8, 8), np.int32) for name in ("inputs", "targets")}
    state = step.init(jax.random.key(0), batch, params={"Dense_0/kernel": kernel, "Dense_0/bias": bias})
    monkeypatch.setattr(saved_model.SavedModel, "loaded", (step, state, 8))
    (tmp_path / "a.txt").write_text(TEXT)
    ids = np.frombuffer(TEXT.encode(), np.uint8)

    def by_hand(start_of):
        total = 0.0
        for at in range(1, len(ids)):
            counts = np.bincount(ids[start_of(at):at], minlength=256)
            logits = (counts @ kernel).astype(np.float64)
            total += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[ids[at]]
        return total

    found = {stride: evaluate_command(config(saved[0], tmp_path / "a.txt", stride=stride)).nats for stride in (1, 8)}
    assert found[1] == pytest.approx(by_hand(lambda at: max(0, at - 8)), rel=1e-5)
    assert found[8] == pytest.approx(by_hand(lambda at: (at - 1) // 8 * 8), rel=1e-5)
    assert abs(found[1] - found[8]) > 1  # the control


def test_the_command_prints_words_or_json(tmp_path, saved):
    folder, params = saved
    (tmp_path / "a.txt").write_text(TEXT)
    args = ("evaluate", str(folder), "--model", RUN.model, "--text", str(tmp_path / "a.txt"))
    done = command_line.run(*args)
    assert done.returncode == 0, done.stderr
    loss = nats(params, TEXT) / (len(TEXT) - 1)
    assert f"{len(TEXT) - 1} tokens predicted" in done.stdout
    assert float(done.stdout.partition("nats per token ")[2].split(",")[0]) == pytest.approx(loss, abs=1e-5)
    assert json.loads(command_line.run(*args, "--json").stdout)["nats_per_token"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(("options", "said"), [
    ({"text": ()}, "text is empty"), ({"stride": 9, "seq_len": 8}, "would leave tokens out"),
    ({"stride": 9}, "stride=9 is more than seq_len=8"), ({"seq_len": 0}, "seq_len=0: give at least 1"),
    ({"ema": True}, "ema: the run kept no average"), ({"text": ("none.txt",)}, "none.txt: no file with text")])
def test_what_cannot_be_measured_is_refused(tmp_path, saved, options, said):
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(UsageError, match=said):
        evaluate_command(EvaluateConfig(str(saved[0]), model=RUN.model, **{
            "text": (str(tmp_path / "a.txt"),), **options}))
    assert "--stride 9 is more than --seq-len 8" in command_line.refused(
        "evaluate", str(tmp_path), "--stride", "9", "--seq-len", "8", "--text", "a")


def test_a_text_of_one_token_has_nothing_to_predict(tmp_path, saved):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UsageError, match="no two tokens"):
        evaluate_command(config(saved[0], tmp_path / "a.txt"))
