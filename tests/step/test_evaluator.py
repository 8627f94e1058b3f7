"""Evaluators: batches of any size, and keys."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.covering import weekly
from support.normed_net import KEY, batch_of, squared, step_of


def test_an_evaluator_of_a_ragged_batch():
    step = step_of(model=nn.Dense(13))
    state = step.init(KEY, batch_of())
    params, ragged = jax.device_get(step.params(state)), batch_of(5, size=13)
    evaluate = step.evaluator()
    for batch in (ragged, batch_of(6)):
        np.testing.assert_allclose(evaluate(state, batch), squared(nn.Dense(13).bind({"params": params}), batch),
                                   rtol=1e-5)
    best = step.evaluator(lambda model, batch: model(batch["x"]).argmax(-1))(state, ragged)
    assert best.dtype == jnp.int32 and best.shape == (13,)
    np.testing.assert_array_equal(best, (ragged["x"] @ params["kernel"] + params["bias"]).argmax(-1))
    with pytest.raises(ValueError, match="batch of 13 does not divide"):  # a step does not
        step(state, ragged)
    fresh = step_of(model=nn.Dense(13))  # and one that has no layout yet
    np.testing.assert_allclose(fresh.evaluator()(state, ragged), evaluate(state, ragged), rtol=1e-6)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(13)(x))


class NnxNoisy(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.rngs = nnx.Linear(16, 13, rngs=rngs), rngs.fork() if hasattr(rngs, "fork") else rngs

    def __call__(self, x):
        return self.linear(x) + jax.random.normal(self.rngs.params(), (13,))[None]


@weekly("model", [Noisy(), NnxNoisy], ids=["linen", "nnx"])
def test_an_evaluator_takes_a_key(model):
    step = step_of(model=model)
    state = step.init(KEY, batch_of())
    evaluate = step.evaluator(lambda model, batch: model(batch["x"]))
    one, again, other = (evaluate(state, batch_of(), jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)
