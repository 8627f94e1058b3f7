"""BERT (arXiv 1810.04805), RoBERTa and DistilBERT with their masked-language heads, in Flax Linen.

BERT-Large is what the LAMB paper trains.

A module of models has `PRESETS`, configurations by name, and `build(config)`, which returns a model. This one has a
`loss` of its own, for batches with masked tokens.

Shapes: B batch, S sequence, D width, F hidden width of the feed-forward, H heads, E head dim, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .bert_names import huggingface, huggingface_config, huggingface_fields
from .layers.activations import exact_gelu
from .layers.attention import Implementation, attention, split_heads
from .layers.checks import check_at_least_one, check_length, check_multiple, check_share
from .layers.linen_stack import run_blocks
from .layers.losses import weighted_mean
from .layers.norms import LayerNorm

__all__ = ["Bert", "Block", "Config", "PRESETS", "build", "huggingface", "huggingface_config", "huggingface_fields",
           "loss", "tensor_rules"]


@dataclasses.dataclass(frozen=True)
class Config:
    """An encoder with learned positions, token types and norms after each addition; the output table is the embedding.

    hidden: width of the feed-forward. dropout: of the embeddings and of what is added to the residual stream, not of
    attention. num_types: of tokens; 0: none (DistilBERT). offset: the row of the first position, one after the padding
    token's (RoBERTa, whose positions count the tokens that are no padding). init_range: standard deviation of the
    matrices and tables at the start; 0.02 suits the published widths.
    dtype, attention, scan_layers, remat: as in `models.llama`.

    Raises ValueError for invalid sizes.
    """

    num_layers: int
    width: int
    num_heads: int
    hidden: int
    vocab_size: int = 30522
    max_length: int = 512
    num_types: int = 2
    offset: int = 0
    epsilon: float = 1e-12
    dropout: float = 0.0
    init_range: float = 0.02
    dtype: DTypeLike | None = None
    attention: Implementation = None
    scan_layers: bool = True
    remat: bool = False

    def __post_init__(self):
        check_at_least_one(self, "num_layers", "width", "num_heads", "hidden", "vocab_size", "max_length")
        check_multiple(self, "width", "num_heads")
        check_share(self, "dropout")
        check_share(self, "init_range")

    @property
    def init(self) -> nn.initializers.Initializer:
        """Of matrices and tables."""
        return nn.initializers.normal(self.init_range)

    @property
    def num_params(self) -> int:
        """Number of parameters, exactly, without a pooler."""
        layer = 4 * self.width**2 + 2 * self.width * self.hidden + 9 * self.width + self.hidden
        embeddings = (self.vocab_size + self.max_length + self.offset + self.num_types + 2) * self.width
        return self.num_layers * layer + embeddings + self.width**2 + 3 * self.width + self.vocab_size


class Block(nn.Module):
    """One post-norm layer, (B, S, D) to the same; the None is for `nn.scan`."""

    config: Config
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, segment_ids_BxS: jax.Array | None) -> tuple[jax.Array, None]:
        """The residual stream after this layer."""
        c = self.config
        norm = functools.partial(LayerNorm, epsilon=c.epsilon, dtype=c.dtype)
        dense = functools.partial(nn.Dense, dtype=c.dtype, kernel_init=c.init)
        dropout = nn.Dropout(c.dropout, deterministic=self.deterministic)
        q, k, v = (split_heads(dense(c.width, name=name)(x_BxSxD), c.num_heads) for name in "qkv")
        segment_ids = None if segment_ids_BxS is None else (segment_ids_BxS, segment_ids_BxS)
        mixed = attention(q, k, v, causal=False, segment_ids=segment_ids, implementation=c.attention)
        x_BxSxD = norm(name="ln_1")(x_BxSxD + dropout(dense(c.width, name="proj")(mixed)))
        hidden_BxSxF = exact_gelu(dense(c.hidden, name="up")(x_BxSxD))
        return norm(name="ln_2")(x_BxSxD + dropout(dense(c.width, name="down")(hidden_BxSxF))), None


class Bert(nn.Module):
    """Tokens, int (B, S), to logits of the masked-language head, (B, S, V), in the dtype of the computation."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BxS: jax.Array, *, token_types: jax.Array | None = None,
                 segment_ids: jax.Array | None = None, positions: jax.Array | None = None,
                 deterministic: bool | None = None) -> jax.Array:
        """Every token attends to all of its segment.

        token_types: int (B, S), 0 or 1 for the first or second sentence; None: 0. segment_ids: int (B, S), the document
        of each packed token, with a number of its own for padding. positions: int (B, S), its place in that.
        deterministic: as in `models.gpt2`.

        Raises ValueError for more than `max_length` tokens.
        """
        c = self.config
        check_length(c, tokens_BxS)
        if deterministic is None:
            deterministic = not self.has_rng("dropout")
        embed = functools.partial(nn.Embed, features=c.width, dtype=c.dtype, embedding_init=c.init)
        norm = functools.partial(LayerNorm, epsilon=c.epsilon, dtype=c.dtype)
        wte = embed(c.vocab_size, name="wte")
        positions_BxS = jnp.arange(tokens_BxS.shape[-1])[None] if positions is None else positions
        if c.offset and positions is None:
            is_text_BxS = tokens_BxS != c.offset - 1
            positions_BxS = jnp.cumsum(is_text_BxS, axis=-1) * is_text_BxS - 1
        x_BxSxD = wte(tokens_BxS) + embed(c.max_length + c.offset, name="wpe")(positions_BxS + c.offset)
        if c.num_types:
            types_BxS = jnp.zeros_like(tokens_BxS) if token_types is None else token_types
            x_BxSxD += embed(c.num_types, name="types")(types_BxS)
        x_BxSxD = norm(name="ln_embed")(x_BxSxD)
        x_BxSxD = nn.Dropout(c.dropout, deterministic=deterministic)(x_BxSxD)
        x_BxSxD = run_blocks(Block, (c, deterministic), x_BxSxD, segment_ids, remat=c.remat)
        x_BxSxD = exact_gelu(nn.Dense(c.width, dtype=c.dtype, kernel_init=c.init, name="head")(x_BxSxD))
        bias_V = self.param("head_bias", nn.initializers.zeros, (c.vocab_size,))
        logits_BxSxV = wte.attend(norm(name="ln_head")(x_BxSxD))
        return logits_BxSxV + bias_V[None, None].astype(logits_BxSxV.dtype)


