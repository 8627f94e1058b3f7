"""Loops over layers that are stacked along another dim than the first, as T5X and MaxText do, beside a plain loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.beside_plain_loop import compare, up_front, vectors
from support.oracle import slow

import zero_jax
from zero_jax.frontends import param_flow
from zero_jax.jaxpr.equations import trace


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(self.width)(x)), None


class Layers(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Block, variable_axes={"params": 1}, split_rngs={"params": True}, length=3)
        return nn.Dense(1)(layers(self.width)(nn.Dense(self.width)(x), None)[0])


class NnxLayers(nnx.Module):
    """Flax hands such a stack back to the module, transposed twice: it is not overwritten."""

    def __init__(self, width, rngs):
        self.first, self.last = nnx.Linear(16, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)
        self.stack = nnx.Param(nnx.initializers.normal(0.2)(rngs.params(), (width, 3, width)))

    def __call__(self, x):
        layers = nnx.scan(lambda w, x: nnx.tanh(x @ w[...]), in_axes=(1, nnx.Carry), out_axes=nnx.Carry)
        return self.last(layers(self.stack, self.first(x)))


@pytest.mark.grid
@pytest.mark.parametrize("stage, width", [(3, 33), slow(3, 24), slow(2, 33)])
def test_layers_along_the_second_dim_are_gathered_one_after_another(stage, width):
    step, _ = compare(Layers(width), stage, vectors(16)[:2])
    assert up_front(step) == []
    kernel = step.layout().reads["ScanBlock_0/Dense_0/kernel"]
    assert kernel.stacked == (1,)
    if stage == 3:
        step.verify(vectors(16)[0])


@pytest.mark.slow
@pytest.mark.parametrize("width", [slow(24), 33])
def test_nnx_does_not_overwrite_them(width):
    step, _ = compare(lambda rngs: NnxLayers(width, rngs), 3, vectors(16)[:2])
    assert not any(read.written for read in step.layout().reads.values()) and up_front(step) == ["stack"]


@pytest.mark.parametrize("dims, fits", [((0, 2), True), ((1, 2), False), ((2, 0), False)])
def test_a_read_of_other_dims_than_a_loop_leaves_is_found(dims, fits):
    """Negative control: of a cube the shapes of all slices agree."""
    def run(w):
        def body(carry, w):
            return carry @ param_flow.mark_read("w", w, dims, lambda: None), None

        return jax.lax.scan(body, jnp.ones((4, 4)), jnp.moveaxis(w, 1, 0))[0], w

    flow = param_flow.param_flow(trace(run, jax.ShapeDtypeStruct((4, 4, 4), jnp.float32)).jaxpr, ["w"], ["w"])
    assert not flow.written and flow.bypassed == (frozenset() if fits else {"w"})


def test_a_transpose_that_is_written_back_is_found():
    """Negative control: another order of the dims is another parameter, of the same shape."""
    class Turned(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            self.linear.kernel.set_value(self.linear.kernel[...].T)
            return self.linear(x).mean(-1, keepdims=True)

    step = zero_jax.make_zero_train_step(Turned, 3, loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2))
    step.layout(vectors(16)[0])
    assert step.layout().reads["linear/kernel"].written
