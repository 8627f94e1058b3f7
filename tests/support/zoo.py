"""Architectures not written for this project, unedited, each with a batch and a loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

RNG = np.random.default_rng(0)


IMAGES = {"x": RNG.normal(size=(16, 8, 8, 3)).astype(np.float32), "y": RNG.integers(0, 8, 16)}


VECTORS = {"x": RNG.normal(size=(16, 32)).astype(np.float32), "y": RNG.integers(0, 8, 16)}


PAIRS = {"x": RNG.integers(0, 32, (16, 12)), "t": RNG.integers(0, 32, (16, 8)), "y": RNG.integers(0, 32, (16, 8))}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def classify(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


class ConvNet(nn.Module):
    """Convolutions, batch norm, group norm, residual."""

    @nn.compact
    def __call__(self, x, train=True):
        for channels in (16, 32):
            y = nn.BatchNorm(use_running_average=not train)(nn.Conv(channels, (3, 3), use_bias=False)(x))
            x = nn.GroupNorm(4)(nn.Conv(channels, (3, 3))(nn.relu(y)) + nn.Conv(channels, (1, 1))(x))
        return nn.Dense(8)(x.mean((1, 2)))


class EncoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(4)(x, x))
        return nn.LayerNorm()(x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x))))


class DecoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x, memory):
        causal = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(4)(x, mask=causal))
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(4)(x, memory))
        return nn.LayerNorm()(x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x))))


class EncoderDecoder(nn.Module):
    """Tied embeddings, cross attention, some layers with remat of their own."""

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(32, 32)
        memory = EncoderLayer()(embed(source))
        return embed.attend(nn.remat(DecoderLayer)()(embed(target), memory))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.RNN(nn.OptimizedLSTMCell(32))(x.reshape(x.shape[0], 8, 4))[:, -1])


class Normalised(nn.Module):
    """WeightNorm and SpectralNorm walk the parameter tree by path; they do not ask for a parameter."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.WeightNorm(nn.Dense(64))(x))
        return nn.Dense(8)(nn.SpectralNorm(nn.Dense(32))(x, update_stats=True))


class ReadsVariables(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(64, name="dense")
        return nn.Dense(8)(dense(x) + x @ dense.variables["params"]["kernel"])


class Sows(nn.Module):
    """A loss term sown by a layer, an intermediate, and a counter that must count."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32)(x)
        self.sow("losses", "square", jnp.mean(x**2))
        self.sow("intermediates", "hidden", x)
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += 1
        return nn.Dense(8)(x)


def with_sown_losses(model, batch):
    loss = classify(model, batch)
    return loss + sum(jax.tree.leaves(model.variables["losses"])), {"calls": model.variables["counters"]["calls"]}


class Ensemble(nn.Module):
    """nn.vmap over members, and a parameter with partitioning metadata of the author's own."""

    @nn.compact
    def __call__(self, x):
        member = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None,
                         out_axes=0, axis_size=4)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
        return nn.Dense(8, kernel_init=init)(member(16)(x).mean(0))


class Noisy(nn.Module):
    """An RNG stream of its own name."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32)(x)
        return nn.Dense(8)(x + 0.1 * jax.random.normal(self.make_rng("noise"), x.shape))


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.BatchNorm(use_running_average=False)(nn.Dense(64)(x))
        return x + nn.Dense(32)(nn.Dropout(0.1, deterministic=False)(nn.relu(h))), None


class Scanned(nn.Module):
    """Batch statistics and dropout in a loop with remat."""

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(nn.remat(ScannedBlock), variable_axes={"params": 0, "batch_stats": 0},
                        split_rngs={"params": True, "dropout": True}, length=3)
        return nn.Dense(8)(stack()(x, None)[0])


class Frozen(nnx.Variable):
    """A variable type of the author's own: no parameter, so it is not trained."""


class Mixture(nnx.Module):
    """Experts by nnx.vmap, layers by nnx.scan, a frozen variable, a statistic written by hand, dropout."""

    def __init__(self, rngs):
        def stack(size):
            return nnx.split_rngs(splits=size)(nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs)))(rngs)

        self.gate = nnx.Linear(32, 4, rngs=rngs)
        self.experts, self.layers = stack(4), stack(3)
        self.frozen = Frozen(jnp.full((32, 32), 0.01))
        self.scale = nnx.BatchStat(jnp.ones(32))
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        scan = nnx.scan(lambda x, layer: x + nnx.relu(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = scan(x, self.layers)
        mixed = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None), out_axes=1)(self.experts, x)
        x = self.norm(jnp.einsum("be,beh->bh", nnx.softmax(self.gate(x)), mixed) + x @ self.frozen[...])
        self.scale[...] = 0.9 * self.scale[...] + 0.1 * x.mean(0)
        return self.out(self.dropout(x))


class Adapted(nnx.Module):
    """LoRA, tied reads, remat of a method."""

    def __init__(self, rngs):
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.adapter = nnx.LoRA(32, 4, 32, rngs=rngs)
        self.out = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        x = nnx.remat(lambda layer, x: nnx.relu(layer(x)))(self.first, x) + self.adapter(x)
        return self.out(self.first(x))


@dataclasses.dataclass(frozen=True)
class Case:
    model: Any
    batch: Any = dataclasses.field(default_factory=lambda: VECTORS)
    loss: Callable[..., Any] = classify
    rng_streams: tuple[str, ...] = ("dropout",)
    on_entry: tuple[str, ...] = ()


CASES = {
    "convolutional net": Case(ConvNet(), IMAGES),
    "encoder-decoder": Case(EncoderDecoder(), PAIRS, lambda m, b: cross_entropy(m(b["x"], b["t"]), b["y"])),
    "recurrent": Case(Recurrent()),
    "weight and spectral norm": Case(Normalised(), on_entry=("Dense_0/kernel", "Dense_2/kernel")),
    "reads .variables": Case(ReadsVariables()),
    "sows": Case(Sows(), loss=with_sown_losses),
    "ensemble": Case(Ensemble()),
    "own RNG stream": Case(Noisy(), rng_streams=("noise",)),
    "scanned with state": Case(Scanned()),
    "L2 over all parameters": Case(
        Noisy(), rng_streams=("noise",),
        loss=lambda m, b: classify(m, b) + 1e-3 * sum(jnp.sum(p**2) for p in jax.tree.leaves(m.variables["params"]))),
    "nnx mixture": Case(Mixture),
    "nnx LoRA": Case(Adapted),
}
