"""T5 (arXiv 1910.10683) in Flax Linen: 1.0, whose 11B is the largest, and 1.1 with gated feed-forwards.

A module of models has `PRESETS`, configurations by name, and `build(config)`, which returns a model. This one has a
`loss` of its own, for batches of two texts.

Shapes: B batch, S sequence of the decoder or of either, T sequence of the encoder, D width, F hidden width of the
feed-forward, H heads, E head dim, V vocabulary, R buckets of relative positions.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from .layers.activations import gelu
from .layers.attention import Implementation, attention, split_heads
from .layers.checks import check_at_least_one, check_share
from .layers.linen_stack import run_blocks
from .layers.losses import weighted_mean
from .layers.norms import RMSNorm
from .t5_names import huggingface, huggingface_config, huggingface_fields

__all__ = ["Block", "Config", "PRESETS", "Stack", "T5", "batch_shapes", "build", "huggingface", "huggingface_config",
           "huggingface_fields", "loss", "tensor_rules"]

EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Config:
    """An encoder and a decoder with biases by relative position, RMSNorm, and no other biases.

    num_layers: of the encoder, and of the decoder. hidden: width of the feed-forward. gated: a feed-forward with two
    kernels and GELU in place of ReLU, and an output table of its own (version 1.1). buckets, max_distance: of relative
    positions; beyond that distance all share a bucket. dropout: of the embeddings and of what is added to the residual
    stream. max_length: of the texts in pre-training; the model has no limit. dtype, attention, scan_layers, remat: as
    in `models.llama`.

    Raises ValueError for invalid sizes.
    """

    num_layers: int
    width: int
    num_heads: int
    hidden: int
    head_dim: int = 64
    gated: bool = False
    vocab_size: int = 32128
    buckets: int = 32
    max_distance: int = 128
    max_length: int = 512
    dropout: float = 0.0
    dtype: DTypeLike | None = None
    attention: Implementation = None
    scan_layers: bool = True
    remat: bool = False

    def __post_init__(self):
        check_at_least_one(self, "num_layers", "width", "num_heads", "hidden", "head_dim", "vocab_size", "max_length")
        if self.buckets < 4 or self.buckets % 4 or self.max_distance <= self.buckets // 2:
            raise ValueError(f"buckets={self.buckets} must be a multiple of 4, and max_distance={self.max_distance} "
                             "more than half of it.")
        check_share(self, "dropout")

    @property
    def num_params(self) -> int:
        """Number of parameters, exactly. A tied output layer counts once."""
        attention = 4 * self.width * self.num_heads * self.head_dim + self.width
        feed_forward = (2 + self.gated) * self.width * self.hidden + self.width
        layers = self.num_layers * (3 * attention + 2 * feed_forward)
        tables = (1 + self.gated) * self.vocab_size * self.width + 2 * self.buckets * self.num_heads
        return layers + tables + 2 * self.width


def relative_buckets(config: Config, num_queries: int, num_keys: int, *, causal: bool) -> np.ndarray:
    """The bucket of each key's position less a query's, int32 (queries + keys - 1), from 1 - queries on.

    Near positions have a bucket each, those from a half (or a quarter, in both directions) of the buckets on share them
    by logarithm.
    """
    distance = np.arange(1 - num_queries, num_keys)
    buckets, first = config.buckets, np.zeros_like(distance)
    if causal:
        distance = np.maximum(-distance, 0)
    else:
        buckets //= 2
        first, distance = buckets * (distance > 0), np.abs(distance)
    exact = buckets // 2
    with np.errstate(divide="ignore"):
        far = np.log(distance.astype(np.float32) / exact) / np.float32(math.log(config.max_distance / exact))
    far = exact + np.maximum(far * (buckets - exact), 0).astype(np.int32)
    return (first + np.where(distance < exact, distance, np.minimum(far, buckets - 1))).astype(np.int32)


def relative_bias(table_RxH: jax.Array, config: Config, length: int, *, causal: bool) -> jax.Array:
    """What relative positions add to the scores of all layers of a stack and of all examples, (1, H, S, S)."""
    distance_SxS = jnp.arange(length)[None] - jnp.arange(length)[:, None] + length - 1
    bucket_SxS = jnp.asarray(relative_buckets(config, length, length, causal=causal))[distance_SxS]
    return jnp.moveaxis(table_RxH[bucket_SxS], -1, 0)[None]


class Attention(nn.Module):
    """Attention of (B, S, D) to itself or to another (B, T, D), without a scale: it is in the initial values."""

    config: Config
    causal: bool = False

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, y_BxTxD: jax.Array, segment_ids: tuple[jax.Array, jax.Array] | None,
                 bias_1xHxSxT: jax.Array | None = None) -> jax.Array:
        """What is added to the residual stream."""
        c = self.config
        size = c.num_heads * c.head_dim
        q = _dense(c, size, _init(c.width * c.head_dim), "q")(x_BxSxD)
        k, v = (_dense(c, size, _init(c.width), name)(y_BxTxD) for name in "kv")
        q, k, v = (split_heads(each, c.num_heads) for each in (q, k, v))
        out = attention(q, k, v, causal=self.causal, segment_ids=segment_ids, bias=bias_1xHxSxT, scale=1.0,
                        implementation=c.attention)
        return _dense(c, c.width, _init(size), "proj")(out)


class FeedForward(nn.Module):
    """ReLU, or gated GELU, (B, S, D) to the same. A layer of experts takes its place."""

    config: Config

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        """What is added to the residual stream."""
        c = self.config
        hidden_BxSxF = _dense(c, c.hidden, _init(c.width), "up")(x_BxSxD)
        if c.gated:
            hidden_BxSxF *= gelu(_dense(c, c.hidden, _init(c.width), "gate")(x_BxSxD))
        else:
            hidden_BxSxF = nn.relu(hidden_BxSxF)
        return _dense(c, c.width, _init(c.hidden), "down")(hidden_BxSxF)


class Block(nn.Module):
    """One pre-norm layer, (B, S, D) to the same; the None is for `nn.scan`. A decoder's looks at the encoder's text."""

    config: Config
    is_decoder: bool
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, bias_1xHxSxS: jax.Array, segment_ids_BxS: jax.Array | None,
                 memory_BxTxD: jax.Array | None, memory_ids_BxT: jax.Array | None) -> tuple[jax.Array, None]:
        """The residual stream after this layer."""
        c = self.config
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        own_ids = None if segment_ids_BxS is None else (segment_ids_BxS, segment_ids_BxS)
        y_BxSxD = _norm(c, "ln_1")(x_BxSxD)
        x_BxSxD += dropout(Attention(c, self.is_decoder, name="attn")(y_BxSxD, y_BxSxD, own_ids, bias_1xHxSxS))
        if self.is_decoder:
            assert memory_BxTxD is not None
            ids = None if segment_ids_BxS is None or memory_ids_BxT is None else (segment_ids_BxS, memory_ids_BxT)
            x_BxSxD += dropout(Attention(c, name="cross")(_norm(c, "ln_cross")(x_BxSxD), memory_BxTxD, ids))
        return x_BxSxD + dropout(FeedForward(c, name="mlp")(_norm(c, "ln_2")(x_BxSxD))), None


class Stack(nn.Module):
    """The encoder, or the decoder: embedded tokens, (B, S, D), to features of that shape."""

    config: Config
    is_decoder: bool
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, segment_ids_BxS: jax.Array | None, memory_BxTxD: jax.Array | None = None,
                 memory_ids_BxT: jax.Array | None = None) -> jax.Array:
        """The features, normalised."""
        c = self.config
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        x_BxSxD = dropout(x_BxSxD)
        table = nn.Embed(c.buckets, c.num_heads, dtype=c.dtype, embedding_init=_init(c.width), name="relative_bias")
        bias = relative_bias(table.embedding.astype(x_BxSxD.dtype), c, x_BxSxD.shape[1], causal=self.is_decoder)
        x_BxSxD = run_blocks(Block, (c, self.is_decoder, self.deterministic), x_BxSxD, bias, segment_ids_BxS,
                             memory_BxTxD, memory_ids_BxT, remat=c.remat)
        return dropout(_norm(c, "ln_f")(x_BxSxD))


class T5(nn.Module):
    """Tokens of two texts, int (B, T) and (B, S), to logits of the second, (B, S, V), in the computation's dtype."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array, decoder_tokens_BxS: jax.Array, *, segment_ids: jax.Array | None = None,
                 decoder_segment_ids: jax.Array | None = None, deterministic: bool | None = None) -> jax.Array:
        """The decoder's tokens are its targets, one place later.

        segment_ids, decoder_segment_ids: int (B, T) and (B, S), the example of each packed token, with a number of its
        own for padding; both or neither. deterministic: as in `models.gpt2`.

        Raises ValueError for one of the two without the other.
        """
        c = self.config
        if (segment_ids is None) != (decoder_segment_ids is None):
            raise ValueError("segment_ids and decoder_segment_ids belong together: give both, or neither.")
        if deterministic is None:
            deterministic = not self.has_rng("dropout")
        embed = nn.Embed(c.vocab_size, c.width, dtype=c.dtype, embedding_init=nn.initializers.normal(1.0), name="wte")
        memory = Stack(c, False, deterministic, name="encoder")(embed(tokens_BxT), segment_ids)
        x_BxSxD = Stack(c, True, deterministic, name="decoder")(
            embed(decoder_tokens_BxS), decoder_segment_ids, memory, segment_ids)
        if c.gated:
            return nn.Embed(c.vocab_size, c.width, dtype=c.dtype, embedding_init=nn.initializers.normal(1.0),
                            name="lm_head").attend(x_BxSxD)
        return embed.attend(x_BxSxD * c.width**-0.5)


