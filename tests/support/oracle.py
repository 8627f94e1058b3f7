"""What the tests compare: a training run of the library, and the same by Flax and Optax alone on one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax
from support.flat import flat_step
from support.plain_training import plain_training
from zero_jax.tree import named_leaves

ADAMW = optax.adamw(3e-4, eps=1e-6)
COMPUTE = {None: None, "fp32": None, "bf16": jnp.bfloat16}
"""What the named precisions are to a plain loop: the dtype in which parameters and batches are used."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A training run, as numpy arrays: what each step gave, and by name what there was at the end.

    start: the first parameters, of the oracle alone; state, step: of the library alone.
    """

    losses: np.ndarray
    norms: np.ndarray
    params: dict[str, np.ndarray]
    variables: dict[str, np.ndarray]
    start: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    state: Any = None
    step: Any = None


def slow(*values):
    """A row of a parametrized test that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def oracle(model, *, batches, optimizer=None, seed=0, loss=None, precision=None, **options) -> Trained:
    """The numbers that `train` must have at every stage, on any devices: those of a plain loop on one."""
    run = plain_training(model, optimizer or ADAMW, loss or next_token, batches, seed=seed,
                         compute=COMPUTE[precision], **options)
    return Trained(np.array(run.losses, np.float64), np.array(run.norms, np.float64), by_name(run.params),
                   by_name(run.variables), by_name(run.start))


def train(model, stage, devices, *, batches, optimizer=None, seed=0, **options) -> Trained:
    """Trains for one step on each of `batches`. devices: a mesh, or the number of devices or sizes of its `data`.

    Adam divides a gradient by its own size: with its default eps of 1e-8, single elements whose gradient
    passes through zero amplify rounding. 1e-6 keeps the comparison one of gradients.
    """
    mesh = devices if isinstance(devices, jax.sharding.Mesh) else zero_jax.make_mesh(devices)
    step = flat_step(
        model, stage, mesh=mesh, optimizer=optimizer or ADAMW, **options)
    state = step.init(jax.random.key(seed), batches[0])
    losses, norms = [], []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    return Trained(np.array(losses, np.float64), np.array(norms, np.float64), by_name(step.params(state)),
                   by_name(state.variables), state=state, step=step)


def next_token(model, batch):
    """Mean cross entropy of the targets, weighted where there are weights."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    weights = batch.get("weights", jnp.ones_like(losses)).astype(jnp.float32)
    return (losses * weights).sum() / jnp.maximum(weights.sum(), 1.0)


def by_name(tree) -> dict[str, np.ndarray]:
    """The leaves of `tree` as numpy arrays; of keys their data."""
    return {name: np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
            for name, leaf in named_leaves(tree)}


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
