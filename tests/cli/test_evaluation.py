"""Loss, perplexity and accuracy of an evaluation, beside NumPy on one device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero_jax
from models import gpt2
from zero_jax.cli.objectives.objective import with_perplexity
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


def test_the_batches_of_an_evaluation_are_told():
    assert evaluation_line(40, 16) == "Evaluation: 16 of the 40 batches held out (eval_batches=16)."
    assert evaluation_line(7, 16) == "Evaluation: all 7 batches held out (eval_batches=16)."
    assert evaluation_line(1, 16) == "Evaluation: all 1 batch held out (eval_batches=16)."


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
    logits = model.apply({"params": jax.device_get(step.params(state))}, batch["inputs"])
    expected = by_hand(np.asarray(logits), batch["targets"], np.ones((8, 16)))
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-5)
    other = by_hand(np.asarray(logits)[:, ::-1], batch["targets"], np.ones((8, 16)))
    assert abs(other[0] - expected[0]) > 1e-4  # negative control
