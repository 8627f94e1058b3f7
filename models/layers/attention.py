"""Dot-product attention on heads: grouped queries, packed documents, biases.

Shapes: B batch, S queries, T keys, H query heads, K key-value heads (H is a multiple), E head dim.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Implementation = Literal["xla", "cudnn"] | Callable[..., jax.Array] | None
"""The kernel: XLA's (also None), cuDNN's, or a function `fun(q, k, v, *, causal, segment_ids, bias, scale)` of arrays
as `attention` takes them, which returns (B, S, H, E)."""


def attention(q_BxSxHxE: jax.Array, k_BxTxKxE: jax.Array, v_BxTxKxE: jax.Array, *, causal: bool,
              segment_ids: tuple[jax.Array, jax.Array] | None = None, bias: jax.Array | None = None,
              scale: float | None = None, window: Any = None, softcap: float | None = None,
              implementation: Implementation = None) -> jax.Array:
    """The mixed values, (B, S, H x E) in the dtype of the queries. `remat=("attention",)` saves them.

    segment_ids: int (B, S) of the queries and (B, T) of the keys: a token attends where both are equal, so that packed
    documents do not see each other, and tokens not padding. bias: broadcastable to (B, H, S, T), added to the scores.
    scale: of the scores; None: 1 / sqrt(E). window: query i does not see keys before i - window + 1; may be traced.
    softcap: scores become softcap * tanh(scores / softcap), before the bias.

    Raises ValueError for a softcap with another implementation than XLA's.
    """
    dtype = q_BxSxHxE.dtype
    if softcap is not None and implementation not in (None, "xla"):
        raise ValueError(f"softcap={softcap}: only XLA's attention caps scores: leave the attention kernel out.")
    if isinstance(window, int) and window >= k_BxTxKxE.shape[1]:
        window = None
    near_SxT = None if window is None else _distances(q_BxSxHxE.shape[1], k_BxTxKxE.shape[1]) < window
    if callable(implementation):
        if near_SxT is not None:
            far = jnp.where(near_SxT, 0.0, jnp.finfo(dtype).min / 2).astype(dtype)[None, None]
            bias = far if bias is None else bias + far
        out_BxSxHxE = implementation(
            q_BxSxHxE, k_BxTxKxE, v_BxTxKxE, causal=causal, segment_ids=segment_ids, bias=bias, scale=scale)
        return _joined(out_BxSxHxE)
    mask_Bx1xSxT = None if segment_ids is None else (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None])
    if near_SxT is not None:
        near = near_SxT[None, None]
        mask_Bx1xSxT = near if mask_Bx1xSxT is None else mask_Bx1xSxT & near
    if dtype == jnp.float16 and implementation != "cudnn":
        # In float16 JAX's attention requests a matrix product that only NVIDIA GPUs have.
        q_BxSxHxE, k_BxTxKxE, v_BxTxKxE = (
            each.astype(jnp.float32) for each in (q_BxSxHxE, k_BxTxKxE, v_BxTxKxE))
    if softcap is not None:
        out_BxSxHxE = _capped(q_BxSxHxE, k_BxTxKxE, v_BxTxKxE, causal, bias, mask_Bx1xSxT, scale, softcap)
    else:
        out_BxSxHxE = jax.nn.dot_product_attention(
            q_BxSxHxE, k_BxTxKxE, v_BxTxKxE, bias=bias, mask=mask_Bx1xSxT, is_causal=causal, scale=scale,
            implementation=implementation)
    return _joined(out_BxSxHxE.astype(dtype))


def _distances(num_queries: int, num_keys: int) -> jax.Array:
    """How far before its query a key is, int32 (S, T)."""
    return jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)[None]


def _capped(q_BxSxHxE: jax.Array, k_BxTxKxE: jax.Array, v_BxTxKxE: jax.Array, causal: bool, bias: jax.Array | None,
            mask_Bx1xSxT: jax.Array | None, scale: float | None, softcap: float) -> jax.Array:
    """As JAX's attention, with capped scores; these and the softmax are in float32."""
    (batch, num_queries, num_heads, head_dim), (_, num_keys, num_kv_heads, _) = q_BxSxHxE.shape, k_BxTxKxE.shape
    q_BxSxKxGxE = q_BxSxHxE.reshape(batch, num_queries, num_kv_heads, -1, head_dim)
    scores = jnp.einsum("bskge,btke->bkgst", q_BxSxKxGxE, k_BxTxKxE, preferred_element_type=jnp.float32)
    scores = softcap * jnp.tanh(scores * ((head_dim ** -0.5 if scale is None else scale) / softcap))
    scores = scores.reshape(batch, num_heads, num_queries, num_keys)
    if bias is not None:
        scores += bias.astype(jnp.float32)
    if causal:
        seen = (_distances(num_queries, num_keys) >= 0)[None, None]
        mask_Bx1xSxT = seen if mask_Bx1xSxT is None else mask_Bx1xSxT & seen
    if mask_Bx1xSxT is not None:
        scores = jnp.where(mask_Bx1xSxT, scores, jnp.finfo(jnp.float32).min / 2)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BxTxKxE.dtype)
    weights = weights.reshape(batch, num_kv_heads, -1, num_queries, num_keys)
    return jnp.einsum("bkgst,btke->bskge", weights, v_BxTxKxE).reshape(q_BxSxHxE.shape)


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """(B, S, H x E) as (B, S, H, E)."""
    return x.reshape(*x.shape[:2], num_heads, -1)


def _joined(out_BxSxHxE: jax.Array) -> jax.Array:
    return checkpoint_name(out_BxSxHxE.reshape(*out_BxSxHxE.shape[:2], -1), "attention")
