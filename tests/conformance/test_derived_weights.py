"""Weights that a model computes from parameters: numbers beside a plain loop, and each gradient is scattered once."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.beside_plain_loop import compare, factory, squares, vectors
from support.oracle import slow
from support.program_controls import partitioned
from support.targets import mesh_of

import zero_jax


class Normed(nn.Module):
    """Convolutions and products under weight and spectral norm."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        x = nn.WeightNorm(nn.Dense(4 * self.hidden))(x).reshape(len(x), 4, self.hidden)
        x = nn.relu(nn.WeightNorm(nn.Conv(self.hidden, (3,)))(x))
        x = nn.relu(nn.SpectralNorm(nn.Conv(self.hidden, (3,)))(x, update_stats=True)).mean(1)
        return nn.Dense(1)(nn.SpectralNorm(nn.Dense(self.hidden))(x, update_stats=True))


class Written(nn.Module):
    """Weights by hand: standardised, masked, reparametrised, transposed, a sum of low rank, and one in two products."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        def weight(name, *shape):
            return self.param(name, nn.initializers.lecun_normal(), shape)

        size = self.hidden
        x = nn.Dense(size)(x)
        kernel = weight("standardised", size, size)
        x = nn.tanh(x @ ((kernel - kernel.mean(0, keepdims=True)) / (kernel.std(0, keepdims=True) + 1e-5)))
        x += x @ (weight("masked", size, size) * np.tri(size, dtype=np.float32))
        twice = jnp.sinh(weight("twice", size, size)).T
        x = nn.tanh(x @ twice) @ twice
        x += x @ (weight("sum", size, size) + weight("a", size, 8) @ weight("b", 8, size))
        return nn.Dense(1)(nn.tanh(x @ jax.jit(jnp.clip)(weight("clipped", size, size), -0.1, 0.1)))


class NnxNormed(nnx.Module):
    def __init__(self, width, hidden, rngs):
        self.first = nnx.WeightNorm(nnx.Linear(width, 4 * hidden, rngs=rngs), rngs=rngs)
        self.second = nnx.WeightNorm(nnx.Conv(hidden, hidden, (3,), rngs=rngs), rngs=rngs)
        self.third = nnx.SpectralNorm(nnx.Conv(hidden, hidden, (3,), rngs=rngs), rngs=rngs)
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        x = nnx.relu(self.second(x.reshape(len(x), 4, -1)))
        return self.out(nnx.relu(self.third(x)).mean(1))


class Layer(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.WeightNorm(nn.Dense(self.hidden))(x)), None


class Layers(nn.Module):
    """Layers in a loop of Flax's, each under weight norm."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(1)(scan(self.hidden)(nn.Dense(self.hidden)(x), None)[0])


MODELS = {"normed": lambda width, hidden: Normed(hidden), "written": lambda width, hidden: Written(hidden),
          "nnx": lambda *sizes: factory(NnxNormed, sizes), "layers": lambda width, hidden: Layers(hidden)}


@pytest.mark.grid
@pytest.mark.parametrize("model, stage, sizes", [
    slow("normed", 3, "uneven"), slow("normed", 1, "even"), slow("written", 3, "uneven"), slow("written", 2, "even"),
    slow("nnx", 3, "uneven"), slow("layers", 3, "uneven")])
def test_derived_weights_have_the_numbers_of_one_device(model, stage, sizes):
    width, hidden = {"even": (64, 64), "uneven": (67, 71)}[sizes]
    compare(MODELS[model](width, hidden), stage, vectors(width))


def verified(model, stage, sizes, target, **options):
    """The report of a step that `verify` accepts."""
    mesh = mesh_of(target, data=(2, 4) if target == "v5e:2x4" else 8)
    width, hidden = {"even": (256, 256), "uneven": (260, 268)}[sizes]
    batch = {"x": jax.ShapeDtypeStruct((64, width), jnp.float32), "y": jax.ShapeDtypeStruct((64, 1), jnp.float32)}
    step = zero_jax.make_zero_train_step(MODELS[model](width, hidden), stage, mesh=mesh, loss=squares, **options)
    return step.verify(batch)


@pytest.mark.grid
@pytest.mark.parametrize("model, stage, sizes, target", [
    ("normed", 3, "even", "h100:8"), slow("normed", 2, "uneven", "h100:8"), slow("normed", 3, "even", "v5e:2x4"),
    slow("written", 3, "uneven", "h100:8"), slow("nnx", 3, "even", "h100:8"), slow("nnx", 2, "uneven", "h100:8")])
def test_gradients_of_derived_weights_are_scattered_once(model, stage, sizes, target):
    """`verify` raises where one is all-reduced whole: 1.5 times its bytes, once."""
    report = verified(model, stage, sizes, target)
    assert report.communication_bytes < 1.01 * report.contract.communication_bytes


def test_left_to_the_partitioner_they_are_not_and_the_report_says_so():
    """Negative control."""
    with partitioned(), pytest.raises(zero_jax.ContractError, match="gradients are reduced"):
        verified("normed", 3, "even", "h100:8")
