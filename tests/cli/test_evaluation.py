"""Loss, perplexity and accuracy of an evaluation, beside NumPy on one device."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero_jax
from models import gpt2
from zero_jax.cli.objectives.choose import OBJECTIVES, objective_of
from zero_jax.cli.objectives.objective import with_perplexity
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.evaluation import evaluate, token_sums
from zero_jax.cli.training.run_head import evaluation_line


def by_hand(logits, targets, weights):
    """(loss, perplexity, accuracy) of all tokens at once."""
    wide = logits.astype(np.float64)
    losses = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, targets[..., None], -1)[..., 0]
    loss = (losses * weights).sum() / weights.sum()
    return loss, math.exp(loss), ((wide.argmax(-1) == targets) * weights).sum() / weights.sum()


def batches(draw, shapes):
    return [{"inputs": draw.normal(size=(*shape, 5)).astype(np.float32),
             "targets": draw.integers(0, 5, shape).astype(np.int32),
             "weights": (draw.random(shape) < 0.6).astype(np.float32)} for shape in shapes]


def test_the_metrics_are_of_all_tokens():
    sets = batches(np.random.default_rng(0), [(4, 6), (4, 6), (2, 6)])
    found = with_perplexity(evaluate(lambda batch: token_sums(lambda logits: jnp.asarray(logits), batch), sets))
    flat = {name: np.concatenate([batch[name].reshape(-1, *batch[name].shape[2:]) for batch in sets])
            for name in sets[0]}
    expected = by_hand(flat["inputs"], flat["targets"], flat["weights"])
    np.testing.assert_allclose([found["loss"], found["perplexity"], found["accuracy"]], expected, rtol=1e-5)
    # Negative control: a mean of the batches' means is another number, and so is one over what has no weight.
    means = [by_hand(batch["inputs"], batch["targets"], batch["weights"])[0] for batch in sets]
    assert abs(np.mean(means) - expected[0]) > 1e-3
    plain = evaluate(lambda batch: token_sums(lambda logits: jnp.asarray(logits), batch),
                     [{name: batch[name] for name in ("inputs", "targets")} for batch in sets])
    assert abs(plain["loss"] - expected[0]) > 1e-3


def test_no_token_and_a_loss_beyond_exp_are_told_as_such():
    none = {"loss": jnp.zeros(()), "accuracy": jnp.zeros(()), "weight": jnp.zeros(())}
    assert all(map(math.isnan, with_perplexity(evaluate(lambda _: none, [1])).values()))
    large = {"loss": jnp.float32(8000), "accuracy": jnp.zeros(()), "weight": jnp.float32(8)}
    found = with_perplexity(evaluate(lambda _: large, [1]))
    assert found == {"loss": 1000.0, "perplexity": math.inf, "accuracy": 0.0}


def test_what_predicts_tokens_reports_a_perplexity():
    """Control: an objective of images, or of pairs of responses, reports what it was given."""
    means = {"loss": 1.0, "accuracy": 0.5}
    reported = {name: [*kind.metrics(object.__new__(kind), means)] for name, kind in OBJECTIVES.items()}
    with_it, without = ["loss", "perplexity", "accuracy"], [*means]
    assert reported == dict.fromkeys(("causal", "masked", "span", "instruct"), with_it) | dict.fromkeys(
        ("classify", "preferences"), without)


TABLE = np.random.default_rng(5).normal(size=(256, 256)).astype(np.float32)
"""A model by hand: the logits after each token."""


def by_table(pairs):
    """(loss, accuracy) of all (token, next token), by NumPy."""
    tokens, targets = np.array(pairs).T
    loss, _, accuracy = by_hand(TABLE[tokens], targets, np.ones(len(targets)))
    return loss, accuracy


def measured(config, *, leave_out=0):
    """(Loss, accuracy, batches) of an evaluation of all batches, or without the last ones."""
    objective = objective_of(config)
    _, held_out = objective.load_data().batches(None)
    batches = [held_out[k] for k in range(held_out.batches_per_epoch - leave_out)]
    found = evaluate(lambda batch: objective.sums(lambda inputs, **_: jnp.asarray(TABLE)[inputs], batch), batches)
    return found["loss"], found["accuracy"], len(batches)


@pytest.mark.parametrize("documents", ["plain", "concatenate", "pack", "pad", "instruct"])
@pytest.mark.parametrize("number", [9, 13, 16])
def test_an_evaluation_has_all_of_the_held_out_part_once(tmp_path, documents, number):
    """Of texts of other lengths than rows, in a number that batches of four do not divide, or do (16)."""
    draw = np.random.default_rng(number)
    texts = ["".join(map(chr, draw.integers(97, 123, draw.integers(3, 12)))) for _ in range(number)]
    plain = "".join(texts)
    rows = [{"text": text, "prompt": text[:2], "completion": text[2:]} for text in texts]
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / f"{name}.txt").write_text(plain)
    data, eval_data = (str(tmp_path / (f"{name}.txt" if documents == "plain" else f"{name}.jsonl")) for name in "ab")
    options = {"plain": {}, "instruct": {"documents": "pad", "objective": "instruct"}}.get(
        documents, {"documents": documents})
    config = TrainConfig(model="gpt2:tiny", data=(data,), eval_data=(eval_data,), batch_size=4, seq_len=8, devices=1,
                         out=str(tmp_path / "run"), **options)
    texts = {"plain": [plain], "concatenate": [plain], "instruct": [text[:9] for text in texts]}.get(documents, texts)
    pairs = [(ord(a), ord(b)) for text in texts for k, (a, b) in enumerate(zip(text, text[1:], strict=False))
             if documents != "instruct" or k]
    if documents == "concatenate":  # in the order in which documents are read: they run into each other
        (source,) = objective_of(config).load_data().batches(None)[1].sources
        tokens = [*source.row(0)["inputs"][:1], *(target for k in range(source.num_examples) for row in [source.row(k)]
                                                  for target in row["targets"][row["weights"] > 0])]
        assert sorted(tokens) == sorted(map(ord, plain))
        pairs = list(zip(tokens, tokens[1:], strict=False))
    *found, batches = measured(config)
    np.testing.assert_allclose(found, by_table(pairs), rtol=1e-5)
    assert evaluation_line(batches, 16).startswith("Evaluation: all ")
    # Negative control: without the last batch it is another number.
    assert abs(measured(config, leave_out=1)[0] - found[0]) > 1e-4


def test_an_evaluation_of_pairs_has_each_pair_once(tmp_path):
    texts = [("ab", "cd", "xyz"), ("k", "lm", "n"), ("q", "r", "st"), ("u", "v", "w"), ("a", "bb", "c")]
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("\n".join(json.dumps(
            {"prompt": prompt, "chosen": chosen, "rejected": rejected}) for prompt, chosen, rejected in texts))
    config = TrainConfig(model="gpt2:tiny", objective="preferences", data=(str(tmp_path / "a.jsonl"),), batch_size=4,
                         eval_data=(str(tmp_path / "b.jsonl"),), seq_len=8, devices=1, dpo_beta=0.5,
                         out=str(tmp_path / "run"))

    def log_prob(prompt, answer):
        text = [*map(ord, prompt + answer)]
        return -sum(by_table([pair])[0] for pair in list(zip(text, text[1:], strict=False))[len(prompt) - 1:])

    margins = np.array([0.5 * (log_prob(prompt, a) - log_prob(prompt, b)) for prompt, a, b in texts])
    found = measured(config)
    np.testing.assert_allclose(found, [np.log1p(np.exp(-margins)).mean(), (margins > 0).mean(), 2], rtol=1e-4)
    assert abs(measured(config, leave_out=1)[0] - found[0]) > 1e-4


def test_the_batches_of_an_evaluation_are_told():
    assert evaluation_line(40, 16) == "Evaluation: 16 of the 40 batches held out (--eval-batches 16)."
    assert evaluation_line(7, 16) == "Evaluation: all 7 batches held out (--eval-batches 16)."
    assert evaluation_line(1, 16) == "Evaluation: all 1 batch held out (--eval-batches 16)."


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_an_evaluation_on_shards_is_that_of_one_device(stage):
    model = gpt2.build(gpt2.PRESETS["tiny"])
    tokens = np.random.default_rng(0).integers(0, 256, (8, 17)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    step = zero_jax.make_zero_train_step(model, stage)
    state = step.init(jax.random.key(0), batch)
    found = with_perplexity(evaluate(lambda batch: step.evaluator(token_sums)(state, batch), [batch, batch]))
    logits = jax.jit(model.apply)({"params": jax.device_get(step.params(state))}, batch["inputs"])
    expected = by_hand(np.asarray(logits), batch["targets"], np.ones((8, 16)))
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-5)
    other = by_hand(np.asarray(logits)[:, ::-1], batch["targets"], np.ones((8, 16)))
    assert abs(other[0] - expected[0]) > 1e-4  # negative control
