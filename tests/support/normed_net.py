"""A small network with batch statistics, in Linen and NNX, and Flax's and Optax's own loop over it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from support.flat import flat_step

ADAM = optax.adam(1e-2)


class Net(nn.Module):
    """Of dims that no eight devices divide, and with batch statistics."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(67)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.relu(x))
        return nn.Dense(13)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(16, 67, rngs=rngs), nnx.BatchNorm(67, momentum=0.9, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.0, rngs=rngs), nnx.Linear(67, 13, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(nnx.relu(self.first(x)))))


def squared(model, batch):
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def batch_of(number=0, size=16):
    rng = np.random.default_rng(number)
    return {"x": rng.normal(size=(size, 16)).astype(np.float32), "y": rng.normal(size=(size, 13)).astype(np.float32)}


BATCHES = [batch_of(number) for number in range(3)]
KEY = jax.random.key(0)


@functools.cache
def variables_of(seed=7):
    variables = Net().init(jax.random.key(seed), batch_of()["x"])
    stats = jax.tree.map(lambda leaf: leaf + 0.25, variables["batch_stats"])
    return {"params": variables["params"], "batch_stats": stats}


@functools.cache
def oracle(optimizer=ADAM, seed=7):
    """(losses, the last params, batch statistics, optimizer state) of a plain loop from `variables_of(seed)`."""
    variables = variables_of(seed)
    params, stats, opt_state, losses = variables["params"], variables["batch_stats"], None, []
    opt_state = optimizer.init(params)
    for batch in BATCHES:
        (loss, stats), grads = plain_gradients(params, stats, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params, stats, opt_state


@jax.jit
def plain_gradients(params, stats, batch):
    def loss_of(params):
        out, new = Net().apply({"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

    return jax.value_and_grad(loss_of, has_aux=True)(params)


def step_of(stage=3, model=None, loss=squared, optimizer=ADAM, **options):
    return flat_step(model or Net(), stage, loss=loss, optimizer=optimizer, **options)


def losses_of(step, state, batches=BATCHES):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def assert_same(given, expected, rtol=2e-5, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), jax.device_get(given),
                 jax.device_get(expected))
