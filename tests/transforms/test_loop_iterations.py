"""Work that is put into the iterations of a step's loops: the step's results stay, and each part is worked on once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.jaxpr.equations import trace_flat
from zero_jax.transforms.loop_iterations import iterations_with_products, run_in_iterations

WEIGHTS = jax.random.normal(jax.random.key(0), (4, 8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (6, 2, 8))


def layers(weights, x, *, block=lambda w, x: jnp.tanh(x @ w) @ w.T):
    return jax.lax.scan(lambda x, w: (block(w, x), None), x, weights)[0]


def microbatches(weights, x):
    """A loop over 6 microbatches, in which the loop over 4 layers is a call."""
    return jax.lax.scan(lambda total, x: (total + jax.jit(layers)(weights, x), x.sum()), jnp.zeros((2, 8)), x)


def attention(weights, x):
    """Layers whose body has most of its products outside of the loop in it."""
    def block(w, x):
        x = jnp.tanh(x @ w) @ w.T @ w
        return x + jax.lax.scan(lambda total, row: (total + w @ row, None), jnp.zeros(8), x)[0][None]

    return layers(weights, x[0], block=block)


STEPS = {
    "forward": (lambda weights, x: layers(weights, x[0]), 4),
    "differentiated": (jax.value_and_grad(lambda weights, x: layers(weights, x[0]).sum()), 8),
    "checkpointed": (jax.grad(lambda weights, x: layers(
        weights, x[0], block=jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T, prevent_cse=True)).sum()), 8),
    "microbatches": (microbatches, 24),
    "a loop within a layer": (attention, 4),
    "no products": (lambda weights, x: jax.lax.scan(lambda x, w: (x + w.sum(), None), x, weights)[0], 0),
    "one iteration": (lambda weights, x: layers(weights[:1], x[0]), 0),
    "no loop": (lambda weights, x: x @ weights[0], 0),
}


@pytest.mark.parametrize("name", STEPS)
def test_results_stay_and_each_part_is_worked_on_in_a_iteration(name):
    """Control: the iterations follow from the program; where they are none, nothing is to be put there."""
    step, iterations = STEPS[name]
    leaves, treedef = jax.tree.flatten((WEIGHTS, X))
    closed, out_treedef = trace_flat(step, leaves, treedef)
    assert iterations_with_products(closed.jaxpr) == iterations
    if not iterations:
        return
    parts = jnp.arange(3.0 * iterations).reshape(iterations, 3)

    def run(leaves, parts):
        outs, worked = run_in_iterations(closed, leaves, parts, lambda part: 2 * part[:2] + 1)
        return jax.tree.unflatten(out_treedef, outs), worked

    outs, worked = jax.jit(run)(leaves, parts)
    np.testing.assert_array_equal(worked, 2 * parts[:, :2] + 1)
    for got, expected in zip(jax.tree.leaves(outs), jax.tree.leaves(jax.jit(step)(*leaves)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    edited, _ = trace_flat(run, *jax.tree.flatten((leaves, parts)))
    assert iterations_with_products(edited.jaxpr) == iterations
