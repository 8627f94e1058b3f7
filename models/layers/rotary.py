"""Rotary position embedding (arXiv 2104.09864), with the scaling of LLaMA 3.1's frequencies for longer texts.

Shapes: B batch, S sequence, H heads, E head dim. Halves of a head are rotated against each other, as in Hugging Face's
checkpoints; Meta's own have the pairs interleaved.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """LLaMA 3.1's: wavelengths beyond original_max_length / low_factor are `factor` times longer.

    Those under original_max_length / high_factor stay, and between them it is interpolated.
    """

    factor: float = 8.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_max_length: int = 8192


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians per position of each pair, float32 (E / 2)."""
    frequency = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    if scaling is not None:
        turns = scaling.original_max_length * frequency / (2 * math.pi)  # in the original length
        smooth = np.clip((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor), 0, 1)
        frequency = frequency * (smooth + (1 - smooth) / scaling.factor)
    return frequency.astype(np.float32)


def rotate(x_BxSxHxE: jax.Array, positions_BxS: jax.Array, frequency: np.ndarray) -> jax.Array:
    """`x` rotated by its positions (int, 1 or B rows), computed in float32, in the dtype of `x`."""
    angle_BxSx1xF = (positions_BxS[..., None].astype(jnp.float32) * frequency[None, None])[:, :, None]
    cos, sin = jnp.cos(angle_BxSx1xF), jnp.sin(angle_BxSx1xF)
    first, second = jnp.split(x_BxSxHxE.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BxSxHxE.dtype)
