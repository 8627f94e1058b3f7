"""Activation functions that save one array for backward: their slope.

Differentiated step by step, GELU saves four arrays of the hidden width: in bfloat16 24 bytes more per element of a
layer's inputs, where all that a layer has to save is 34 (arXiv 2205.05198, 4.1).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


def saving_its_slope(fun: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """`fun`, which is elementwise, with the same values and derivative."""

    @jax.custom_jvp
    def elementwise(x: jax.Array) -> jax.Array:
        return fun(x)

    @elementwise.defjvp
    def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x,), (tangent,) = primals, tangents
        value, slope = jax.jvp(fun, (x,), (jnp.ones_like(x),))
        return value, slope * tangent

    return elementwise


gelu = saving_its_slope(jax.nn.gelu)
"""By tanh, as GPT-2 and T5 have it."""
exact_gelu = saving_its_slope(functools.partial(jax.nn.gelu, approximate=False))
"""By erf, as BERT and ViT have it."""
silu = saving_its_slope(jax.nn.silu)
