"""Models, batches and comparisons of tests on states in host memory and in files."""

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax
from support.flat import flat_step
from zero_jax.tree import named_leaves

BATCH = {name: jax.random.randint(jax.random.key(seed), (16, 8), 0, 96) for seed, name in enumerate(
    ("inputs", "targets"))}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x)))), None


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(101, 64)(x)  # 101 and 96 rows: one is padded where it is split
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        x, _ = blocks(name="blocks")(x, None)
        return nn.Dense(96)(x)


class Unstacked(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(96, 64, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(3)])
        self.out = nnx.Linear(64, 96, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return self.out(x)


def unstacked():
    return Unstacked(rngs=nnx.Rngs(0))


def plain(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def made(stage, folder, *, model=None, optimizer=CLIPPED, buffer_bytes=2**16, **options):
    offload = None if folder is None else zero_jax.Offload(disk=folder, buffer_bytes=buffer_bytes)
    return flat_step(
        Stacked() if model is None else model(), stage, optimizer=optimizer, offload=offload, **options)


def run(step, state, steps):
    numbers = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return state, numbers


def host_leaves(state):
    return {name for name, leaf in named_leaves(state) if leaf.sharding.memory_kind == "pinned_host"}


def differing(left, right):
    """Names of the leaves whose bits differ; the copy of master weights that stage 3 has with files alone is not."""
    left, right = dict(named_leaves(left)), dict(named_leaves(right))
    names = [name for name in left if not name.startswith("weights/") and name != "disk"]
    assert set(names) <= set(right)
    return [name for name in names if plain(left[name]).tobytes() != plain(right[name]).tobytes()]
