"""Optimizers and trees of all kinds, saved and restored through a chain of other stages and devices."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.oracle import slow
from support.saved import BATCH, MODEL, WORDS, difference, dump, make_step, muon_by_owner, trained

import zero_jax

CHAIN = ((1, 4, 1), (2, 8, 2), (0, 1, 1), (3, 8, 1), (2, 2, 1))
"""(stage, devices, replicas) of five restores, each from what the one before it saved."""


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WORDS, 16)
        return embed.attend(nn.tanh(nn.Dense(16)(embed(tokens))))


class Dropping(nnx.Module):
    """An NNX model that owns its keys and their counts, and batch statistics."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, WORDS, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.norm(self.drop(self.embed(tokens))))


UNEVEN = nn.Sequential([nn.Embed(WORDS, 67), nn.Dense(131), nn.gelu, nn.Dense(WORDS)])


def options_of(**options):
    return lambda mesh: options


CASES = {
    "adamw": options_of(optimizer=optax.adamw(1e-3, mu_dtype=jnp.bfloat16)),
    "adafactor": options_of(optimizer=optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    "muon": lambda mesh: {"optimizer": muon_by_owner(mesh)},
    "multi steps": options_of(optimizer=optax.MultiSteps(optax.adamw(1e-3), 2)),
    "multi transform": options_of(optimizer=optax.partition(
        {"a": optax.sgd(1e-2, momentum=0.9), "b": optax.inject_hyperparams(optax.adamw)(1e-3)},
        lambda tree: {name: "a" if name == "layers_0" else "b" for name in tree})),
    "frozen": options_of(frozen=("layers_0", "bias"), precision="bf16"),
    "tied": options_of(model=Tied(), precision="bf16"),
    "average and scale": options_of(ema=0.9, precision="fp16", guard=zero_jax.Guard(skip=2, spike=9.0)),
    "bf16": options_of(precision="bf16-stochastic", ema=0.9),
    "master copy": options_of(precision=zero_jax.Precision(params=jnp.float32, compute=jnp.bfloat16, keep=("bias",))),
    "keys": options_of(model=Dropping),
    "uneven": options_of(model=UNEVEN, ema=0.99),
}
DTYPES = {"bf16": "bfloat16", "keys": "key<fry>", "adamw": "bfloat16"}


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("name", [name if name == "uneven" else slow(name) for name in CASES])
def test_a_chain_of_restores(tmp_path, name):
    def step_on(stage, count, replica):
        mesh = zero_jax.make_mesh(devices=jax.devices()[:count], replica=replica)
        options = {"model": MODEL, **CASES[name](mesh)}
        return make_step(stage, count, mesh=mesh, **options)

    first = step_on(3, 8, 1)
    state = trained(first)
    before = dump(first, state)
    assert DTYPES.get(name, "float32") in {dtype for dtype, _, _ in before.values()}
    step = first
    for number, (stage, count, replica) in enumerate(CHAIN):
        checkpoints = zero_jax.Checkpoints(tmp_path)
        checkpoints.save(step, state, at=number, wait=True)
        step = step_on(stage, count, replica)
        state = checkpoints.restore(step, BATCH).state
        assert difference(before, dump(step, state)) == [], (stage, count)
        if state.weights is not None:  # the working copy is the cast of what it is a copy of
            chex.assert_trees_all_equal(state.weights, jax.tree.map(
                lambda param, copy: np.asarray(param).astype(copy.dtype), state.params, state.weights))
    if name == "master copy":
        assert state.weights is not None
    checkpoints.save(step, state, at=9, wait=True)
    back = checkpoints.restore(first, BATCH).state
    assert difference(before, dump(first, back)) == []
    state = checkpoints.restore(first, BATCH).state
    after, metrics = first(back, BATCH)
    again, metrics_again = first(trained(first), BATCH)
    assert metrics["loss"] == metrics_again["loss"] and difference(dump(first, after), dump(first, again)) == []
    assert difference(dump(first, after), dump(first, state)) != []
