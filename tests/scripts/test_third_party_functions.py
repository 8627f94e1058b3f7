"""scripts/reliability/third_party_functions.py: Flax models as functions of their parameters are the same steps."""

import subprocess
import sys

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.covering import weekly

from scripts.reliability import third_party_functions
from scripts.reliability.third_party_functions import as_function, cells, compared, is_right

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)}


class Normed(nn.Module):
    """Statistics of batches, which a step hands on."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(128)(x))
        return nn.Dense(64)(nn.relu(x))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(64)(x)), None


class Stacked(nn.Module):
    """Layers in a loop, which are gathered one by one."""

    @nn.compact
    def __call__(self, x):
        return nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)[0]


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


def small_nnx():
    return nnx.Sequential(nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(128, 64, rngs=nnx.Rngs(1)))


@weekly("make", [small_nnx, Normed, pytest.param(Stacked, marks=pytest.mark.slow)])
def test_a_flax_model_as_a_function_of_its_parameters_is_the_same(make):
    row = compared(make(), loss, BATCH)
    assert is_right(row) and row["sent"][0] > 0, row


def test_the_function_of_another_loss_is_not_right(monkeypatch):
    """The control of the one before."""
    made = as_function
    monkeypatch.setattr(third_party_functions, "as_function", lambda model, loss, batch: made(
        model, lambda model, batch: 2 * loss(model, batch), batch))
    assert not is_right(compared(small_nnx(), loss, BATCH))


def test_a_row_is_right_with_the_same_numbers_and_bytes():
    row = {"params": 1000, "off": 0.0, "sent": [2**20, 2**20]}
    assert is_right(row) and cells("gpt2", row) == "| gpt2 | 1 | 0e+00 | 1.000 | 1.000 |"
    for change in ({"off": 1e-3}, {"off": float("nan")}, {"sent": [2**20, 2**19]}, {"error": "ValueError"}):
        assert not is_right({**row, **change})
    assert "failed: ValueError" in cells("gpt2", {"error": "ValueError"})


@pytest.mark.slow
def test_some_of_them_are_right():
    pytest.importorskip("transformers.models.gpt2.modeling_flax_gpt2")
    subprocess.run([sys.executable, third_party_functions.__file__, "--only", "gpt2", "resnet"], check=True)
