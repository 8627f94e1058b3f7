"""Optimizers alone: `init` and `update` on sharded and padded leaves, and optax's own on whole arrays on one device.

What the optimizer gives to both are the same gradients and losses. No model is trained: this takes a fifth of the time.
"""

import dataclasses
import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax
from support.oracle import by_name
from support.plain_training import update_of
from zero_jax.layout.stored_optimizer import init_stored, update_stored
from zero_jax.tree import named_leaves

SHAPES = {"kernel": (16, 64), "bias": (64,), "out": (64, 8), "uneven": (5, 7)}
"""The last is stored as 40 elements on 8 devices, 5 of them padding."""
NUM_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Updated:
    """Parameters and the optimizer's state after NUM_STEPS updates, by name, in their true shapes."""

    params: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    layout: Any = None

    @property
    def moved(self) -> float:
        """The largest change of any parameter."""
        start = trees()[0]
        return max(float(np.max(np.abs(leaf - start[name]))) for name, leaf in self.params.items())


class Leaves(nn.Module):
    @nn.compact
    def __call__(self):
        return {name: self.param(name, nn.initializers.zeros, shape) for name, shape in SHAPES.items()}


def loss(model, batch):
    return sum(leaf.sum() for leaf in model().values()) * batch.mean()


@functools.cache
def trees() -> tuple[dict[str, np.ndarray], ...]:
    """The parameters, then a gradient for each step."""
    draw = np.random.default_rng(0).normal
    return tuple({name: draw(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()}
                 for _ in range(NUM_STEPS + 1))


def losses() -> list[np.ndarray]:
    return [np.float32(2.0 - 0.1 * number) for number in range(NUM_STEPS)]


def on_one_device(optimizer) -> Updated:
    """Optax alone."""
    params, *grads = trees()
    update, state = jax.jit(update_of(optimizer)), jax.jit(optimizer.init)(params)
    for grad, value in zip(grads, losses(), strict=True):
        updates, state = update(grad, state, params, value)
        params = optax.apply_updates(params, updates)
    return Updated(by_name(params), by_name(state))


def on_shards(optimizer, stage: int) -> Updated:
    """As a train step of `stage` on eight devices calls the optimizer, which is traced once for all steps."""
    step = zero_jax.make_zero_train_step(Leaves(), stage, loss=loss, optimizer=optimizer, mesh=zero_jax.make_mesh(8))
    layout = step.layout(jax.ShapeDtypeStruct((8,), jnp.float32))
    views, declared = layout.stored_shapes, layout.state.opt_state

    def put(tree):
        return jax.tree.map(lambda view, leaf, sharding: jax.device_put(view.store(leaf), sharding),
                            views.params, tree, layout.gradients)

    def init(params):  # a weak type of the first state would be no fault of the update
        return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype),
                            init_stored(layout, step.optimizer, params))

    chex.clear_trace_counter()  # which counts by the function's name

    @functools.partial(jax.jit, out_shardings=(layout.gradients, layout.shardings.opt_state))
    @chex.assert_max_traces(n=1)
    def update(params, state, grads, value):
        updates, state = update_stored(layout, step.optimizer, grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    start, *grads = trees()
    params = put(start)
    state = jax.jit(init, out_shardings=layout.shardings.opt_state)(params)
    for grad, value in zip(grads, losses(), strict=True):
        params, state = update(params, state, put(grad), value)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, declared)
    return Updated(loaded(views.params, params), loaded(views.opt_state, state), layout)


def loaded(views, tree) -> dict[str, np.ndarray]:
    """The leaves of `tree` in their true shapes, by name."""
    return {name: view.load(leaf) for (name, leaf), view in zip(
        by_name(tree).items(), (view for _, view in named_leaves(views)), strict=True)}


def check_same(sharded: Updated, whole: Updated) -> None:
    """Raises AssertionError unless both have the same parameters and state, but for rounding."""
    moved = whole.moved
    assert moved > 1e-4  # else any two agree
    chex.assert_trees_all_close(sharded.params, whole.params, rtol=0, atol=max(3e-7, 2e-5 * moved))
    chex.assert_trees_all_close(sharded.state, whole.state, rtol=1e-4, atol=1e-6)
