"""Generation with a cache of keys and values, from sharded parameters: that of whole sequences on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracle import slow

import zero_jax
from models import gpt2
from zero_jax.cli.generate import sample_with_cache

PROMPT, NEW = 5, 7


def greedy(model, params, prompts):
    """Without a cache: the whole sequence for each token."""
    tokens = prompts
    for _ in range(NEW):
        logits = model.apply({"params": params}, tokens)
        tokens = jnp.concatenate([tokens, logits[:, -1].argmax(-1, keepdims=True).astype(jnp.int32)], axis=1)
    return np.asarray(tokens[:, PROMPT:])


@pytest.mark.parametrize(("stage", "change"), [
    (3, {}), slow(0, {}), slow(1, {"scan_layers": False}), slow(3, {"remat": True, "scan_layers": False})])
def test_tokens_with_a_cache_are_those_without(stage, change):
    config = dataclasses.replace(gpt2.PRESETS["tiny"], max_length=16, width=32, vocab_size=40, **change)
    model = gpt2.build(config)
    prompts = np.random.default_rng(0).integers(0, 40, (8, PROMPT)).astype(np.int32)
    step = zero_jax.make_zero_train_step(model, stage)
    batch = {"inputs": prompts, "targets": prompts}
    state = step.init(jax.random.key(0), batch)
    # Weights of an initialisation hardly tell tokens apart: larger ones do.
    params = jax.tree.map(lambda leaf: 8 * leaf, jax.device_get(step.params(state)))
    state = step.init(jax.random.key(0), batch, params=params)
    evaluate = step.evaluator(sample_with_cache(gpt2.decoder(config), num_tokens=NEW, temperature=0.0))
    found = np.asarray(evaluate(state, {"inputs": prompts}, jax.random.key(1)))
    expected = greedy(model, params, prompts)
    np.testing.assert_array_equal(found, expected)
    # Negative controls: other parameters and other prompts go on with other tokens; a temperature draws others.
    other = jax.tree.map(lambda leaf: -leaf, params)
    assert not np.array_equal(expected, greedy(model, other, prompts))
    assert not np.array_equal(expected, greedy(model, params, np.roll(prompts, 1, axis=1)))
    drawn = step.evaluator(sample_with_cache(gpt2.decoder(config), num_tokens=NEW, temperature=5.0))
    assert not np.array_equal(np.asarray(drawn(state, {"inputs": prompts}, jax.random.key(1))), expected)
