"""Runs on instructions and preferences: losses of responses alone, a reference that is the model at the start."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console
from support.command_line import refused
from support.run_log import losses
from support.run_log import rows as log_rows
from support.transformers_masks import CONVERSATIONS, THOUGHTS

from models import llama
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train
from zero_jax.data.tokenizer import train_bpe
from zero_jax.errors import UsageError
from zero_jax.interop.params_io import export_tree

TINY = llama.PRESETS["tiny"]
RUN = TrainConfig(model="llama:tiny", batch_size=8, seq_len=32, steps=4, eval_every=4, samples=1, save_every=2,
                  html=False, lora_rank=4, learning_rate=0.01, weight_decay=0.0, objective="instruct", documents="pack")
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(a file of parameters that tell tokens apart, they themselves)."""
    params = jax.jit(llama.build(TINY).init)(jax.random.key(3), jnp.zeros((1, 8), jnp.int32))["params"]
    params = jax.tree.map(lambda leaf: 2 * leaf, params)
    (path,) = export_tree(tmp_path_factory.mktemp("base") / "base.safetensors", params)
    return path, params


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
def test_instructions_have_the_loss_of_each_response_alone(base, tmp_path):
    """Packed rows on eight devices, against each example by itself on one."""
    # Of 17 tokens each: two in a row, and 27 of them in two batches, the last one not full: an evaluation has all.
    rows = [{"prompt": f"{one:>8}", "completion": f"{other[::-1]:<9}"} for one in WORDS for other in WORDS]
    data, held_out = write(tmp_path / "a.jsonl", rows * 2), write(tmp_path / "b.jsonl", rows[:27])
    config = dataclasses.replace(RUN, data=(data,), eval_data=(held_out,), init_from=base[0], out=tmp_path / "run",
                                 steps=1, learning_rate=1e-9, save_every=0)
    found = train(config, console=Console(quiet=True))
    forward = jax.jit(lambda tokens: llama.build(TINY).apply({"params": base[1]}, tokens))
    totals = np.zeros((2, 2))  # of responses, of all tokens: loss, number
    for row in rows[:27]:
        tokens = np.array([list((row["prompt"] + row["completion"]).encode())])
        each = optax.softmax_cross_entropy_with_integer_labels(forward(tokens)[0, :-1], tokens[0, 1:])
        for place, part in enumerate((each[len(row["prompt"]) - 1:], each)):
            totals[place] += float(part.sum()), len(part)
    expected, over_all = totals[:, 0] / totals[:, 1]
    np.testing.assert_allclose(found.validation_loss, expected, rtol=1e-5)
    assert abs(over_all - expected) > 0.01, "the prompts' tokens would show"
    assert "--- held-out prompt:" in found.samples[0] and "--- the model's:" in found.samples[0]


@pytest.mark.slow
def test_preferences_start_at_the_reference_and_are_learned(base, tmp_path):
    rows = [{"prompt": f"{one}: ", "chosen": one[::-1], "rejected": other} for one in WORDS for other in WORDS
            if one[::-1] != other]
    config = dataclasses.replace(RUN, objective="preferences", documents="concatenate", init_from=base[0], steps=6,
                                 data=(write(tmp_path / "a.jsonl", rows),), out=tmp_path / "run")
    quiet = Console(quiet=True)
    whole = train(config, console=quiet)
    first = losses(config.out)
    np.testing.assert_allclose(first[1], np.log(2), atol=1e-6)
    assert whole.loss < 0.5 and log_rows(config.out)[-1]["summary"]
    # Resumed after four steps with the reference of the start; without it the run is refused.
    again = dataclasses.replace(config, out=tmp_path / "again", resume=True)
    shutil.copytree(config.out, again.out)
    shutil.rmtree(again.out / "checkpoints" / "6")
    (again.out / "reference.npz").rename(tmp_path / "kept")
    with pytest.raises(UsageError, match="cannot be resumed without the log-probabilities of its reference"):
        train(again, console=quiet)
    for damaged in (b"", (tmp_path / "kept").read_bytes()[:100]):
        (again.out / "reference.npz").write_bytes(damaged)
        with pytest.raises(UsageError, match="cannot be resumed without the log-probabilities of its reference"):
            train(again, console=quiet)
    (tmp_path / "kept").rename(again.out / "reference.npz")
    train(again, console=quiet)
    second = losses(again.out)
    np.testing.assert_allclose([second[step] for step in (5, 6)], [first[step] for step in (5, 6)], rtol=1e-5)


