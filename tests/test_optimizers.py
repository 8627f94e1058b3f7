"""Wrappers and parts of optax: a state is laid out by structure, and its trajectory is that of one device.

tests/test_optimizer_table.py has every optimizer.
"""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from oracle import loss_difference, param_difference, train
from test_conformance import classify, vector_batches


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(64)(x)))


def kernels_apart(params):
    return jax.tree.map_with_path(lambda path, _: "kernel" if "kernel" in str(path) else "rest", params)


def only_matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
OPTIMIZERS = {
    "sgd with momentum": optax.sgd(0.1, momentum=0.9),
    "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.1), only_matrices), optax.adam(1e-2)),
    "multi_transform": optax.multi_transform({"kernel": optax.adamw(1e-2), "rest": optax.sgd(0.1)}, kernels_apart),
    "frozen biases": optax.multi_transform({"kernel": optax.adam(1e-2), "rest": optax.set_to_zero()}, kernels_apart),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "clip and schedule": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(SCHEDULE)),
    "reduce_on_plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
    "flattened": optax.flatten(optax.adam(1e-2)),
    "every second step": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "skips what is not finite": optax.apply_if_finite(optax.adam(1e-2), 3),
}
BATCHES = vector_batches(5, size=16)


def run(name, stage, num_devices):
    return train(Model(), stage, num_devices, batches=BATCHES, loss=classify, optimizer=OPTIMIZERS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectory_is_one_device(name):
    one, many = run(name, 0, 1), run(name, 3, 8)
    assert loss_difference(many, one) < 2e-6
    assert param_difference(many, one) < 5e-6
    layout = many.step.layout(BATCHES[0])
    sharded = [row for row in layout.placements() if row.name.startswith("opt_state") and row.device_bytes < row.bytes]
    assert not layout.replicated()
    assert len(sharded) >= 2  # at least one moment or factor of each kernel
    for leaf, declared in zip(jax.tree.leaves(many.state), jax.tree.leaves(layout.shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(declared, leaf.ndim)


def test_learning_rate_is_told_where_the_schedule_gives_one():
    def rates(name):
        trained = run(name, 1, 8)
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


def test_a_norm_of_one_shard_is_caught():
    """Negative control: an optimizer whose trust ratio saw one device's part only has another trajectory."""

    def scale_by_part(updates, state, params=None):
        return jax.tree.map(lambda u: u / (1e-6 + optax.tree.norm(u[: max(1, len(u) // 8)])), updates), state

    def scale_by_whole(updates, state, params=None):
        return jax.tree.map(lambda u: u / (1e-6 + optax.tree.norm(u)), updates), state

    runs = [train(Model(), 3, 8, batches=BATCHES, loss=classify, optimizer=optax.chain(
        optax.GradientTransformation(lambda params: optax.EmptyState(), scale), optax.sgd(0.1)))
        for scale in (scale_by_part, scale_by_whole)]
    assert loss_difference(*runs) > 1e-3
