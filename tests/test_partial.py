"""Gradients scattered as sums of the devices' parts: which are, and with what numbers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import ADAMW, Trained, loss_difference, param_difference, train
from test_conformance import FLAVOURS, MLPS, classify, token_batches, vector_batches

import zero_jax
from models import gpt2
from zero_jax import hlo, partial
from zero_jax.tree import named_leaves

MESHES = {"factored": {"data": (2, 4)}, "factored hybrid": {"data": (2, 2), "replica": 2}}
CONFIG = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], 4, 4, 1)
        x = nn.gelu(nn.Conv(16, (3, 3), strides=2)(x))
        x = nn.gelu(nn.Conv(32, (1, 1))(nn.Conv(16, (3, 3), feature_group_count=16)(x)))
        return nn.Dense(8)(x.reshape(x.shape[0], -1))


class Sequence(nn.Module):
    """The weights of an LSTM are read in a loop over time, and scattered in each of its rounds."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.RNN(nn.LSTMCell(32))(x.reshape(x.shape[0], 4, 4))[:, -1])


class TimeMajor(nn.Module):
    """Its first contracted dim is time, and as long as the batch."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tile(x[None], (x.shape[0], 1, 1)) * jnp.linspace(0, 1, x.shape[0])[:, None, None]
        return nn.Dense(8)(nn.gelu(nn.Dense(64)(x))).mean(0)


VECTOR_MODELS = {"conv": Conv(), "lstm": Sequence(), "time major": TimeMajor(), **MLPS}


def run(name, stage, mesh) -> Trained:
    if name in FLAVOURS:
        model, batches, options = FLAVOURS[name](CONFIG), token_batches(), {"optimizer": ADAMW}
    else:
        model, batches = VECTOR_MODELS[name], vector_batches()
        options = {"optimizer": optax.sgd(0.1, momentum=0.9), "loss": classify}
    if not mesh:
        return train(model, 0, 1, batches=batches, precision="fp32", **options)
    step = zero_jax.make_zero_train_step(model, stage, mesh=zero_jax.make_mesh(**mesh), precision="fp32", **options)
    state, losses = step.init(jax.random.key(0), batches[0]), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    params = {name: np.asarray(leaf) for name, leaf in named_leaves(step.params(state))}
    return Trained(np.array(losses, np.float64), params, state, step)


one_device = functools.cache(lambda name: run(name, 0, None))
KEYS_BIAS = (("qkv/bias", lambda leaf: leaf.reshape(*leaf.shape[:-1], 2, 3, -1)[..., [0, 2], :]),)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [*FLAVOURS, *VECTOR_MODELS])
def test_numbers_are_those_of_one_device(name, mesh, stage):
    many, one = run(name, stage, MESHES[mesh]), one_device(name)
    assert loss_difference(many, one) < 1e-6
    assert param_difference(many, one, KEYS_BIAS) < 1e-5


def test_a_sum_that_leaves_out_an_axis_is_told(monkeypatch):
    """Negative control: what the comparison sees if the replicas' parts are not added."""
    monkeypatch.setattr(jax.lax, "psum", lambda value, axes: value)
    assert loss_difference(run("conv", 3, MESHES["factored hybrid"]), one_device("conv")) > 1e-3


def scattered(model, stage, mesh, batch, **options):
    """The share of the gradients' bytes that explicit reduce-scatters carry; only `psum_scatter` makes them on CPU."""
    step = zero_jax.make_zero_train_step(model, stage, mesh=zero_jax.make_mesh(**mesh), precision="fp32", **options)
    found = [c for c in hlo.collectives(step.lower(batch).compile().as_text()) if c.kind == "reduce-scatter"]
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(step.layout(batch).state.params))
    return sum(c.payload_bytes * c.count for c in found) / size, found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_matrix_is_scattered_once(flavour, stage):
    share, found = scattered(FLAVOURS[flavour](CONFIG), stage, {"data": (2, 4)}, token_batches()[0])
    matrices = (CONFIG.num_block_params + 64 * 32) / CONFIG.num_params  # the tied embedding once; not the positions
    assert {c.group_size for c in found} == {8}
    assert matrices <= share < matrices + 0.03


def test_a_flat_mesh_is_left_to_the_partitioner():
    share, _ = scattered(FLAVOURS["linen"](CONFIG), 3, {"data": 8}, token_batches()[0])
    assert share == 0


def test_two_readings_are_scattered_once(monkeypatch):
    """And negative control: without the merge the embedding is scattered for each of its two readings."""
    args = (FLAVOURS["linen"](CONFIG), 3, {"data": (2, 4)}, token_batches()[0])
    merged, _ = scattered(*args)
    monkeypatch.setattr("zero_jax.step.merge_scatters", lambda jaxpr, **_: jaxpr)
    twice, _ = scattered(*args)
    assert twice - merged == pytest.approx(64 * 32 / CONFIG.num_params, rel=1e-6)


def test_what_is_no_product_is_left_to_the_partitioner():
    class Scale(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, use_bias=False)(x * self.param("scale", nn.initializers.ones, (16,))[None])

    share, found = scattered(Scale(), 3, {"data": (2, 4)}, vector_batches()[0], loss=classify)
    assert {c.shapes[0][1][-1] for c in found} == {8} and share == 16 * 8 / (16 * 8 + 16)


def test_inlined_calls_compute_the_same():
    @jax.jit
    def inner(x, y):
        return x @ y, y

    def fun(x, y):
        first, second = inner(x, y)
        return jax.jit(lambda v: v * 2)(first) + second.sum()

    x, y = jnp.ones((3, 4)), jnp.arange(8.0).reshape(4, 2)
    closed = jax.make_jaxpr(fun)(x, y)
    call = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "jit")
    eqns = [new for eqn in closed.jaxpr.eqns for new in (partial._inlined(eqn) if eqn is call else [eqn])]
    inlined = closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns))
    np.testing.assert_array_equal(jax.extend.core.jaxpr_as_fun(inlined)(x, y)[0], fun(x, y))
