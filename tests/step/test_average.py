"""The moving average of parameters, beside a mean in NumPy, whatever the dtype in which they are stored."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.oracle import slow

import zero_jax
from zero_jax.tree import named_leaves

DECAY, NUM_STEPS = 0.999, 20
BFLOAT16 = zero_jax.Precision(params=jnp.bfloat16, compute=jnp.bfloat16)


class Net(nn.Module):
    """Of dims that no eight devices divide."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(67)(x)))


def squared(model, batch):
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def arrays(tree):
    return {name: np.asarray(leaf, np.float32) for name, leaf in named_leaves(tree)}


def averages(stage, precision):
    """(the step's average, one in float32 of the same parameters, one that is rounded to bfloat16)."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 13)).astype(np.float32), "y": rng.normal(size=(16, 1)).astype(np.float32)}
    step = zero_jax.make_zero_train_step(
        Net(), stage, optimizer=optax.sgd(0.05), loss=squared, precision=precision, ema=DECAY)
    state = step.init(jax.random.key(0), batch)
    start = arrays(step.params(state))
    exact, rounded = dict(start), {name: leaf.astype(jnp.bfloat16) for name, leaf in start.items()}
    for _ in range(NUM_STEPS):
        state, _ = step(state, batch)
        for name, leaf in arrays(step.params(state)).items():
            exact[name] = np.float32(DECAY) * exact[name] + np.float32(1 - DECAY) * leaf
            rounded[name] = (DECAY * rounded[name] + (1 - DECAY) * leaf).astype(jnp.bfloat16)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.ema))
    found = step.layout().load(state).ema
    plain = squared(lambda x: Net().apply({"params": jax.device_get(found)}, x), batch)
    np.testing.assert_allclose(step.evaluator(ema=True)(state, batch), plain, rtol=2e-2)
    return arrays(found), exact, arrays(rounded)


@pytest.mark.grid
@pytest.mark.parametrize("stage, precision", [
    slow(0, BFLOAT16), slow(1, BFLOAT16), slow(2, "bf16-stochastic"), (3, BFLOAT16), slow(3, "bf16-stochastic"),
    slow(1, "bf16")])
def test_an_average_moves(stage, precision):
    found, exact, rounded = averages(stage, precision)

    def furthest(average):
        return max(np.abs(average[name] - exact[name]).max() for name in exact)

    assert furthest(found) < 1e-6
    assert furthest(rounded) > 1e-3  # negative control
