"""Wrappers and parts of optax: a state is laid out by structure, and its trajectory is that of one device.

test_optimizer_table.py has every optimizer.
"""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from support.covering import weekly
from support.oracle import loss_difference, oracle, param_difference, slow, train
from support.updates import check_same, on_one_device, on_shards
from support.workloads import SCHEDULE, WRAPPERS, classify, kernels_apart, vector_batches


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(64)(x)))


BATCHES = vector_batches(5, size=16)


def run(name, stage):
    return train(Model(), stage, 8, batches=BATCHES, loss=classify, optimizer=WRAPPERS[name])


@pytest.mark.grid
@pytest.mark.parametrize(("name", "stage"), [*((name, 3) for name in WRAPPERS), *(slow(name, 1) for name in WRAPPERS)])
def test_updates_are_those_of_one_device(name, stage):
    sharded = on_shards(WRAPPERS[name], stage)
    check_same(sharded, on_one_device(WRAPPERS[name]))
    rows = [row for row in sharded.layout.placements() if row.name.startswith("opt_state")]
    if name == "flattened":  # all 1635 elements in a row, which 8 devices do not divide, and no leaf of a parameter
        assert {row.name for row in sharded.layout.replicated()} == {"opt_state/0/mu", "opt_state/0/nu"}
        return
    assert not sharded.layout.replicated()
    assert sum(row.device_bytes < row.bytes for row in rows) >= 2  # at least one moment or factor of each kernel


@pytest.mark.grid
@weekly("name", [
    name if name in ("multi_transform", "every second step", "flattened") else slow(name) for name in WRAPPERS])
def test_trajectory_is_one_device(name):
    one = oracle(Model(), batches=BATCHES, loss=classify, optimizer=WRAPPERS[name])
    many = run(name, 3)
    assert loss_difference(many, one) < 2e-6
    assert param_difference(many, one) < 5e-6
    layout = many.step.layout(BATCHES[0])
    for leaf, declared in zip(jax.tree.leaves(many.state), jax.tree.leaves(layout.shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(declared, leaf.ndim)


def test_learning_rate_is_told_where_the_schedule_gives_one():
    def rates(name):
        trained = run(name, 1)
        _, metrics = trained.step(trained.state, BATCHES[0])
        assert all(metric.shape == () for metric in metrics.values())
        return metrics.get("learning_rate")

    np.testing.assert_allclose(float(rates("inject_hyperparams")), float(SCHEDULE(5)), rtol=1e-6)
    assert rates("sgd with momentum") is None


def test_every_learning_rate_is_told():
    injected = {"kernel": optax.inject_hyperparams(optax.adam)(1e-2), "rest": optax.inject_hyperparams(optax.sgd)(0.5)}
    trained = train(Model(), 2, 8, batches=BATCHES[:1], loss=classify,
                    optimizer=optax.multi_transform(injected, kernels_apart))
    _, metrics = trained.step(trained.state, BATCHES[1])
    told = sorted(float(value) for name, value in metrics.items() if name.startswith("learning_rate"))
    np.testing.assert_allclose(told, [1e-2, 0.5], rtol=1e-6)
