"""ResNet: its parameters by count, and that every stage trains it with the numbers of one device.

The images are random with a sign of their class: no data set comes with what the tests install.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.oracle import loss_difference, oracle, param_difference, slow, train
from support.workloads import classify_images

from models import resnet

TINY = resnet.PRESETS["tiny"]


def image_batches(num=5, size=32, side=16):
    """A class is a colour of every other row, under noise."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(num):
        labels = rng.integers(0, TINY.num_classes, size)
        images = rng.normal(size=(size, side, side, 3)).astype(np.float32)
        images[:, ::2] += np.stack([labels & 1, labels >> 1 & 1, labels >> 2], -1)[:, None, None]
        batches.append({"images": images, "labels": labels})
    return batches


SGD = optax.sgd(0.1, momentum=0.9)


@functools.cache
def alone(precision):
    return oracle(resnet.build(TINY), batches=image_batches(), loss=classify_images, precision=precision, optimizer=SGD)


@functools.cache
def run(precision, stage):
    return train(resnet.build(TINY), stage, 8, batches=image_batches(), loss=classify_images, precision=precision,
                 optimizer=SGD)


@pytest.mark.grid
@pytest.mark.parametrize(("precision", "stage"), [
    slow("fp32", 0), slow("fp32", 1), slow("fp32", 2), slow("fp32", 3), slow("bf16", 3)])
def test_tiny_is_one_device(precision, stage):
    one, many = alone(precision), run(precision, stage)
    assert many.losses[-1] < many.losses[0]
    tolerance = 1e-6 if precision == "fp32" else 2e-2
    assert loss_difference(many, one) < tolerance
    assert param_difference(many, one) < (1e-5 if precision == "fp32" else 5e-2)
    chex.assert_trees_all_close(many.variables, one.variables, rtol=tolerance, atol=tolerance)


def test_other_statistics_are_caught():
    """Negative control: the statistics of the step before."""
    before = oracle(resnet.build(TINY), batches=image_batches()[:-1], loss=classify_images, optimizer=SGD)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(before.variables, alone("fp32").variables, rtol=1e-2, atol=1e-2)


def test_resnet50_is_the_papers():
    """As many as torchvision and Keras count; the 53 norms' running statistics are no parameters."""
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    model = resnet.build(resnet.PRESETS["resnet50"])
    logits, variables = jax.eval_shape(lambda x: model.init_with_output(jax.random.key(0), x), images)
    assert logits.shape == (1, 1000)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == 25_557_032
    assert len(jax.tree.leaves(variables["batch_stats"])) == 2 * 53


@pytest.mark.slow
def test_running_statistics_serve_in_evaluation():
    """An example's logits do not depend on its batch; while training they do."""
    trained = run("fp32", 3)
    batch = image_batches(1)[0]
    other = {**batch, "images": np.concatenate([batch["images"][:8], 5 * batch["images"][8:]])}
    for mode, same in ((False, True), (True, False)):
        call = trained.step.evaluator(functools.partial(lambda train, model, b: model(b["images"], train=train), mode))
        left, right = (np.asarray(call(trained.state, b))[:8] for b in (batch, other))
        assert np.allclose(left, right, atol=1e-5) == same


@pytest.mark.parametrize("wrong", [{"blocks": ()}, {"blocks": (1, 0)}, {"width": 0}, {"num_classes": 0}])
def test_sizes_that_make_no_model(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* must"):
        resnet.Config(**{"blocks": (1,), **wrong})