def test_instructions_are_packed_where_nothing_is_asked_for(tmp_path):
    """Controls: the loss of any other objective has text one after another, which instructions are refused with."""
    data = write(tmp_path / "a.jsonl", [{"prompt": f"{one}: ", "completion": one[::-1]} for one in WORDS * 12])
    options = {"model": "llama:tiny", "seq_len": 32, "data": (data,), "devices": 8, "out": tmp_path / "run"}
    chosen = objective_of(TrainConfig(objective="instruct", **options))
    assert chosen.config.documents == "pack" and {"segment_ids", "weights"} <= chosen.batch_shapes().keys()
    assert chosen.load_data().summary.endswith("the rest padding (pack).")
    assert {TrainConfig(objective=each, **options).documents for each in (None, "preferences")} == {"concatenate"}
    padded = objective_of(TrainConfig(objective="instruct", documents="pad", **options)).load_data()
    assert padded.summary.endswith("the rest padding (pad).")
    with pytest.raises(UsageError, match="leave it out, which packs, or give documents=pad"):
        objective_of(TrainConfig(objective="instruct", documents="concatenate", **options))


def test_a_run_says_how_many_examples_are_further_turns(tmp_path):
    """Of a template that drops earlier thoughts; one that keeps them, the control, has an example for each line."""
    pytest.importorskip("tokenizers")
    tokenizer = train_bpe(["what is it? " * 9], vocab_size=260)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.files["tokenizer.json"])
    data = write(tmp_path / "a.jsonl", [{"messages": CONVERSATIONS["thoughts"]}] * 24)
    config = TrainConfig(model="llama:qwen3-0.6b", objective="instruct", tokenizer=tmp_path, data=(data,), seq_len=512,
                         batch_size=4, devices=1, out=tmp_path / "run")
    for thoughts, number in (("loop.index0 > last.user and (loop.last or thought)", 48), ("thought", 24)):
        template = THOUGHTS.replace("{%- generation %}", "").replace("{%- endgeneration %}", "").replace(
            "loop.index0 > last.user and (loop.last or thought)", thoughts)
        (tmp_path / "chat_template.jinja").write_text(template)
        summary = objective_of(config).load_data().summary
        assert summary.startswith(f"Data: {number - 4} examples") and ("24 of them are further responses" in summary
                                                                       ) == (number == 48), summary


@pytest.mark.parametrize("objective", ["instruct", "preferences"])
def test_what_is_cut_or_left_out_is_counted_in_both_sets(tmp_path, objective):
    def rows(short, long, prompts):
        each = [("a", "b")] * short + [("a", "b" * 40)] * long + [("a" * 40, "b")] * prompts
        return [{"prompt": prompt, "completion": answer, "chosen": answer, "rejected": "c"} for prompt, answer in each]

    data, held_out = write(tmp_path / "a.jsonl", rows(10, 2, 1)), write(tmp_path / "b.jsonl", rows(9, 3, 4))
    config = dataclasses.replace(RUN, out=tmp_path / "run", objective=objective, data=(data,), eval_data=(held_out,),
                                 documents="pad" if objective == "instruct" else "concatenate")
    for eval_data, cut, left_out in (((held_out,), 5, 5), ((), 2, 1)):
        chosen = objective_of(dataclasses.replace(config, eval_data=eval_data, batch_size=2, devices=1))
        summary = chosen.load_data().summary
        assert f" {cut} are longer than a row" in summary and f" {left_out} are left out: " in summary


@pytest.mark.parametrize(("args", "expected"), [
    (["--objective", "instruct", "--documents", "pack"], "give --data: JSON lines or Parquet with responses"),
    (["--objective", "instruct", "--data", "DATA", "--documents", "concatenate"], "packs, or give --documents pad"),
    (["--objective", "preferences", "--data", "DATA", "--documents", "pad"], "has a row for each response: leave"),
    (["--objective", "preferences", "--data", "DATA"], "give prompt, chosen and rejected"),
    (["--objective", "instruct", "--data", "DATA", "--documents", "pad", "--max-bytes", "9"], "--max-bytes 9: --obj"),
    (["--dpo-beta", "0.2"], "--dpo-beta 0.2: it is of --objective preferences, and this run has")])
def test_what_cannot_be_learned_is_refused(tmp_path, args, expected):
    data = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    assert expected in refused("train", *[data if arg == "DATA" else arg for arg in args])
