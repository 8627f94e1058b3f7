"""GPT-2 in Flax NNX: the same architecture, configurations and parameter count as `models.gpt2`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .gpt2 import EPSILON, INIT, PRESETS, Config, attention, heads, residual_init, tensor_rules
from .gpt2_names import huggingface, huggingface_config
from .layers.activations import gelu
from .layers.checks import check_length
from .layers.kv_cache import Cache, cached_attention
from .layers.nnx_stack import Decoder, dropout, embedding, make_blocks, next_positions, run_blocks, run_cached
from .layers.norms import NnxLayerNorm

__all__ = ["GPT2", "PRESETS", "Block", "Config", "build", "decoder", "huggingface", "huggingface_config",
           "tensor_rules"]


class Block(nnx.Module):
    """One pre-norm layer, (batch, seq, width) to the same."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        width, dtype = config.width, config.dtype
        norm = functools.partial(NnxLayerNorm, width, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.config = config
        self.ln_1 = norm()
        self.qkv = linear(width, 3 * width, kernel_init=INIT)
        self.proj = linear(width, width, kernel_init=residual_init(config))
        self.ln_2 = norm()
        self.up = linear(width, 4 * width, kernel_init=INIT)
        self.down = linear(4 * width, width, kernel_init=residual_init(config))
        self.dropout = dropout(config, rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None, *, cache: Cache | None = None) -> Any:
        """The residual stream after this layer; with a cache also that, with these tokens."""
        qkv = self.qkv(self.ln_1(x))
        if cache is None:
            return self._after(x, attention(qkv, self.config, segment_ids))
        mixed, cache = cached_attention(*heads(qkv, self.config), cache)
        return self._after(x, mixed), cache

    def _after(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        x = x + self.dropout(self.proj(mixed))
        return x + self.dropout(self.down(gelu(self.up(self.ln_2(x)))))


class GPT2(nnx.Module):
    """Tokens, int (batch, seq), to logits (batch, seq, vocab) in the dtype of the computation.

    It owns RNG state if there is dropout, and none otherwise.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.wte = embedding(config.vocab_size, config, INIT, rngs)
        self.wpe = embedding(config.max_length, config, INIT, rngs)
        self.dropout = dropout(config, rngs)
        self.blocks = make_blocks(lambda rngs: Block(config, rngs=rngs), config, rngs)
        self.ln_f = NnxLayerNorm(config.width, epsilon=EPSILON, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, *, segment_ids: jax.Array | None = None, positions: jax.Array | None = None,
                 logits: bool = True) -> Any:
        """Dropout is active unless `eval()` was called. segment_ids, positions, logits: as in `models.gpt2`.

        Raises ValueError for more than `max_length` tokens.
        """
        c = self.config
        check_length(c, tokens)
        positions = jnp.arange(tokens.shape[-1])[None] if positions is None else positions
        x = self.dropout(self.wte(tokens) + self.wpe(positions))
        x = run_blocks(self.blocks, c, x, segment_ids)
        return self.wte.attend(self.ln_f(x)) if logits else (self.ln_f(x), self.wte.embedding[...])

    def decode(self, tokens: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """(Logits, the cache with them) of tokens that follow those in `cache`, which `decoder` makes."""
        x = self.dropout(self.wte(tokens) + self.wpe(next_positions(self.config, cache, tokens)))
        x, cache = run_cached(self.blocks, self.config, x, cache)
        return self.wte.attend(self.ln_f(x)), cache


def build(config: Config) -> Callable[[nnx.Rngs], GPT2]:
    """A function of `rngs` that builds the model, so that its parameters can be initialised sharded."""
    return lambda rngs: GPT2(config, rngs=rngs)


def decoder(config: Config, length: int | None = None) -> Decoder:
    """How the model generates, as in `models.gpt2`."""
    return Decoder(config, length=length or config.max_length, num_heads=config.num_heads,
                   head_dim=config.width // config.num_heads)
