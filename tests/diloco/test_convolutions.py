"""Models that convolve, in slices that train by themselves: each has kernels of its own."""

import flax.linen as nn
import jax
import numpy as np
import optax
from support.covering import weekly
from support.flat import flat_step
from support.oracle import by_name, oracle
from support.program_controls import partitioned

import zero_jax

OPTIMIZER = optax.sgd(0.5)


class Net(nn.Module):
    """Two convolutions, one of them 1 x 1, which XLA's partitioner takes another way."""

    @nn.compact
    def __call__(self, images):
        hidden = nn.relu(nn.Conv(12, (4, 4), (2, 2))(images))
        return nn.Dense(5)((hidden + nn.Conv(12, (1, 1))(hidden)).mean((1, 2)))


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"]).mean()


def difference(stage, data, *, rows=16, **options):
    """Of the parameters after a step: slices that are averaged in each step, and a plain loop."""
    random = np.random.default_rng(0)
    batch = {"inputs": random.normal(size=(rows, 8, 8, 3)).astype(np.float32), "targets": random.integers(0, 5, rows)}
    step = flat_step(Net(), stage, mesh=zero_jax.make_mesh(data, replica=4), optimizer=OPTIMIZER, loss=loss, **options)
    slices = zero_jax.make_diloco_step(step, every=1, learning_rate=1.0, momentum=0.0, nesterov=False)
    state, _ = slices(slices.init(jax.random.key(0), batch), batch)
    expected = oracle(Net(), batches=[batch], loss=loss, optimizer=OPTIMIZER).params
    return max(np.abs(value - expected[name]).max() for name, value in by_name(slices.params(state)).items())


@weekly("stage, data, options", [
    (2, 2, {"accumulate": 2, "reduce": "once"}), (3, 2, {}), (2, 2, {"accumulate": 2}), (0, 1, {})])
def test_the_numbers_are_those_of_a_plain_loop(stage, data, options):
    """The control: left to the partitioner they are not (one device a slice)."""
    assert difference(stage, data, **options) < 1e-6
    if not stage:
        with partitioned():
            assert difference(stage, data, **options) > 1e-3
