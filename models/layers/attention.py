"""Dot-product attention on heads: grouped queries, packed documents, biases.

Shapes: B batch, S queries, T keys, H query heads, K key-value heads (H is a multiple), E head dim.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Implementation = Literal["xla", "cudnn"] | Callable[..., jax.Array] | None
"""The kernel: XLA's (also None), cuDNN's, or a function `fun(q, k, v, *, causal, segment_ids, bias, scale)` of arrays
as `attention` takes them, which returns (B, S, H, E)."""


def attention(q_BxSxHxE: jax.Array, k_BxTxKxE: jax.Array, v_BxTxKxE: jax.Array, *, causal: bool,
              segment_ids: tuple[jax.Array, jax.Array] | None = None, bias: jax.Array | None = None,
              scale: float | None = None, implementation: Implementation = None) -> jax.Array:
    """The mixed values, (B, S, H x E) in the dtype of the queries. `remat=("attention",)` saves them.

    segment_ids: int (B, S) of the queries and (B, T) of the keys: a token attends where both are equal, so that packed
    documents do not see each other, and tokens not padding. bias: broadcastable to (B, H, S, T), added to the scores.
    scale: of the scores; None: 1 / sqrt(E).
    """
    dtype = q_BxSxHxE.dtype
    if callable(implementation):
        out_BxSxHxE = implementation(
            q_BxSxHxE, k_BxTxKxE, v_BxTxKxE, causal=causal, segment_ids=segment_ids, bias=bias, scale=scale)
        return _joined(out_BxSxHxE)
    mask_Bx1xSxT = None if segment_ids is None else (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None])
    if dtype == jnp.float16 and implementation != "cudnn":
        # In float16 JAX's attention requests a matrix product that only NVIDIA GPUs have.
        q_BxSxHxE, k_BxTxKxE, v_BxTxKxE = (
            each.astype(jnp.float32) for each in (q_BxSxHxE, k_BxTxKxE, v_BxTxKxE))
    out_BxSxHxE = jax.nn.dot_product_attention(
        q_BxSxHxE, k_BxTxKxE, v_BxTxKxE, bias=bias, mask=mask_Bx1xSxT, is_causal=causal, scale=scale,
        implementation=implementation)
    return _joined(out_BxSxHxE.astype(dtype))


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """(B, S, H x E) as (B, S, H, E)."""
    return x.reshape(*x.shape[:2], num_heads, -1)


def _joined(out_BxSxHxE: jax.Array) -> jax.Array:
    return checkpoint_name(out_BxSxHxE.reshape(*out_BxSxHxE.shape[:2], -1), "attention")
