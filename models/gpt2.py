"""GPT-2 in Flax Linen, in its released sizes and those of the ZeRO paper (arXiv 1910.02054).

A module of models has `PRESETS`, configurations by name, and `build(config)`, which returns a model.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .gpt2_names import huggingface, huggingface_config, huggingface_fields
from .layers import attention as kernels
from .layers.activations import gelu
from .layers.attention import Implementation
from .layers.checks import check_at_least_one, check_length, check_multiple, check_share
from .layers.kv_cache import attention_with_variables
from .layers.linen_stack import run_blocks
from .layers.norms import LayerNorm

__all__ = ["GPT2", "PRESETS", "Block", "Config", "build", "decoder", "huggingface", "huggingface_config",
           "huggingface_fields", "tensor_rules"]

INIT = nn.initializers.normal(0.02)
EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder with learned positions, tied embeddings and a feed-forward width of 4 x `width`.

    dropout: of the embeddings and of what is added to the residual stream, not of attention.
    dtype: of the computation; None: that of the parameters.
    attention: its kernel (`layers.attention`), or a function such as `zero_jax.attention(mesh)`.
    scan_layers: one `nn.scan` over stacked blocks, so that compile time does not grow with depth.
    remat: save only each block's input for the backward pass.

    Raises ValueError for invalid sizes.
    """

    num_layers: int
    width: int
    num_heads: int
    vocab_size: int = 50257
    max_length: int = 1024
    dropout: float = 0.0
    dtype: DTypeLike | None = None
    attention: Implementation = None
    scan_layers: bool = True
    remat: bool = False

    def __post_init__(self):
        check_at_least_one(self, "num_layers", "width", "num_heads", "vocab_size", "max_length")
        check_multiple(self, "width", "num_heads")
        check_share(self, "dropout")

    @property
    def num_params(self) -> int:
        """Number of parameters, exactly. The output layer is the embedding and counts once."""
        embeddings = (self.vocab_size + self.max_length) * self.width
        matrices = 12 * self.num_layers * self.width**2
        biases_and_norms = (13 * self.num_layers + 2) * self.width
        return embeddings + matrices + biases_and_norms


def heads(qkv: jax.Array, config: Config) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values, (batch, seq, heads, head dim), of (batch, seq, 3 x width).

    Columns are ordered (head, q | k | v, head dim), as in Megatron, so that sharding them splits no head. GPT-2's
    released weights have q | k | v outermost.
    """
    batch, seq, _ = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(batch, seq, config.num_heads, 3, -1), 3, 0)
    return q, k, v


def attention(qkv: jax.Array, config: Config, segment_ids: jax.Array | None) -> jax.Array:
    """Causal self-attention of (batch, seq, 3 x width), giving (batch, seq, width)."""
    documents = None if segment_ids is None else (segment_ids, segment_ids)
    return kernels.attention(
        *heads(qkv, config), causal=True, segment_ids=documents, implementation=config.attention)


def residual_init(config: Config) -> nn.initializers.Initializer:
    """GPT-2's initializer for the two projections of each layer that add to the residual stream."""
    return nn.initializers.normal(0.02 / math.sqrt(2 * config.num_layers))


class Block(nn.Module):
    """One pre-norm layer, (batch, seq, width) to the same; the None is for `nn.scan`."""

    config: Config
    deterministic: bool
    cache_length: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> tuple[jax.Array, None]:
        """The residual stream after this layer."""
        c = self.config
        norm = functools.partial(LayerNorm, epsilon=EPSILON, dtype=c.dtype)
        dense = functools.partial(nn.Dense, dtype=c.dtype)
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        qkv = dense(3 * c.width, kernel_init=INIT, name="qkv")(norm(name="ln_1")(x))
        if self.cache_length:
            mixed = attention_with_variables(self, *heads(qkv, c), self.cache_length)
        else:
            mixed = attention(qkv, c, segment_ids)
        x = x + dropout(dense(c.width, kernel_init=residual_init(c), name="proj")(mixed))
        hidden = gelu(dense(4 * c.width, kernel_init=INIT, name="up")(norm(name="ln_2")(x)))
        return x + dropout(dense(c.width, kernel_init=residual_init(c), name="down")(hidden)), None


