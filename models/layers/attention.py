"""Dot-product attention on heads: grouped queries, packed documents, biases, and the kernel that computes it.

Shapes: B batch, S queries, T keys, H query heads, K key-value heads (H is a multiple), E head dim.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Implementation = Literal["xla", "cudnn"] | None
"""The kernel: None takes cuDNN's flash attention where this process computes on an NVIDIA GPU and it can, else XLA."""

MAX_CUDNN_HEAD_DIM = 128
"""Of cuDNN before Hopper; later GPUs take 256."""


def attention(q_BxSxHxE: jax.Array, k_BxTxKxE: jax.Array, v_BxTxKxE: jax.Array, *, causal: bool,
              segment_ids: tuple[jax.Array, jax.Array] | None = None, bias: jax.Array | None = None,
              scale: float | None = None, implementation: Implementation = None) -> jax.Array:
    """The mixed values, (B, S, H x E) in the dtype of the queries. `remat=("attention",)` saves them.

    segment_ids: int (B, S) of the queries and (B, T) of the keys: a token attends where both are equal, so that packed
    documents do not see each other, and tokens not padding. bias: broadcastable to (B, H, S, T), added to the scores.
    scale: of the scores; None: 1 / sqrt(E).
    """
    mask_Bx1xSxT = None if segment_ids is None else (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None])
    dtype = q_BxSxHxE.dtype
    chosen = _chosen(q_BxSxHxE, bias) if implementation is None else implementation
    if dtype == jnp.float16 and chosen == "xla":
        # In float16 JAX's attention requests a matrix product that only NVIDIA GPUs have.
        q_BxSxHxE, k_BxTxKxE, v_BxTxKxE = (
            each.astype(jnp.float32) for each in (q_BxSxHxE, k_BxTxKxE, v_BxTxKxE))
    out_BxSxHxE = jax.nn.dot_product_attention(
        q_BxSxHxE, k_BxTxKxE, v_BxTxKxE, bias=bias, mask=mask_Bx1xSxT, is_causal=causal, scale=scale,
        implementation=chosen)
    return checkpoint_name(out_BxSxHxE.reshape(*out_BxSxHxE.shape[:2], -1).astype(dtype), "attention")


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """(B, S, H x E) as (B, S, H, E)."""
    return x.reshape(*x.shape[:2], num_heads, -1)


def _chosen(q: jax.Array, bias: jax.Array | None) -> Literal["xla", "cudnn"]:
    """XLA also for biases, whose gradient cuDNN gives for few shapes."""
    fits = q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] <= MAX_CUDNN_HEAD_DIM and q.shape[-1] % 8 == 0
    even = q.shape[1] % 2 == 0  # a mask becomes a bias of cuDNN's, which wants even lengths
    return "cudnn" if bias is None and fits and even and jax.default_backend() == "gpu" else "xla"
