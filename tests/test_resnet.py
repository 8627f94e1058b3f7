"""ResNet: its parameters by count, and that every stage trains it with the numbers of one device.

The images are random with a sign of their class: no data set comes with what the tests install.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import loss_difference, param_difference, train

from models import resnet

TINY = resnet.PRESETS["tiny"]


def classify(model, batch):
    logits = model(batch["images"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def image_batches(num=8, size=32, side=16):
    """A class is a colour of every other row, under noise."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(num):
        labels = rng.integers(0, TINY.num_classes, size)
        images = rng.normal(size=(size, side, side, 3)).astype(np.float32)
        images[:, ::2] += np.stack([labels & 1, labels >> 1 & 1, labels >> 2], -1)[:, None, None]
        batches.append({"images": images, "labels": labels})
    return batches


@functools.cache
def run(precision, stage, num_devices):
    return train(resnet.build(TINY), stage, num_devices, batches=image_batches(), loss=classify, precision=precision,
                 optimizer=optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 3)])
def test_tiny_is_one_device(precision, stage):
    one, many = run(precision, 0, 1), run(precision, stage, 8)
    assert many.losses[-1] < many.losses[0]
    tolerance = 1e-6 if precision == "fp32" else 2e-2
    assert loss_difference(many, one) < tolerance
    assert param_difference(many, one) < (1e-5 if precision == "fp32" else 5e-2)
    for left, right in zip(jax.tree.leaves(many.state.variables), jax.tree.leaves(one.state.variables), strict=True):
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=tolerance, atol=tolerance)


def test_resnet50_is_the_papers():
    """As many as torchvision and Keras count; the 53 norms' running statistics are no parameters."""
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    model = resnet.build(resnet.PRESETS["resnet50"])
    logits, variables = jax.eval_shape(lambda x: model.init_with_output(jax.random.key(0), x), images)
    assert logits.shape == (1, 1000)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == 25_557_032
    assert len(jax.tree.leaves(variables["batch_stats"])) == 2 * 53


def test_running_statistics_serve_in_evaluation():
    """An example's logits do not depend on its batch; while training they do."""
    trained = run("fp32", 3, 8)
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
