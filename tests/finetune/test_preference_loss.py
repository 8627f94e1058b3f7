"""DPO against NumPy, its reference from the base, and pairs that are learned."""

import functools

import jax
import numpy as np
import optax
import pytest

import zero_jax
from models import gpt2

CONFIG = gpt2.Config(1, 32, 2, vocab_size=32, max_length=8)


def pairs():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (8, 2, 9)).astype(np.int32)
    tokens[:, 1, :4] = tokens[:, 0, :4]  # one prompt
    weights = np.broadcast_to(np.arange(8) >= 3, (8, 2, 8)).astype(np.float32)
    return {"inputs": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}


def by_hand(params, batch, reference, beta):
    logits = np.asarray(gpt2.build(CONFIG).apply({"params": params}, batch["inputs"].reshape(16, 8)), np.float64)
    top = logits.max(-1, keepdims=True)
    log_probs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_probs, batch["targets"].reshape(16, 8, 1), -1).reshape(8, 2, 8)
    sums = (chosen * batch["weights"]).sum(-1)
    margins = beta * ((sums - reference)[:, 0] - (sums - reference)[:, 1])
    return sums, np.log1p(np.exp(-margins)).mean(), (margins > 0).mean()


@pytest.mark.slow
def test_numbers_of_numpy_and_the_reference_of_the_base():
    batch = pairs()
    step = zero_jax.make_zero_train_step(
        zero_jax.lora(gpt2.build(CONFIG), 4, "all-linear"), 3, loss=functools.partial(zero_jax.dpo_loss, beta=0.3),
        mesh=zero_jax.make_mesh(2), optimizer=optax.adam(0.01))
    state = step.init(jax.random.key(0), batch | {"reference": np.zeros((8, 2), np.float32)})
    base = zero_jax.merge_lora(step, state)
    reference = np.asarray(step.evaluator(zero_jax.response_log_probs)(state, batch))
    base = jax.tree.map(np.asarray, base)
    sums, *_ = by_hand(base, batch, reference, 0.3)
    np.testing.assert_allclose(reference, sums, rtol=1e-5)
    batch |= {"reference": reference}
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[0], np.log(2), rtol=1e-5)  # no margin yet
    merged = jax.tree.map(np.asarray, zero_jax.merge_lora(step, state))
    _, expected, accuracy = by_hand(merged, batch, reference, 0.3)
    found, told = step.evaluator()(state, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert float(told["accuracy"]) == accuracy == 1.0
    assert losses[-1] < 0.9 * losses[0]
    # Negative control: without the reference, or with another beta, it is another loss.
    assert abs(by_hand(merged, batch, 0 * reference, 0.3)[1] - expected) > 1e-3
    assert abs(by_hand(merged, batch, reference, 0.1)[1] - expected) > 1e-3


@pytest.mark.parametrize("change, told", [
    (lambda batch: batch.pop("reference"), "has no reference"),
    (lambda batch: batch.update(weights=batch["weights"][:, 0]), "batch\\['weights'\\]: give an array")])
def test_batches_that_are_none(change, told):
    batch = pairs() | {"reference": np.zeros((8, 2), np.float32)}
    change(batch)
    step = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 0, loss=zero_jax.dpo_loss, mesh=zero_jax.make_mesh(1))
    with pytest.raises(zero_jax.UsageError, match=told):
        step.layout(batch)
