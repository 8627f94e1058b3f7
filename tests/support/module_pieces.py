"""What real modules are made of, and modules that are made of it.

A module is a stack of pieces with residuals between two dense layers. A piece is a function of (hidden, x) that is
called inside of `nn.compact`, or an NNX class made of (hidden, rngs), or a function of activations and an array of
weights.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

WIDTH = 6
LOOSE = {"own dtype"}
"""Pieces whose sums are rounded to bfloat16, and so differ with their order."""


def squares(model: Any, batch: Any) -> jax.Array:
    """Mean of squares, in float32."""
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"].astype(jnp.float32)) ** 2)


# What both flavours do with an array of weights.

@jax.custom_vjp
def halved(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product whose gradient is half of what it would be."""
    return x @ w


halved.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, out: (out @ res[1].T / 2, res[0].T @ out / 2))


def looped(x: jax.Array, w: jax.Array) -> jax.Array:
    """Twice the same weights."""
    return jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ w), x)


def normalised(x: jax.Array, w: jax.Array) -> jax.Array:
    """By what a loop of unknown length makes of the weights."""
    size = jax.lax.stop_gradient(jnp.abs(w).max().astype(jnp.float32))
    scale = jax.lax.while_loop(lambda at: at[0] > 0.3, lambda at: (at[0] / 2, at[1] / 2), (size, jnp.ones(())))[1]
    return jnp.tanh(x @ w) * scale.astype(x.dtype)


def branched(x: jax.Array, w: jax.Array) -> jax.Array:
    """One of two branches, which the values choose."""
    index = (jnp.abs(x).sum() < 0).astype(jnp.int32)
    return jax.lax.switch(index, [lambda x: jnp.tanh(x @ w), lambda x: x @ w.T], x)


def recomputed(x: jax.Array, w: jax.Array) -> jax.Array:
    """Under `jax.checkpoint`."""
    return jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)


def mapped(x: jax.Array, w: jax.Array) -> jax.Array:
    """A row at a time, under `jax.vmap`."""
    return jax.vmap(lambda row: jnp.tanh(row @ w))(x)


def routed(x: jax.Array, w: jax.Array) -> jax.Array:
    """The two largest outputs of each row alone."""
    out = x @ w
    values, indices = jax.lax.top_k(out, 2)
    return (jax.nn.one_hot(indices, out.shape[-1], dtype=out.dtype) * jnp.tanh(values)[..., None]).sum(1)


def sliced(x: jax.Array, w: jax.Array) -> jax.Array:
    """Rows, a transpose and a reduction of the weights."""
    return x @ w.T + x[:, :3] @ w[:3] + w.mean(0)[None]


def expert_products(x: jax.Array, w: jax.Array) -> jax.Array:
    """Half of the rows by one matrix, half by another."""
    half = x.shape[0] // 2
    return jnp.tanh(jax.lax.ragged_dot(x, jnp.stack([w, w.T]), jnp.array([half, x.shape[0] - half], jnp.int32)))


def fused_attention(x: jax.Array, w: jax.Array) -> jax.Array:
    """By `jax.nn.dot_product_attention`, which takes a kernel of the accelerator where there is one."""
    heads = (rows(x) @ w)[:, :, None]
    return jax.nn.dot_product_attention(heads, rows(x)[:, :, None], heads, is_causal=True)[:, :, 0].mean(1)


ARRAYS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "custom_vjp": halved, "fori_loop": looped, "while": normalised, "switch": branched, "checkpoint": recomputed,
    "jax.vmap": mapped, "top_k": routed, "slices": sliced, "ragged_dot": expert_products,
    "fused attention": fused_attention}


# Linen

class Block(nn.Module):
    """The body of a loop over layers."""

    hidden: int

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        """(The next carry, nothing)."""
        return nn.tanh(nn.Dense(self.hidden)(x)), None


