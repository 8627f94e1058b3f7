"""Stage k on eight devices has the numbers of one device: flavour x stage x precision x kind of layers."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import ADAMW, loss_difference, param_difference, slow, train

import zero_jax
from models import gpt2, gpt2_nnx

NUM_STEPS = 20
FLAVOURS = {"linen": gpt2.build, "nnx": gpt2_nnx.build}


def without_key_bias(bias):
    """The bias of query, key and value without the key's: softmax does not see it."""
    return np.delete(bias.reshape(*bias.shape[:-1], 2, 3, -1), 1, axis=-2)


KEY_BIAS = [("qkv/bias", without_key_bias)]


def token_batches(num=NUM_STEPS, size=8, length=16, vocab=64):
    """Counting upwards from anywhere, modulo the vocabulary: soon learned."""
    starts = np.random.default_rng(0).integers(0, vocab, (num, size, 1))
    tokens = ((starts + np.arange(length + 1)) % vocab).astype(np.int32)
    return [{"inputs": t[:, :-1], "targets": t[:, 1:]} for t in tokens]


@functools.cache
def gpt2_run(flavour, scanned, precision, stage, num_devices):
    config = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16, scan_layers=scanned)
    return train(FLAVOURS[flavour](config), stage, num_devices, batches=token_batches(), precision=precision)


GRID = itertools.product(FLAVOURS, (True, False), ("fp32", "bf16"), range(4))


@pytest.mark.parametrize("flavour, scanned, precision, stage", [
    row if row[1:3] == (True, "fp32") or row[1:] == (True, "bf16", 3) or row == ("linen", False, "fp32", 3) else
    slow(*row) for row in GRID])
def test_gpt2_is_one_device(flavour, scanned, precision, stage):
    one = gpt2_run(flavour, scanned, precision, 0, 1)
    many = gpt2_run(flavour, scanned, precision, stage, 8)
    assert many.losses[-1] < many.losses[0]
    if precision == "fp32":
        assert loss_difference(many, one) < 1e-6
        assert param_difference(many, one, KEY_BIAS) < 1e-5
    else:  # bfloat16 sums of 8 parts against 1: its rounding is 2**-8, and Adam's first steps have the size 1e-3
        assert loss_difference(many, one) < 4e-3
        assert param_difference(many, one, KEY_BIAS) < 8e-3


def test_the_check_tells_a_broken_gradient():
    """Negative control: gradients that one device forgot to send, a seventh less, are caught."""

    def forgetful(model, batch):
        weights = jnp.where(jnp.arange(batch["inputs"].shape[0]) < 7, 8 / 7, 0.0)[:, None]
        logits = model(batch["inputs"]).astype(jnp.float32)
        return (weights * optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])).mean()

    config = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)
    broken = train(gpt2.build(config), 3, 8, batches=token_batches(), precision="fp32", loss=forgetful)
    one = gpt2_run("linen", True, "fp32", 0, 1)
    assert loss_difference(broken, one) > 1e-3
    assert param_difference(broken, one, KEY_BIAS) > 1e-3


class Mlp(nn.Module):
    """Batch statistics over the global batch, and dropout."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Dense(32)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
            x = nn.Dropout(self.rate, deterministic=self.rate == 0)(nn.relu(x))
        return nn.Dense(8)(x)


class NnxMlp(nnx.Module):
    def __init__(self, rate, *, rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def classify(model, batch):
    logits = model(batch["x"]).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


def vector_batches(num=NUM_STEPS, size=32):
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(size, 16)).astype(np.float32), "y": rng.integers(0, 8, size)} for _ in range(num)]


MLPS = {
    "linen batch norm": Mlp(), "linen dropout": Mlp(rate=0.2),
    "nnx batch norm": functools.partial(NnxMlp, 0.0), "nnx dropout": functools.partial(NnxMlp, 0.2),
}


@functools.cache
def mlp_run(name, precision, stage, num_devices):
    return train(MLPS[name], stage, num_devices, batches=vector_batches(), loss=classify, precision=precision,
                 optimizer=optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MLPS)
def test_mlp_is_one_device(name, precision, stage):
    one, many = mlp_run(name, precision, 0, 1), mlp_run(name, precision, stage, 8)
    tolerance = 1e-6 if precision == "fp32" else 2e-2
    assert loss_difference(many, one) < tolerance
    assert param_difference(many, one) < (1e-5 if precision == "fp32" else 5e-2)
    for left, right in zip(jax.tree.leaves(many.state.variables), jax.tree.leaves(one.state.variables), strict=True):
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=tolerance, atol=tolerance)


def test_batch_statistics_of_each_device_alone_are_caught():
    """Negative control: what a data-parallel framework without global statistics computes."""

    class Local(Mlp):
        @nn.compact
        def __call__(self, x):
            return nn.vmap(Mlp, variable_axes={"params": None, "batch_stats": 0},
                           split_rngs={"params": False})()(x.reshape(8, -1, 16)).reshape(x.shape[0], -1)

    one = mlp_run("linen batch norm", "fp32", 0, 1)
    local = train(Local(), 3, 8, batches=vector_batches(), loss=classify, optimizer=optax.sgd(0.1, momentum=0.9))
    assert loss_difference(local, one) > 1e-3


@pytest.mark.parametrize("flavour", ["linen", slow("nnx")])
def test_the_same_seed_twice_is_bitwise_equal(flavour):
    config = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16, dropout=0.1)
    first, second, other = (
        train(FLAVOURS[flavour](config), 3, 8, batches=token_batches(5), seed=seed) for seed in (0, 0, 1))
    assert first.losses.tobytes() == second.losses.tobytes()
    assert all(first.params[name].tobytes() == second.params[name].tobytes() for name in first.params)
    assert first.losses.tobytes() != other.losses.tobytes()


@pytest.mark.parametrize("stage", [slow(1), 3])
@pytest.mark.parametrize("mesh", [{"data": (2, 4)}, {"data": 4, "replica": 2}, {"data": (2, 2), "replica": 2}],
                         ids=["factored", "hybrid", "factored hybrid"])
def test_meshes_are_one_device(mesh, stage):
    config = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)
    step = zero_jax.make_zero_train_step(
        gpt2.build(config), stage, mesh=zero_jax.make_mesh(**mesh), optimizer=ADAMW, precision="fp32")
    state = step.init(jax.random.key(0), token_batches()[0])
    one = gpt2_run("linen", True, "fp32", 0, 1)
    for expected, batch in zip(one.losses, token_batches(), strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), expected, rtol=1e-6)


def test_an_nnx_module_keeps_its_values():
    """A constructed module starts from its own parameters, and a function of rngs from the key."""
    config = gpt2.Config(1, 32, 2, vocab_size=64, max_length=16)
    module = gpt2_nnx.build(config)(rngs=nnx.Rngs(7))
    batch = token_batches(1)[0]
    step = zero_jax.make_zero_train_step(module, 3)
    state = step.init(jax.random.key(0), batch)
    own = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    for left, right in zip(jax.tree.leaves(state.params), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    np.testing.assert_array_equal(  # and is not donated away
        np.asarray(module(batch["inputs"])).shape, (8, 16, 64))