def build(config: Config) -> Bert:
    """The model of `config`."""
    return Bert(config)


OPTIONAL = ("token_types", "segment_ids", "positions")
"""Inputs that a batch may have beside its tokens."""


def loss(model: Any, batch: Any) -> Any:
    """Mean cross entropy of `targets` (B, S) where `weights` (B, S) are not 0: those that were masked in `inputs`.

    Returns (mean, {}, sum of the weights), so that microbatches weigh by their masked tokens.
    """
    given = {name: batch[name] for name in OPTIONAL if name in batch}
    logits_BxSxV = model(batch["inputs"], **given).astype(jnp.float32)
    losses_BxS = optax.softmax_cross_entropy_with_integer_labels(logits_BxSxV, batch["targets"])
    return weighted_mean(losses_BxS, batch["weights"].astype(jnp.float32))


def batch_shapes(config: Config, rows: int, length: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """What `loss` takes, abstract; length: of the sequences, None: the longest."""
    shape = (rows, length or config.max_length)
    return {"inputs": jax.ShapeDtypeStruct(shape, jnp.int32), "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
            "weights": jax.ShapeDtypeStruct(shape, jnp.float32)}


def tensor_rules(config: Config) -> list[tuple[str, Any, int | None]]:
    """How the axis `tensor` shards parameters, as in Megatron-LM: pattern, spec of the last dims, heads or None."""
    return [
        ("/[qkv]/kernel", (None, "tensor"), config.num_heads), ("/[qkv]/bias", ("tensor",), config.num_heads),
        ("proj/kernel", ("tensor", None), config.num_heads),
        ("up/kernel", (None, "tensor"), None), ("up/bias", ("tensor",), None), ("down/kernel", ("tensor", None), None),
        ("wte/embedding", ("tensor", None), None), ("head_bias", ("tensor",), None)]


PRESETS: dict[str, Config] = {
    "tiny": Config(2, 64, 4, 128, vocab_size=256, max_length=64),
    # Bytes, and the special tokens that zero_jax.data gives them
    "bytes": Config(4, 128, 4, 512, vocab_size=384),
    "base": Config(12, 768, 12, 3072),
    # The LAMB paper (arXiv 1904.00962), and the seeds of ZeRO's
    "large": Config(24, 1024, 16, 4096, remat=True),
}