class Bounded(nn.Module):
    """A layer that reads the tanh of its parameters."""

    hidden: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Of the same shape."""
        layer = nn.map_variables(nn.Dense, "params", lambda tree: jax.tree.map(jnp.tanh, tree),
                                 init=self.is_initializing())
        return layer(self.hidden)(x)


def tied(hidden: int, x: Any) -> Any:
    """A kernel that is used forward and transposed."""
    embed = nn.Embed(hidden, hidden)
    return embed.attend(nn.tanh(embed.attend(x)))


def shared(hidden: int, x: Any) -> Any:
    """One layer, called twice."""
    layer = nn.Dense(hidden)
    return layer(nn.tanh(layer(x)))


def lora(hidden: int, x: Any) -> Any:
    """A product of low rank beside a layer."""
    return nn.Dense(hidden)(x) + nn.Dense(hidden, use_bias=False)(nn.Dense(3, use_bias=False)(x))


def rows(x: Any) -> Any:
    """(rows, 3, hidden), a sequence."""
    return jnp.stack([x, -x, x / 2], 1)


def scanned(hidden: int, x: Any, **options: Any) -> Any:
    """A loop over layers or with the same one."""
    return nn.scan(Block, length=3, **options)(hidden)(x, None)[0]


LINEN: dict[str, Callable[[int, Any], Any]] = {
    "dense": lambda h, x: nn.tanh(nn.Dense(h)(x)),
    "remat": lambda h, x: nn.tanh(nn.remat(nn.Dense)(h)(x)),
    "scan": lambda h, x: scanned(h, x, variable_axes={"params": 0}, split_rngs={"params": True}),
    "scan, shared": lambda h, x: scanned(h, x, variable_broadcast="params", split_rngs={"params": False}),
    "vmap": lambda h, x: nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None,
                                 axis_size=2)(h)(x).mean(0),
    "rnn": lambda h, x: nn.RNN(nn.GRUCell(h))(rows(x)).mean(1),
    "map_variables": lambda h, x: Bounded(h)(x),
    "layer norm": lambda h, x: nn.LayerNorm()(x),
    "group norm": lambda h, x: nn.GroupNorm(num_groups=1)(x),
    "batch norm": lambda h, x: nn.BatchNorm(use_running_average=False)(x),
    "weight norm": lambda h, x: nn.WeightNorm(nn.Dense(h))(x),
    "spectral norm": lambda h, x: nn.SpectralNorm(nn.Dense(h))(x, update_stats=True),
    "dropout": lambda h, x: nn.Dropout(0.3, deterministic=False)(nn.Dense(h)(x)),
    "own dtype": lambda h, x: nn.Dense(h, dtype=jnp.bfloat16)(x).astype(x.dtype),
    "attention": lambda h, x: nn.MultiHeadDotProductAttention(1, qkv_features=h)(rows(x)).mean(1),
    "conv": lambda h, x: nn.Conv(h, (3,))(rows(x)).mean(1),
    "embed": lambda h, x: nn.Embed(11, h)(jnp.arange(x.shape[0]) % 11).astype(x.dtype),
    "tied": tied, "shared": shared, "lora": lora,
}


class Grown(nn.Module):
    """A Linen module of `pieces`."""

    pieces: tuple[str, ...]
    hidden: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Of (rows, width), (rows, 1)."""
        x = nn.Dense(self.hidden)(x)
        for number, piece in enumerate(self.pieces):
            if piece in ARRAYS:
                w = self.param(f"w{number}", nn.initializers.normal(0.3), (self.hidden, self.hidden))
                x = x + ARRAYS[piece](x, jnp.asarray(w).astype(x.dtype))
            elif piece == "sow":
                self.sow("intermediates", f"h{number}", x)
            else:
                x = x + LINEN[piece](self.hidden, x)
        return nn.Dense(1)(x)


# NNX

class Layer(nnx.Module):
    """A linear layer of a kind, and what is done with its input and output."""

    def __init__(self, make: Callable[..., Any], call: Callable[[Any, Any], Any], hidden: int, rngs: nnx.Rngs):
        self.layer, self.call = make(hidden, rngs), call

    def __call__(self, x: Any) -> Any:
        """Of the same shape."""
        return self.call(self.layer, x)


