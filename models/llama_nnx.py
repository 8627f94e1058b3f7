"""LLaMA 3 and Qwen 3 in Flax NNX: the architecture, configurations and parameter count of `models.llama`.

Shapes: as there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .layers.activations import silu
from .layers.attention import split_heads
from .layers.checks import check_length
from .layers.kv_cache import Cache, cached_attention
from .layers.nnx_stack import Decoder, embedding, make_blocks, next_positions, run_blocks, run_cached
from .layers.norms import NnxRMSNorm
from .llama import (
    INIT,
    PRESETS,
    Config,
    huggingface,
    huggingface_config,
    layer_of,
    mixed,
    rotated,
    tensor_rules,
)

NUM_FIELDS = 18
"""Of `Config`, its first ones, which are all that these models have."""

__all__ = ["PRESETS", "Attention", "Block", "Config", "FeedForward", "Llama", "build", "decoder",
           "huggingface", "huggingface_config", "tensor_rules"]


class Attention(nnx.Module):
    """Grouped-query self-attention, (B, S, D) to the same."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = self.config = config
        self.q = _linear(c, c.width, c.num_heads * c.head_dim, rngs)
        self.k = _linear(c, c.width, c.num_kv_heads * c.head_dim, rngs)
        self.v = _linear(c, c.width, c.num_kv_heads * c.head_dim, rngs)
        self.proj = _linear(c, c.num_heads * c.head_dim, c.width, rngs)
        if c.qk_norm:
            self.q_norm, self.k_norm = _norm(c, c.head_dim, rngs), _norm(c, c.head_dim, rngs)

    def __call__(self, x_BxSxD: jax.Array, positions_BxS: jax.Array, segment_ids_BxS: jax.Array | None = None, *,
                 cache: Cache | None = None) -> Any:
        """What is added to the residual stream; with a cache also that, with these tokens."""
        c = self.config
        q_BxSxHxE = split_heads(self.q(x_BxSxD), c.num_heads)
        k_BxSxKxE = split_heads(self.k(x_BxSxD), c.num_kv_heads)
        v_BxSxKxE = split_heads(self.v(x_BxSxD), c.num_kv_heads)
        if c.qk_norm:
            q_BxSxHxE, k_BxSxKxE = self.q_norm(q_BxSxHxE), self.k_norm(k_BxSxKxE)
        layer = layer_of(c, 0, x_BxSxD.shape[1])
        q_BxSxHxE, k_BxSxKxE = rotated(q_BxSxHxE, k_BxSxKxE, positions_BxS, layer)
        if cache is None:
            return self.proj(mixed(c, q_BxSxHxE, k_BxSxKxE, v_BxSxKxE, segment_ids_BxS, layer))
        out, cache = cached_attention(q_BxSxHxE, k_BxSxKxE, v_BxSxKxE, cache)
        return self.proj(out), cache


class FeedForward(nnx.Module):
    """SwiGLU, (B, S, D) to the same. A layer of experts takes its place."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.gate = _linear(config, config.width, config.hidden, rngs)
        self.up = _linear(config, config.width, config.hidden, rngs)
        self.down = _linear(config, config.hidden, config.width, rngs)

    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        """What is added to the residual stream."""
        return self.down(silu(self.gate(x_BxSxD)) * self.up(x_BxSxD))


class Block(nnx.Module):
    """One pre-norm layer, (B, S, D) to the same."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.ln_1 = _norm(config, config.width, rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = _norm(config, config.width, rngs)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(self, x_BxSxD: jax.Array, positions_BxS: jax.Array, segment_ids_BxS: jax.Array | None = None, *,
                 cache: Cache | None = None) -> Any:
        """The residual stream after this layer; with a cache also that, with these tokens."""
        out = self.attn(self.ln_1(x_BxSxD), positions_BxS, segment_ids_BxS, cache=cache)
        x_BxSxD += out if cache is None else out[0]
        x_BxSxD += self.mlp(self.ln_2(x_BxSxD))
        return x_BxSxD if cache is None else (x_BxSxD, out[1])


class Llama(nnx.Module):
    """Tokens, int (B, S), to logits (B, S, V) in the dtype of the computation."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.wte = embedding(config.vocab_size, config, INIT, rngs)
        self.blocks = make_blocks(lambda rngs: Block(config, rngs=rngs), config, rngs)
        self.ln_f = _norm(config, config.width, rngs)
        if not config.tied:
            self.lm_head = embedding(config.vocab_size, config, INIT, rngs)

    def __call__(self, tokens_BxS: jax.Array, *, segment_ids: jax.Array | None = None,
                 positions: jax.Array | None = None, logits: bool = True) -> Any:
        """As in `models.llama`. Raises ValueError for more than `max_length` tokens."""
        c = self.config
        check_length(c, tokens_BxS)
        positions_BxS = jnp.arange(tokens_BxS.shape[-1])[None] if positions is None else positions
        x_BxSxD = self.ln_f(run_blocks(self.blocks, c, self.wte(tokens_BxS), positions_BxS, segment_ids))
        return self._table.attend(x_BxSxD) if logits else (x_BxSxD, self._table.embedding[...])

    def decode(self, tokens_BxS: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """(Logits, the cache with them) of tokens that follow those in `cache`, which `decoder` makes."""
        positions_BxS = next_positions(self.config, cache, tokens_BxS)
        x_BxSxD, cache = run_cached(self.blocks, self.config, self.wte(tokens_BxS), cache, positions_BxS)
        return self._table.attend(self.ln_f(x_BxSxD)), cache

    @property
    def _table(self) -> nnx.Embed:
        return self.wte if self.config.tied else self.lm_head


def build(config: Config) -> Callable[[nnx.Rngs], Llama]:
    """A function of `rngs` that builds the model, so that its parameters can be initialised sharded.

    Raises ValueError for fields that only `models.llama` has.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind in ("dynamic", "longrope"):
        raise ValueError(f"rope_scaling is {scaling.kind}: llama_nnx has no frequencies that follow the length of a "
                         "text: take llama, which has.")
    for field in dataclasses.fields(Config)[NUM_FIELDS:]:
        if field.name != "family" and getattr(config, field.name) != field.default:
            raise ValueError(f"{field.name}={getattr(config, field.name)}: llama_nnx has LLaMA 3 and Qwen 3 only: take "
                             "llama, which has this.")
    return lambda rngs: Llama(config, rngs=rngs)


def decoder(config: Config, length: int | None = None) -> Decoder:
    """How the model generates, as in `models.gpt2`."""
    return Decoder(config, length=length or config.max_length, num_heads=config.num_kv_heads,
                   head_dim=config.head_dim)


def _linear(config: Config, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=config.dtype, kernel_init=INIT, rngs=rngs)


def _norm(config: Config, width: int, rngs: nnx.Rngs) -> NnxRMSNorm:
    return NnxRMSNorm(width, epsilon=config.epsilon, dtype=config.dtype, rngs=rngs)