def build(config: Config) -> T5:
    """The model of `config`."""
    return T5(config)


def loss(model: Any, batch: Any) -> Any:
    """Mean cross entropy of `targets` (B, S) after `inputs` (B, T) and `decoder_inputs` (B, S), by `weights` (B, S).

    Without weights each target counts. Returns (mean, {}, sum of the weights), so that microbatches weigh by them.
    """
    given = {name: batch[name] for name in ("segment_ids", "decoder_segment_ids") if name in batch}
    logits_BxSxV = model(batch["inputs"], batch["decoder_inputs"], **given).astype(jnp.float32)
    losses_BxS = optax.softmax_cross_entropy_with_integer_labels(logits_BxSxV, batch["targets"])
    return weighted_mean(losses_BxS, batch["weights"].astype(jnp.float32) if "weights" in batch else
                         jnp.ones_like(losses_BxS))


def batch_shapes(config: Config, rows: int, length: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """What `loss` takes, abstract; length: of the encoder's texts. The decoder's are a quarter of it."""
    length = length or config.max_length
    tokens = jax.ShapeDtypeStruct((rows, max(length // 4, 1)), jnp.int32)
    return {"inputs": jax.ShapeDtypeStruct((rows, length), jnp.int32), "decoder_inputs": tokens, "targets": tokens}


def tensor_rules(config: Config) -> list[tuple[str, Any, int | None]]:
    """How the axis `tensor` shards parameters, as in Megatron-LM: pattern, spec of the last dims, heads or None."""
    columns, rows, heads = (None, "tensor"), ("tensor", None), config.num_heads
    return [("(attn|cross)/[qkv]/kernel", columns, heads), ("(attn|cross)/proj/kernel", rows, heads),
            ("mlp/(up|gate)/kernel", columns, None), ("mlp/down/kernel", rows, None),
            ("(wte|lm_head)/embedding", rows, None)]


def _init(inputs: int) -> nn.initializers.Initializer:
    """Mesh TensorFlow's: the variance is one over the number of inputs."""
    return nn.initializers.normal(inputs**-0.5)


def _dense(config: Config, features: int, init: nn.initializers.Initializer, name: str) -> nn.Dense:
    return nn.Dense(features, use_bias=False, dtype=config.dtype, kernel_init=init, name=name)


def _norm(config: Config, name: str) -> RMSNorm:
    return RMSNorm(epsilon=EPSILON, dtype=config.dtype, name=name)


_gated = functools.partial(Config, gated=True, remat=True)

PRESETS: dict[str, Config] = {
    "tiny": Config(2, 64, 4, 128, head_dim=16, vocab_size=256, max_length=64),
    # Bytes, and the special tokens that zero_jax.data gives them
    "bytes": Config(3, 128, 4, 512, head_dim=32, vocab_size=384),
    # Version 1.0 (Table 14 of the paper): 3b and 11b have more and wider heads than their width
    "small": Config(6, 512, 8, 2048),
    "base": Config(12, 768, 12, 3072),
    "large": Config(24, 1024, 16, 4096, remat=True),
    "3b": Config(24, 1024, 32, 16384, head_dim=128, remat=True),
    "11b": Config(24, 1024, 128, 65536, head_dim=128, remat=True),
    # Version 1.1
    "1.1-small": _gated(8, 512, 6, 1024),
    "1.1-base": _gated(12, 768, 12, 2048),
    "1.1-large": _gated(24, 1024, 16, 2816),
    "1.1-xl": _gated(24, 2048, 32, 5120),
    "1.1-xxl": _gated(24, 4096, 64, 10240),
}
