"""Architectures not written for this project, unedited: each at stage 3 on eight devices has the numbers of one."""

import functools

import chex
import numpy as np
import optax
import pytest
from support.oracle import loss_difference, oracle, param_difference, slow, train
from support.zoo import CASES, IMAGES, VECTORS, ConvNet, classify

SGD = optax.sgd(0.1, momentum=0.9)


def options(case):
    return {"batches": [case.batch] * 4, "loss": case.loss, "rng_streams": case.rng_streams, "optimizer": SGD}


@functools.cache
def alone(name):
    return oracle(CASES[name].model, **options(CASES[name]))


@functools.cache
def trained(name):
    return train(CASES[name].model, 3, 8, **options(CASES[name]))


FAST = {"sows", "nnx mixture", "reads .variables", "own RNG stream", "L2 over all parameters", "nnx LoRA"}


@pytest.mark.grid
@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in CASES])
def test_model_is_one_device(name):
    one, many = alone(name), trained(name)
    assert loss_difference(many, one) < 2e-6
    assert param_difference(many, one) < 1e-6
    chex.assert_trees_all_close(many.variables, one.variables, rtol=1e-5, atol=1e-6)


@pytest.mark.grid
@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in CASES])
def test_what_cannot_be_read_through_a_box_is_listed(name):
    case, layout = CASES[name], trained(name).step.layout(CASES[name].batch)
    assert tuple(sorted(path for path, read in layout.reads.items() if read.on_entry)) == case.on_entry
    assert all(path in layout.describe() for path in case.on_entry)
    assert not [path for path, read in layout.reads.items() if not read.count]


def test_a_model_that_differs_is_told_apart():
    """Negative control: the same net without its batch norm's momentum term, so the check can fail."""
    other = train(ConvNet(), 3, 8, batches=[IMAGES] * 4, loss=classify, optimizer=optax.sgd(0.1, momentum=0.8))
    assert loss_difference(other, alone("convolutional net")) > 1e-4


def test_counters_count_and_frozen_variables_stay():
    assert int(trained("sows").state.variables["counters"]["calls"]) == 5  # init counts once, as in Flax
    frozen = trained("nnx mixture").state.variables["frozen"]
    np.testing.assert_array_equal(np.asarray(frozen), np.full((32, 32), 0.01, np.float32))
    layout = trained("nnx mixture").step.layout(VECTORS)
    assert "variables/frozen" in [placement.name for placement in layout.replicated()]
