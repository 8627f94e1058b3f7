"""Stage k on eight devices has the numbers of one device: flavour x stage x precision x kind of layers."""

import dataclasses
import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from support.covering import weekly
from support.oracle import ADAMW, by_name, loss_difference, oracle, param_difference, slow, train
from support.workloads import FLAVOURS, KEY_BIAS, MLPS, Mlp, classify, token_batches, vector_batches

import zero_jax
from models import gpt2, gpt2_nnx

CONFIG = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)
SGD = optax.sgd(0.1, momentum=0.9)


@functools.cache
def gpt2_alone(flavour, scanned, precision):
    return oracle(FLAVOURS[flavour](dataclasses.replace(CONFIG, scan_layers=scanned)), batches=token_batches(),
                  precision=precision)


FAST = [("linen", True, "fp32", 3)]


@pytest.mark.grid
@pytest.mark.parametrize("flavour, scanned, precision, stage", [*FAST, *(
    slow(*row) for row in itertools.product(FLAVOURS, (True, False), ("fp32", "bf16"), range(4)) if row not in FAST)])
def test_gpt2_is_one_device(flavour, scanned, precision, stage):
    one = gpt2_alone(flavour, scanned, precision)
    many = train(FLAVOURS[flavour](dataclasses.replace(CONFIG, scan_layers=scanned)), stage, 8,
                 batches=token_batches(), precision=precision)
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

    broken = train(gpt2.build(CONFIG), 3, 8, batches=token_batches(), precision="fp32", loss=forgetful)
    one = gpt2_alone("linen", True, "fp32")
    assert loss_difference(broken, one) > 1e-4  # a hundred times what the check allows
    assert param_difference(broken, one, KEY_BIAS) > 1e-4


MLP_FAST = [("linen", "dropout", "bf16", 1), ("nnx", "batch norm", "fp32", 3)]


@functools.cache
def mlp_alone(name, precision):
    return oracle(MLPS[name], batches=vector_batches(), loss=classify, precision=precision, optimizer=SGD)


@pytest.mark.grid
@weekly("flavour, kind, precision, stage", [
    *MLP_FAST, *(row for row in itertools.product(FLAVOURS, ("batch norm", "dropout"), ("fp32", "bf16"), range(4))
                 if row not in MLP_FAST)], default=len(MLP_FAST))
def test_mlp_is_one_device(flavour, kind, precision, stage):
    """With its batch statistics, which are of the whole batch, and its random streams."""
    name = f"{flavour} {kind}"
    one = mlp_alone(name, precision)
    many = train(MLPS[name], stage, 8, batches=vector_batches(), loss=classify, precision=precision, optimizer=SGD)
    tolerance = 1e-6 if precision == "fp32" else 2e-2
    assert loss_difference(many, one) < tolerance
    assert param_difference(many, one) < (1e-5 if precision == "fp32" else 5e-2)
    chex.assert_trees_all_close(many.variables, one.variables, rtol=tolerance, atol=tolerance)


def test_batch_statistics_of_each_device_alone_are_caught():
    """Negative control: what a data-parallel framework without global statistics computes."""

    class Local(Mlp):
        @nn.compact
        def __call__(self, x):
            return nn.vmap(Mlp, variable_axes={"params": None, "batch_stats": 0},
                           split_rngs={"params": False})()(x.reshape(8, -1, 16)).reshape(x.shape[0], -1)

    local = train(Local(), 3, 8, batches=vector_batches(), loss=classify, optimizer=SGD)
    assert loss_difference(local, mlp_alone("linen batch norm", "fp32")) > 1e-3


def test_another_dropout_is_caught():
    """Negative control: the masks of another key."""
    other = train(MLPS["linen dropout"], 3, 8, batches=vector_batches(), loss=classify, optimizer=SGD, seed=1)
    one = mlp_alone("linen dropout", "fp32")
    assert loss_difference(other, one) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["linen", slow("nnx")])
def test_the_same_seed_twice_is_bitwise_equal(flavour):
    """Of one compiled step; that two of two processes are the same too, a run that is resumed shows."""
    step = zero_jax.make_zero_train_step(
        FLAVOURS[flavour](dataclasses.replace(CONFIG, dropout=0.1)), 3, mesh=zero_jax.make_mesh(8), optimizer=ADAMW)

    def run(seed):
        state, losses = step.init(jax.random.key(seed), token_batches()[0]), []
        for batch in token_batches():
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        return losses, state

    first, second, other = (run(seed) for seed in (0, 0, 1))
    chex.assert_trees_all_equal(by_name(first), by_name(second))
    assert float(first[0][-1]) != float(other[0][-1])


MESHES = {"factored": {"data": (2, 4)}, "hybrid": {"data": 4, "replica": 2},
          "factored hybrid": {"data": (2, 2), "replica": 2}}


@pytest.mark.grid
@pytest.mark.parametrize("stage", [slow(1), 3])
@pytest.mark.parametrize("mesh", [slow("factored"), slow("hybrid"), "factored hybrid"])
def test_meshes_are_one_device(mesh, stage):
    many = train(gpt2.build(CONFIG), stage, zero_jax.make_mesh(**MESHES[mesh]), batches=token_batches(),
                 precision="fp32")
    one = gpt2_alone("linen", True, "fp32")
    assert loss_difference(many, one) < 1e-6 and param_difference(many, one, KEY_BIAS) < 1e-5


@pytest.mark.slow
def test_an_nnx_module_keeps_its_values():
    """A constructed module starts from its own parameters, and a function of rngs from the key."""
    config = gpt2.Config(1, 32, 2, vocab_size=64, max_length=16)
    module = gpt2_nnx.build(config)(rngs=nnx.Rngs(7))
    batch = token_batches(1)[0]
    step = zero_jax.make_zero_train_step(module, 3)
    state = step.init(jax.random.key(0), batch)
    own = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    chex.assert_trees_all_equal(state.params, own)
    chex.assert_shape(module(batch["inputs"]), (8, 16, 64))  # and is not donated away
