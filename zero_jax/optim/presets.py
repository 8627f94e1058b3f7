"""The optimizers that the command line offers, with the bytes of state that each keeps for a parameter."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax


def _adafactor(learning_rate: Any, weight_decay: Any) -> optax.GradientTransformation:
    # Its own decay does not follow the schedule; AdamW's does, and so does this one.
    return optax.chain(
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate))


def _sgd(learning_rate: Any, weight_decay: Any) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate, momentum=0.9))


OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": optax.adamw,  # 8 bytes for each parameter, at fp32
    "adamw-bf16-momentum": functools.partial(optax.adamw, mu_dtype=jnp.bfloat16),  # 6
    "adafactor": _adafactor,  # a row and a column of each matrix; 4 where a matrix is small
    "lion": optax.lion,  # 4
    "lion-bf16-momentum": functools.partial(optax.lion, mu_dtype=jnp.bfloat16),  # 2
    "sgd-momentum": _sgd,  # 4
    "lamb": optax.lamb,  # 8
}
"""By name, each a function of `learning_rate` and `weight_decay`. optax has no 8-bit states, but bf16 and factors."""
