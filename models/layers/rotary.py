"""Rotary position embedding (arXiv 2104.09864), with frequencies scaled for longer texts, of a part of each head too.

Shapes: B batch, S sequence, H heads, E head dim, F pairs that are rotated: E / 2 or fewer. Halves of what is rotated
are rotated against each other, as in Hugging Face's checkpoints; Meta's own have the pairs interleaved.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How frequencies are scaled for texts longer than the original_max_length of pre-training.

    kind: "llama3": wavelengths beyond original_max_length / low_factor are `factor` times longer, those under
    original_max_length / high_factor stay, and between them it is interpolated. "linear": all are `factor` times
    longer. "dynamic": theta grows with a text beyond original_max_length (NTK). "yarn" (arXiv 2309.00071): pairs of
    fewer turns than beta_slow in the original length are `factor` times longer, those of more than beta_fast stay;
    truncate: these limits are whole pairs. "longrope" (arXiv 2402.13753): each pair has a factor, of long_factors for
    texts beyond original_max_length, else of short_factors. attention_factor: by which rotated queries and keys are
    multiplied.
    """

    factor: float = 8.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_max_length: int = 8192
    kind: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = "llama3"
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None = None, length: int = 0) -> np.ndarray:
    """Radians per position of each pair, float32 (rotary_dim / 2). length: of the text, in tokens."""
    powers = np.arange(0, rotary_dim, 2) / rotary_dim
    plain = 1.0 / theta ** powers
    return (plain if scaling is None else _SCALED[scaling.kind](scaling, plain, theta, powers, length)).astype(
        np.float32)


def _llama3(scaling: RopeScaling, plain: np.ndarray, theta: float, powers: np.ndarray, length: int) -> np.ndarray:
    turns = scaling.original_max_length * plain / (2 * math.pi)  # in the original length
    smooth = np.clip((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor), 0, 1)
    return plain * (smooth + (1 - smooth) / scaling.factor)


def _linear(scaling: RopeScaling, plain: np.ndarray, theta: float, powers: np.ndarray, length: int) -> np.ndarray:
    return plain / scaling.factor


def _dynamic(scaling: RopeScaling, plain: np.ndarray, theta: float, powers: np.ndarray, length: int) -> np.ndarray:
    longer = max(length / scaling.original_max_length, 1.0)
    dim = 2 * len(powers)
    return 1.0 / (theta * (scaling.factor * longer - (scaling.factor - 1)) ** (dim / (dim - 2))) ** powers


def _yarn(scaling: RopeScaling, plain: np.ndarray, theta: float, powers: np.ndarray, length: int) -> np.ndarray:
    dim = 2 * len(powers)

    def pair(turns: float) -> float:
        """The pair with so many turns in the original length."""
        return dim * math.log(scaling.original_max_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slow = np.clip((np.arange(len(powers)) - low) / ((high - low) or 0.001), 0, 1)
    return plain / scaling.factor * slow + plain * (1 - slow)


def _longrope(scaling: RopeScaling, plain: np.ndarray, theta: float, powers: np.ndarray, length: int) -> np.ndarray:
    is_long = length > scaling.original_max_length
    return plain / np.array(scaling.long_factors if is_long else scaling.short_factors)


_SCALED: dict[str, Callable[..., np.ndarray]] = {
    "llama3": _llama3, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope}


def rotate(x_BxSxHxE: jax.Array, positions_BxS: jax.Array, frequency: Any, amplitude: Any = 1.0) -> jax.Array:
    """`x` rotated by its positions (int, 1 or B rows), computed in float32, in the dtype of `x`.

    frequency: float32 (F,): the first 2 F of a head are rotated, and the others stay. amplitude: what is rotated is
    multiplied by it. Both may be traced.
    """
    angle_BxSx1xF = (positions_BxS[..., None].astype(jnp.float32) * frequency[None, None])[:, :, None]
    cos, sin = jnp.cos(angle_BxSx1xF), jnp.sin(angle_BxSx1xF)
    if not isinstance(amplitude, float) or amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    rotated = 2 * frequency.shape[-1]
    first, second = jnp.split(x_BxSxHxE[..., :rotated].astype(jnp.float32), 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rotated < x_BxSxHxE.shape[-1]:
        parts.append(x_BxSxHxE[..., rotated:].astype(jnp.float32))
    return jnp.concatenate(parts, -1).astype(x_BxSxHxE.dtype)
