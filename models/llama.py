"""LLaMA 3 (arXiv 2407.21783) and Qwen 3 (arXiv 2505.09388) in Flax Linen, in their released sizes.

A module of models has `PRESETS`, configurations by name, and `build(config)`, which returns a model.

Shapes: B batch, S sequence, D width, F hidden width of the feed-forward, H heads, K key-value heads, E head dim, V
vocabulary. `x_BxSxD` is an array of these dims.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .layers.activations import silu
from .layers.attention import Implementation, attention, split_heads
from .layers.checks import check_at_least_one, check_multiple
from .layers.kv_cache import attention_with_variables
from .layers.norms import RMSNorm
from .layers.rotary import RopeScaling, frequencies, rotate
from .llama_names import huggingface, huggingface_config

__all__ = ["PRESETS", "Attention", "Block", "Config", "FeedForward", "Llama", "RopeScaling", "build", "decoder",
           "huggingface", "huggingface_config", "tensor_rules"]

INIT = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder with rotary positions, grouped-query attention, RMSNorm and SwiGLU, without biases.

    num_kv_heads: shared by num_heads / num_kv_heads query heads each. hidden: width of the feed-forward. rope_scaling:
    LLaMA 3.1's; None: none. qk_norm: queries and keys are normalised in each head, as in Qwen 3. tied: the output layer
    is the embedding. epsilon: of the norms. dtype: of the computation; None: that of the parameters. attention: its
    kernel. That, scan_layers and remat are as in `models.gpt2`.

    Raises ValueError for invalid sizes.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    head_dim: int = 128
    vocab_size: int = 128256
    max_length: int = 8192
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    tied: bool = False
    epsilon: float = 1e-5
    dtype: DTypeLike | None = None
    attention: Implementation = None
    scan_layers: bool = True
    remat: bool = False

    def __post_init__(self):
        check_at_least_one(self, "num_layers", "width", "num_heads", "num_kv_heads", "hidden", "head_dim",
                           "vocab_size", "max_length")
        check_multiple(self, "num_heads", "num_kv_heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: rotary positions rotate pairs.")

    @property
    def num_params(self) -> int:
        """Number of parameters, exactly. A tied output layer counts once."""
        attention = 2 * self.width * self.head_dim * (self.num_heads + self.num_kv_heads)
        norms = 2 * self.width + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.width * self.hidden + norms
        return self.num_layers * layer + self.width + (2 - self.tied) * self.vocab_size * self.width


def check_length(config: Config, tokens: jax.Array) -> None:
    """Raises ValueError for more tokens than the model is made for."""
    if tokens.shape[-1] > config.max_length:
        raise ValueError(f"{tokens.shape[-1]} tokens are more than max_length={config.max_length}.")


def rotated(config: Config, q: jax.Array, k: jax.Array, positions_BxS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and keys with their rotary positions."""
    turn = functools.partial(rotate, positions_BxS=positions_BxS,
                             frequency=frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
    return turn(q), turn(k)


def mixed(config: Config, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids_BxS: jax.Array | None) -> jax.Array:
    """Causal attention of rotated heads, (B, S, H or K, E), giving (B, S, H x E)."""
    segment_ids = None if segment_ids_BxS is None else (segment_ids_BxS, segment_ids_BxS)
    return attention(q, k, v, causal=True, segment_ids=segment_ids, implementation=config.attention)


class Attention(nn.Module):
    """Grouped-query self-attention, (B, S, D) to the same. cache_length: as in `Llama`."""

    config: Config
    cache_length: int = 0

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, positions_BxS: jax.Array, segment_ids_BxS: jax.Array | None) -> jax.Array:
        """What is added to the residual stream."""
        c = self.config
        dense = functools.partial(nn.Dense, use_bias=False, dtype=c.dtype, kernel_init=INIT)
        norm = functools.partial(RMSNorm, epsilon=c.epsilon, dtype=c.dtype)
        q_BxSxHxE = split_heads(dense(c.num_heads * c.head_dim, name="q")(x_BxSxD), c.num_heads)
        k_BxSxKxE = split_heads(dense(c.num_kv_heads * c.head_dim, name="k")(x_BxSxD), c.num_kv_heads)
        v_BxSxKxE = split_heads(dense(c.num_kv_heads * c.head_dim, name="v")(x_BxSxD), c.num_kv_heads)
        if c.qk_norm:
            q_BxSxHxE, k_BxSxKxE = norm(name="q_norm")(q_BxSxHxE), norm(name="k_norm")(k_BxSxKxE)
        q_BxSxHxE, k_BxSxKxE = rotated(c, q_BxSxHxE, k_BxSxKxE, positions_BxS)
        if self.cache_length:
            out = attention_with_variables(self, q_BxSxHxE, k_BxSxKxE, v_BxSxKxE, self.cache_length)
        else:
            out = mixed(c, q_BxSxHxE, k_BxSxKxE, v_BxSxKxE, segment_ids_BxS)
        return dense(c.width, name="proj")(out)


class FeedForward(nn.Module):
    """SwiGLU, (B, S, D) to the same. A layer of experts takes its place."""

    config: Config

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        """What is added to the residual stream."""
        c = self.config
        dense = functools.partial(nn.Dense, use_bias=False, dtype=c.dtype, kernel_init=INIT)
        hidden_BxSxF = silu(dense(c.hidden, name="gate")(x_BxSxD)) * dense(c.hidden, name="up")(x_BxSxD)
        return dense(c.width, name="down")(hidden_BxSxF)


