"""Training by a step beside Flax's own loop on one device, which knows nothing of the library.

The loop starts from the values that the step made, and both go on alone. Odd sizes are padded on eight devices, even
ones are not.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from support.flat import flat_step
from support.oracle import slow
from support.plain_training import plain_training
from zero_jax.tree import named_leaves

OPTIMIZER = optax.sgd(0.02, momentum=0.9)
RNG = np.random.default_rng(0)
NUM_STEPS = 3
SIZES = {"even": (64, 64), "uneven": (67, 71)}
STAGES = pytest.mark.parametrize("stage, sizes", [
    slow(0, "uneven"), slow(1, "uneven"), slow(2, "uneven"), slow(3, "even"), (3, "uneven")])


def vectors(width, rows=16):
    return [{"x": RNG.normal(size=(rows, width)).astype(np.float32), "y": RNG.normal(size=(rows, 1)).astype(np.float32)}
            for _ in range(NUM_STEPS)]


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def plain_nnx(factory, params, variables, batches, loss):
    """Losses, parameters and variables of Flax's own loop over a module, which it changes; it may have plain arrays."""
    module = factory(nnx.Rngs(0))
    values = dict(named_leaves(params) + named_leaves(variables))
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if isinstance(variable, nnx.Variable):
            variable.set_value(jnp.asarray(values["/".join(map(str, path))]))
    optimizer = nnx.Optimizer(module, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, batch):
        value, grads = nnx.value_and_grad(loss)(module, batch)
        optimizer.update(module, grads)
        return value

    losses = [float(step(module, optimizer, batch)) for batch in batches]
    _, params, variables = nnx.split(module, nnx.Param, ...)
    return losses, nnx.to_pure_dict(params), nnx.to_pure_dict(variables)


def compare(model, stage, batches, loss=squares, *, plain=None, dtype=None, tolerance=2e-5, **options):
    """Trains both ways and compares losses, parameters and what else the model owns; returns (step, state).

    plain: the model of the plain loop, where it is not the same.
    """
    step = flat_step(model, stage, optimizer=OPTIMIZER, loss=loss, **options)
    state = step.init(jax.random.key(0), batches[0])
    start = jax.device_get((step.params(state), state.variables))
    if isinstance(model, nn.Module):
        run = plain_training(plain or model, OPTIMIZER, loss, batches, start=start, compute=dtype)
        expected, *plain_trees = run.losses, run.params, run.variables
    else:
        expected, *plain_trees = plain_nnx(plain or model, *start, batches, loss)
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    for tree, like in zip((step.params(state), state.variables), plain_trees, strict=True):
        likes = dict(named_leaves(like))
        for name, leaf in named_leaves(tree):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                continue
            a, b = np.asarray(leaf), np.asarray(likes[name])
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1 + np.abs(b).max()), err_msg=name)
    return step, state


def up_front(step):
    """The names that `describe` lists as gathered before the model runs."""
    (line,) = [line for line in step.layout().describe().splitlines() if line.startswith("gathered up front")]
    names = line.split(": ")[1]
    return [] if names == "none" else names.split(", ")


def factory(module, sizes):
    return lambda rngs: module(*sizes, rngs=rngs)
