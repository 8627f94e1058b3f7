"""Loops over one set of parameters: their numbers beside a plain loop, and each parameter is sent once."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.beside_plain_loop import STAGES, compare, factory, squares, vectors
from support.covering import weekly
from support.oracle import slow
from support.program_controls import partitioned
from support.targets import mesh_of

import zero_jax


class Recurrent(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        steps = nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x.reshape(x.shape[0], 4, -1))
        return nn.Dense(1)(steps.mean(1))


class NnxRecurrent(nnx.Module):
    def __init__(self, width, hidden, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(width // 4, hidden, rngs=rngs))
        self.out = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.rnn(x.reshape(x.shape[0], 4, -1)).mean(1))


class Shared(nn.Module):
    """One block of layers over and over, in a loop of JAX's own: its weights, biases and a table are read in each."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        first, second = nn.Dense(self.hidden, name="first"), nn.Dense(self.hidden, name="second")
        table = self.param("table", nn.initializers.normal(0.1), (9, self.hidden))
        x = first(x)
        second(x)

        def body(x, position):
            return nn.tanh(second(x) + table[position][None]), None

        return nn.Dense(1)(jax.lax.scan(body, x, jnp.arange(5))[0])


RECURRENT = {
    "linen": lambda width, hidden: Recurrent(hidden), "nnx": lambda *sizes: factory(NnxRecurrent, sizes),
    "shared": lambda width, hidden: Shared(hidden)}


@pytest.mark.grid
@weekly("flavour", ["shared", "linen", "nnx"])
@STAGES
def test_recurrent_loops(flavour, stage, sizes):
    width, hidden = {"even": (64, 64), "uneven": (68, 71)}[sizes]
    compare(RECURRENT[flavour](width, hidden), stage, vectors(width))


@pytest.mark.grid
@pytest.mark.parametrize("target", ["h100:8", slow("v5e:2x4")])
@pytest.mark.parametrize("flavour, stage, sizes", [
    ("linen", 3, "even"), slow("linen", 3, "uneven"), slow("linen", 2, "even"), slow("nnx", 3, "even"),
    slow("shared", 3, "even")])
def test_recurrent_loops_send_their_parameters_once(flavour, stage, sizes, target):
    """`verify` raises where a step sends more than its contract: 26 times as much, once."""
    on_tpu = target.startswith("v5e")
    mesh = mesh_of(target, data=(2, 4) if on_tpu else 8)
    width = {"even": 256, "uneven": 1004 if on_tpu else 268}[sizes]  # parts of small leaves do not fill TPU tiles
    batch = {"x": jax.ShapeDtypeStruct((64, width), jnp.float32), "y": jax.ShapeDtypeStruct((64, 1), jnp.float32)}
    step = zero_jax.make_zero_train_step(RECURRENT[flavour](width, width), stage, mesh=mesh, loss=squares)
    report = step.verify(batch)
    assert on_tpu or report.communication_bytes < 1.01 * report.contract.communication_bytes


def test_the_partitioner_sends_in_each_iteration_and_the_report_says_so():
    """Negative control."""
    mesh = mesh_of("h100:8")
    batch = {"x": jax.ShapeDtypeStruct((64, 256), jnp.float32), "y": jax.ShapeDtypeStruct((64, 1), jnp.float32)}
    with partitioned():
        report = zero_jax.make_zero_train_step(Recurrent(256), 3, mesh=mesh, loss=squares).compiled_step(batch).report
    assert any("gradients are reduced" in line and "In a loop" in line for line in report.violations), str(report)