class Block(nn.Module):
    """One pre-norm layer, (B, S, D) to the same; the None is for `nn.scan`. cache_length: as in `Llama`."""

    config: Config
    cache_length: int = 0

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, positions_BxS: jax.Array, segment_ids_BxS: jax.Array | None
                 ) -> tuple[jax.Array, None]:
        """The residual stream after this layer."""
        c = self.config
        norm = functools.partial(RMSNorm, epsilon=c.epsilon, dtype=c.dtype)
        attend = Attention(c, self.cache_length, name="attn")
        x_BxSxD += attend(norm(name="ln_1")(x_BxSxD), positions_BxS, segment_ids_BxS)
        return x_BxSxD + FeedForward(c, name="mlp")(norm(name="ln_2")(x_BxSxD)), None


class Llama(nn.Module):
    """Tokens, int (B, S), to logits (B, S, V) in the dtype of the computation.

    cache_length: above 0, the tokens follow those of earlier calls, whose keys and values are in the collection
    `cache`: at most so many in all.
    """

    config: Config
    cache_length: int = 0

    @nn.compact
    def __call__(self, tokens_BxS: jax.Array, *, segment_ids: jax.Array | None = None,
                 positions: jax.Array | None = None, logits: bool = True) -> Any:
        """segment_ids: int (B, S), the document of each packed token; positions: int (B, S), its place in that.

        logits: False returns their factors: features (B, S, D) and the table (V, D).

        Raises ValueError for more than `max_length` tokens.
        """
        c = self.config
        check_length(c, tokens_BxS)
        if self.cache_length:
            length = self.variable("cache", "length", jnp.zeros, (), jnp.int32)
            positions = length.value + jnp.arange(tokens_BxS.shape[-1])[None]
            length.value += tokens_BxS.shape[-1]
        positions_BxS = jnp.arange(tokens_BxS.shape[-1])[None] if positions is None else positions
        embed = nn.Embed(c.vocab_size, c.width, dtype=c.dtype, embedding_init=INIT, name="wte")
        x_BxSxD = embed(tokens_BxS)
        block = nn.remat(Block, prevent_cse=not c.scan_layers) if c.remat and not self.cache_length else Block
        if c.scan_layers:
            stack = nn.scan(block, variable_axes={"params": 0, "cache": 0}, split_rngs={"params": True},
                            in_axes=(nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
                            length=c.num_layers)
            x_BxSxD, _ = stack(c, self.cache_length, name="blocks")(x_BxSxD, positions_BxS, segment_ids)
        else:
            for layer in range(c.num_layers):
                x_BxSxD, _ = block(c, self.cache_length, name=f"blocks_{layer}")(x_BxSxD, positions_BxS, segment_ids)
        x_BxSxD = RMSNorm(epsilon=c.epsilon, dtype=c.dtype, name="ln_f")(x_BxSxD)
        table = embed if c.tied else nn.Embed(
            c.vocab_size, c.width, dtype=c.dtype, embedding_init=INIT, name="lm_head")
        return table.attend(x_BxSxD) if logits else (x_BxSxD, table.embedding)


def build(config: Config) -> Llama:
    """The model of `config`."""
    return Llama(config)


def decoder(config: Config, length: int | None = None) -> Llama:
    """The model as it generates, as in `models.gpt2`."""
    return Llama(config, cache_length=length or config.max_length)


def tensor_rules(config: Config) -> list[tuple[str, Any, int | None]]:
    """How the axis `tensor` shards parameters, as in Megatron-LM: pattern, spec of the last dims, heads or None."""
    columns, rows = (None, "tensor"), ("tensor", None)
    return [("attn/q/kernel", columns, config.num_heads), ("attn/[kv]/kernel", columns, config.num_kv_heads),
            ("attn/proj/kernel", rows, config.num_heads), ("mlp/(gate|up)/kernel", columns, None),
            ("mlp/down/kernel", rows, None), ("(wte|lm_head)/embedding", rows, None)]


def _llama(num_layers: int, width: int, num_heads: int, hidden: int, **changes: Any) -> Config:
    return Config(num_layers, width, num_heads, 8, hidden, remat=True, **changes)


def _qwen3(num_layers: int, width: int, num_heads: int, hidden: int, tied: bool) -> Config:
    return Config(num_layers, width, num_heads, 8, hidden, vocab_size=151936, max_length=40960, rope_theta=1e6,
                  qk_norm=True, tied=tied, epsilon=1e-6, remat=True)


_LONG: dict[str, Any] = {"max_length": 131072, "rope_scaling": RopeScaling()}
_SMALL: dict[str, Any] = {"max_length": 131072, "rope_scaling": RopeScaling(32.0), "tied": True}

# Published sizes: the config.json of each checkpoint at meta-llama/ and Qwen/.
PRESETS: dict[str, Config] = {
    "tiny": Config(2, 64, 4, 2, 128, head_dim=16, vocab_size=256, max_length=64, rope_theta=1e4),
    "bytes": Config(2, 192, 4, 2, 512, head_dim=48, vocab_size=256, max_length=512, rope_theta=1e4, tied=True),
    # To be trained on a laptop: scripts/training/language_model.py.
    "11m": Config(6, 384, 6, 2, 1024, head_dim=64, vocab_size=4096, max_length=1024, rope_theta=1e4, tied=True),
    "3-8b": _llama(32, 4096, 32, 14336),
    "3-70b": _llama(80, 8192, 64, 28672),
    "3.1-8b": _llama(32, 4096, 32, 14336, **_LONG),
    "3.1-70b": _llama(80, 8192, 64, 28672, **_LONG),
    "3.1-405b": _llama(126, 16384, 128, 53248, **_LONG),
    "3.2-1b": _llama(16, 2048, 32, 8192, head_dim=64, **_SMALL),
    "3.2-3b": _llama(28, 3072, 24, 8192, **_SMALL),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, False),
}
