"""What the tests compare with: the same training on one device at stage 0."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zero_jax
from zero_jax.tree import named_leaves

ADAMW = optax.adamw(3e-4, eps=1e-6)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Losses and gradient norms of each step, the final parameters by name as numpy arrays, and the step itself."""

    losses: np.ndarray
    params: dict[str, np.ndarray]
    state: Any
    step: Any
    norms: Any = None


def slow(*values):
    """A row of a parametrized test that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def train(model, stage, num_devices, *, batches, optimizer=None, seed=0, **options) -> Trained:
    """Trains for one step on each of `batches`.

    Adam divides a gradient by its own size: with its default eps of 1e-8, single elements whose gradient
    passes through zero amplify rounding. 1e-6 keeps the comparison one of gradients.
    """
    step = zero_jax.make_zero_train_step(
        model, stage, mesh=zero_jax.make_mesh(num_devices), optimizer=optimizer or ADAMW, **options)
    state = step.init(jax.random.key(seed), batches[0])
    losses, norms = [], []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    params = {name: np.asarray(leaf) for name, leaf in named_leaves(step.params(state))}
    return Trained(np.array(losses, np.float64), params, state, step, np.array(norms, np.float64))


def loss_difference(a: Trained, b: Trained) -> float:
    """The largest relative difference of two runs' losses."""
    return float(np.max(np.abs(a.losses - b.losses) / np.abs(b.losses)))


def param_difference(a: Trained, b: Trained, zero_gradient=()) -> float:
    """The largest absolute difference of two runs' parameters.

    `zero_gradient`: (part of a name, function from such an array to its part to compare): with Adam, what
    has no true gradient (a key's bias: softmax does not see it) gets noise of the size of the learning rate.
    """
    assert a.params.keys() == b.params.keys()
    worst = 0.0
    for name, left in a.params.items():
        right = b.params[name]
        for part, keep in zero_gradient:
            if part in name:
                left, right = keep(left), keep(right)
        worst = max(worst, float(np.max(np.abs(left - right))))
    return worst