def linear(hidden: int, rngs: nnx.Rngs, **options: Any) -> nnx.Linear:
    """Square."""
    return nnx.Linear(hidden, hidden, rngs=rngs, **options)


def stack(hidden: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Three layers in one."""
    return nnx.vmap(lambda rngs: nnx.Linear(hidden, hidden, rngs=rngs), in_axes=0)(rngs.split(3))


def over_layers(layer: nnx.Linear, x: Any) -> Any:
    """A loop over a stack."""
    return nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layer)


class Pair(nnx.Module):
    """A dropout behind a layer."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.linear, self.dropout = linear(hidden, rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Of the same shape."""
        return self.dropout(self.linear(x))


class Square(nnx.Module):
    """A square parameter, handed to a function of arrays."""

    def __init__(self, function: Callable[..., Any], hidden: int, rngs: nnx.Rngs):
        self.w = nnx.Param(nnx.initializers.normal(0.3)(rngs.params(), (hidden, hidden)))
        self.function = function

    def __call__(self, x: Any) -> Any:
        """Of the same shape."""
        return self.function(x, self.w[...].astype(x.dtype))


def plain(layer: Any, x: Any) -> Any:
    """The layer, called."""
    return layer(x)


NNX: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Any]]] = {
    "dense": (linear, lambda layer, x: jnp.tanh(layer(x))),
    "remat": (linear, lambda layer, x: nnx.remat(plain)(layer, x)),
    "jit": (linear, lambda layer, x: nnx.jit(plain)(layer, x)),
    "scan": (stack, over_layers),
    "vmap": (stack, lambda layer, x: nnx.vmap(plain, in_axes=(0, None))(layer, x).mean(0)),
    "rnn": (lambda h, rngs: nnx.RNN(nnx.GRUCell(h, h, rngs=rngs)), lambda layer, x: layer(rows(x)).mean(1)),
    "layer norm": (lambda h, rngs: nnx.LayerNorm(h, rngs=rngs), plain),
    "rms norm": (lambda h, rngs: nnx.RMSNorm(h, rngs=rngs), plain),
    "batch norm": (lambda h, rngs: nnx.BatchNorm(h, rngs=rngs), plain),
    "spectral norm": (lambda h, rngs: nnx.SpectralNorm(linear(h, rngs), rngs=rngs), plain),
    "dropout": (Pair, plain),
    "own dtype": (functools.partial(linear, dtype=jnp.bfloat16), lambda layer, x: layer(x).astype(x.dtype)),
    "attention": (lambda h, rngs: nnx.MultiHeadAttention(1, h, decode=False, rngs=rngs),
                  lambda layer, x: layer(rows(x)).mean(1)),
    "conv": (lambda h, rngs: nnx.Conv(h, h, (3,), rngs=rngs), lambda layer, x: layer(rows(x)).mean(1)),
    "embed": (lambda h, rngs: nnx.Embed(11, h, rngs=rngs), lambda layer, x: layer(
        jnp.arange(x.shape[0]) % 11).astype(x.dtype)),
    "lora": (lambda h, rngs: nnx.LoRALinear(h, h, lora_rank=3, rngs=rngs), plain),
    "shared": (linear, lambda layer, x: layer(jnp.tanh(layer(x)))),
    "tied": (linear, lambda layer, x: jnp.tanh(layer(x)) @ layer.kernel.T.astype(x.dtype)),
}


class NnxGrown(nnx.Module):
    """An NNX module of `pieces`."""

    def __init__(self, pieces: tuple[str, ...], hidden: int, *, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(WIDTH, hidden, rngs=rngs), nnx.Linear(hidden, 1, rngs=rngs)
        self.layers = nnx.List([
            Square(ARRAYS[piece], hidden, rngs) if piece in ARRAYS else Layer(*NNX[piece], hidden, rngs)
            for piece in pieces])

    def __call__(self, x: Any) -> Any:
        """Of (rows, width), (rows, 1)."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


PIECES: dict[str, set[str]] = {"linen": {*LINEN, *ARRAYS, "sow"}, "nnx": {*NNX, *ARRAYS}}
