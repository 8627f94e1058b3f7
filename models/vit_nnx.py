"""The Vision Transformer in Flax NNX: the architecture, configurations and parameter count of `models.vit`.

Shapes: as there.
"""

import functools
from collections.abc import Callable

import jax
from flax import nnx

from .layers.activations import exact_gelu
from .layers.attention import attention, split_heads
from .layers.nnx_stack import dropout, make_blocks, run_blocks
from .layers.norms import NnxLayerNorm
from .vit import (
    EPSILON,
    FIRST,
    INIT,
    POSITIONS,
    PRESETS,
    Config,
    batch_shapes,
    check_images,
    huggingface,
    huggingface_config,
    loss,
    tensor_rules,
    tokens_of,
)

__all__ = ["Block", "Config", "PRESETS", "ViT", "batch_shapes", "build", "huggingface", "huggingface_config", "loss",
           "tensor_rules"]


class Block(nnx.Module):
    """One pre-norm layer, (B, S, D) to the same."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = self.config = config
        linear = functools.partial(nnx.Linear, dtype=c.dtype, kernel_init=INIT, rngs=rngs)
        self.ln_1 = _norm(c, rngs)
        self.q, self.k, self.v, self.proj = (linear(c.width, c.width) for _ in range(4))
        self.ln_2 = _norm(c, rngs)
        self.up, self.down = linear(c.width, c.hidden), linear(c.hidden, c.width)
        self.dropout = dropout(c, rngs)

    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        """The residual stream after this layer."""
        c, y_BxSxD = self.config, self.ln_1(x_BxSxD)
        q, k, v = (split_heads(linear(y_BxSxD), c.num_heads) for linear in (self.q, self.k, self.v))
        x_BxSxD += self.dropout(self.proj(attention(q, k, v, causal=False, implementation=c.attention)))
        return x_BxSxD + self.dropout(self.down(exact_gelu(self.up(self.ln_2(x_BxSxD)))))


class ViT(nnx.Module):
    """Images, float (B, I, I, channels), to logits (B, C) in the dtype of the computation.

    It owns RNG state if there is dropout, and none otherwise.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = self.config = config
        size = (c.patch_size, c.patch_size)
        self.patches = nnx.Conv(c.channels, c.width, size, size, padding="VALID", dtype=c.dtype, kernel_init=FIRST,
                                rngs=rngs)
        self.class_token = nnx.Param(nnx.initializers.zeros(rngs.params(), (1, 1, c.width)))
        self.positions = nnx.Param(POSITIONS(rngs.params(), (1, c.num_tokens, c.width)))
        self.dropout = dropout(c, rngs)
        self.blocks = make_blocks(lambda rngs: Block(c, rngs=rngs), c, rngs)
        self.ln_f = _norm(c, rngs)
        self.head = nnx.Linear(c.width, c.num_classes, dtype=c.dtype, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Dropout is active unless `eval()` was called. Raises ValueError for images of another size."""
        c = self.config
        check_images(c, images)
        x_BxSxD = self.dropout(tokens_of(self.patches(images), self.class_token[...], self.positions[...]))
        x_BxSxD = run_blocks(self.blocks, c, x_BxSxD)
        return self.head(self.ln_f(x_BxSxD)[:, 0])


def build(config: Config) -> Callable[[nnx.Rngs], ViT]:
    """A function of `rngs` that builds the model, so that its parameters can be initialised sharded."""
    return lambda rngs: ViT(config, rngs=rngs)


def _norm(config: Config, rngs: nnx.Rngs) -> NnxLayerNorm:
    return NnxLayerNorm(config.width, epsilon=EPSILON, dtype=config.dtype, rngs=rngs)
