"""ResNet (arXiv 1512.03385) in Flax Linen, version 1.5: the 3 x 3 convolution of a block has the stride.

A module of models has `PRESETS`, configurations by name, and `build(config)`, which returns a model. This one has a
`loss` of its own, for batches of images.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .layers.checks import check_at_least_one
from .layers.losses import classification_loss as loss
from .resnet_names import huggingface, huggingface_config, huggingface_fields

__all__ = ["Bottleneck", "Config", "PRESETS", "ResNet", "batch_shapes", "build", "huggingface", "huggingface_config",
           "huggingface_fields", "loss"]

MOMENTUM = 0.9
EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Config:
    """A residual network of bottleneck blocks.

    blocks: their number in each stage; a stage has twice the channels of the one before, and half the height and
    width. width: channels inside the blocks of the first stage; four times as many come out. dtype: of the
    computation; None: that of the parameters and images.

    Raises ValueError for invalid sizes.
    """

    blocks: tuple[int, ...]
    width: int = 64
    num_classes: int = 1000
    dtype: DTypeLike | None = None

    def __post_init__(self):
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"blocks={self.blocks} must be one or more stages of at least 1 block.")
        check_at_least_one(self, "width", "num_classes")


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut, which is a convolution where the shape changes."""

    width: int
    stride: int
    conv: Callable[..., Any]
    norm: Callable[..., Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, height, width, channels) to 4 x `width` channels, `stride` times smaller."""
        y = nn.relu(self.norm()(self.conv(self.width, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.width, (3, 3), self.stride, padding=1)(y)))
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = self.norm(name="shortcut_norm")(self.conv(4 * self.width, (1, 1), self.stride, name="shortcut")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images, float (batch, height, width, 3), to logits (batch, classes) in the dtype of the computation."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool = True) -> jax.Array:
        """`train`: with the statistics of this batch, which also move the running ones; else with the running ones."""
        c = self.config
        conv = functools.partial(nn.Conv, use_bias=False, dtype=c.dtype, kernel_init=nn.initializers.he_normal())
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=MOMENTUM, epsilon=EPSILON, dtype=c.dtype)
        x = nn.relu(norm(name="stem_norm")(conv(c.width, (7, 7), 2, padding=3, name="stem")(images)))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]
        for stage, blocks in enumerate(c.blocks):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = Bottleneck(c.width * 2**stage, stride, conv, norm, name=f"stage_{stage}_block_{block}")(x)
        return nn.Dense(c.num_classes, dtype=c.dtype, name="head")(jnp.mean(x, (1, 2)))


def build(config: Config) -> ResNet:
    """The model of `config`."""
    return ResNet(config)


def batch_shapes(config: Config, rows: int, length: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """What `loss` takes, abstract, with ImageNet's 224 x 224 pixels; length: of no meaning here."""
    return {"inputs": jax.ShapeDtypeStruct((rows, 224, 224, 3), jnp.float32),
            "targets": jax.ShapeDtypeStruct((rows,), jnp.int32)}


PRESETS: dict[str, Config] = {
    "tiny": Config((1, 1), width=8, num_classes=8),
    "digits": Config((1, 1), width=16, num_classes=10),
    "resnet50": Config((3, 4, 6, 3)),
}