class GPT2(nn.Module):
    """Tokens, int (batch, seq), to logits (batch, seq, vocab) in the dtype of the computation.

    cache_length: above 0, the tokens follow those of earlier calls, whose keys and values are in the collection
    `cache`: at most so many in all.
    """

    config: Config
    cache_length: int = 0

    @nn.compact
    def __call__(self, tokens: jax.Array, *, segment_ids: jax.Array | None = None, positions: jax.Array | None = None,
                 deterministic: bool | None = None, logits: bool = True) -> Any:
        """`deterministic`: without dropout; None: if no "dropout" stream is given.

        segment_ids: int (batch, seq), the document of each packed token; positions: int (batch, seq), its place in
        that. logits: False returns their factors: features (batch, seq, width) and the embedding (vocab, width).

        Raises ValueError for more than `max_length` tokens.
        """
        c = self.config
        check_length(c, tokens)
        if deterministic is None:
            deterministic = not self.has_rng("dropout")
        embed = functools.partial(nn.Embed, features=c.width, dtype=c.dtype, embedding_init=INIT)
        wte = embed(c.vocab_size, name="wte")
        if self.cache_length:
            length = self.variable("cache", "length", jnp.zeros, (), jnp.int32)
            positions = length.value + jnp.arange(tokens.shape[-1])[None]
            length.value += tokens.shape[-1]
        positions = jnp.arange(tokens.shape[-1])[None] if positions is None else positions
        x = wte(tokens) + embed(c.max_length, name="wpe")(positions)
        x = nn.Dropout(c.dropout, deterministic=deterministic)(x)
        x = run_blocks(Block, (c, deterministic, self.cache_length), x, segment_ids,
                       remat=c.remat and not self.cache_length)
        x = LayerNorm(epsilon=EPSILON, dtype=c.dtype, name="ln_f")(x)
        return wte.attend(x) if logits else (x, wte.embedding)


def build(config: Config) -> GPT2:
    """The model of `config`."""
    return GPT2(config)


def decoder(config: Config, length: int | None = None) -> GPT2:
    """The model as it generates: with a cache of keys and values of `length` tokens, from the same parameters.

    length: of prompt and new tokens; default: `max_length`.
    """
    return GPT2(config, cache_length=length or config.max_length)


def tensor_rules(config: Config) -> list[tuple[str, Any, int | None]]:
    """How the axis `tensor` shards parameters, as in Megatron-LM: pattern, spec of the last dims, heads or None."""
    return [
        ("qkv/kernel", (None, "tensor"), config.num_heads), ("qkv/bias", ("tensor",), config.num_heads),
        ("proj/kernel", ("tensor", None), config.num_heads),
        ("up/kernel", (None, "tensor"), None), ("up/bias", ("tensor",), None), ("down/kernel", ("tensor", None), None),
        ("wte/embedding", ("tensor", None), None)]


def _paper(num_layers: int, width: int, num_heads: int) -> Config:
    return Config(num_layers, width, num_heads, remat=True)


# Sizes as the paper names them; where two of its shapes share a name, the shape follows. Heads are
# the ZeRO run's (11b to 13b have 10b's). The paper checkpoints every block, so these remat.
PRESETS: dict[str, Config] = {
    "tiny": Config(2, 64, 4, vocab_size=256, max_length=64),
    "bytes": Config(2, 192, 4, vocab_size=256, max_length=512),
    "124m": Config(12, 768, 12),
    "355m": Config(24, 1024, 16),
    "774m": Config(36, 1280, 20),
    # Fig. 2. The released GPT-2 XL is 1.5b with 25 heads.
    "1.5b": _paper(48, 1600, 16),
    "8b": _paper(72, 3072, 24),
    "20b": _paper(98, 4096, 32),
    "40b": _paper(88, 6144, 32),
    "60b": _paper(132, 6144, 32),
    "80b": _paper(100, 8192, 64),
    "100b": _paper(125, 8192, 64),
    "120b": _paper(150, 8192, 64),
    "140b": _paper(175, 8192, 64),
    "170b": _paper(212, 8192, 64),
    # Fig. 3
    "60b-75x8192": _paper(75, 8192, 32),
    # Fig. 4; its 8B is Fig. 2's
    "1.16b": _paper(24, 1920, 16),
    "1.38b": _paper(40, 1536, 16),
    "1.5b-34x1920": _paper(34, 1920, 16),
    "2.5b": _paper(54, 1920, 16),
    "4b": _paper(64, 2304, 24),
    "6b": _paper(52, 3072, 24),
    "10b": _paper(50, 4096, 32),
    "11b": _paper(54, 4096, 32),
    "12b": _paper(58, 4096, 32),
    "13b": _paper(62, 4096, 32),
    # Fig. 5: Turing-NLG
    "17b": _paper(78, 4256, 28),
    # Fig. 6; its 60B and 140B are Fig. 2's
    "40b-50x8192": _paper(50, 8192, 32),
    "50b": _paper(62, 8192, 32),
    "150b": _paper(187, 8192, 64),
    # GPT-3's 6.7B (arXiv 2005.14165, Table 2.1), not a model of the paper
    "6.7b": Config(32, 4096, 32, max_length=2048, remat=True),
    # Section 9: the trillion parameters of the paper's title
    "1t": _paper(128, 25600, 200),
    # Sizes of ZeRO-Infinity (arXiv 2104.07857); the shapes are ours: 12 x layers x width^2, heads of 128
    "10t": _paper(200, 65536, 512),
    "32t": _paper(203, 114688, 896),
}
