"""Models, batches and DiLoCo steps of slices that train by themselves."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zero_jax
from support.flat import flat_step
from zero_jax.tree import named_leaves

VOCABULARY, WIDTH, ROWS = 32, 9, 16
"""The width divides over no number of devices: every stage pads it, or finds another dim."""


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        width = x.shape[-1]
        return x + nn.Dense(width)(nn.tanh(nn.Dense(2 * width)(x))), None


class Scanned(nn.Module):
    """Four blocks in a loop, so that fragments are made of layers."""

    width: int = WIDTH

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, self.width)(tokens)
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(VOCABULARY)(blocks(name="blocks")(x, None)[0])


class Normed(nnx.Module):
    """A batch norm, whose statistics are each slice's own."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        return self.dense(self.norm(self.embed(tokens)))


STREAMING = {"fragments": 2, "overlap": True, "mix": 0.25}
"""What most rows are of, so that they share their programs' compilations."""

MODELS = {"linen": Scanned(), "wide": Scanned(96), "nnx": lambda rngs: Normed(rngs=rngs)}
INNER = optax.adamw(1e-2, eps=1e-6)


def batches(number, rows=ROWS):
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (number, rows, 5)).astype(np.int32)
    return [{"inputs": each[:, :-1], "targets": each[:, 1:]} for each in tokens]


def make(stage=3, flavour="linen", replica=2, inner=INNER, step_options=None, **options):
    step = flat_step(
        MODELS[flavour], stage, optimizer=inner, mesh=zero_jax.make_mesh(replica=replica),
        **(step_options or {}))
    return zero_jax.make_diloco_step(step, **{"every": 3, **options})


def trained(diloco, given, state=None):
    """(losses, (steps, slices); the last state)."""
    state = diloco.init(jax.random.key(0), given[0]) if state is None else state
    losses = []
    for batch in given:
        state, metrics = diloco(state, batch)
        losses.append(np.asarray(metrics["loss"]))
    return np.array(losses), state


def bits(tree):
    return {name: np.array(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
            for name, leaf in named_leaves(tree)}
