"""Keys and values of the tokens so far, so that the next ones are computed alone.

Shapes: B batch, S new tokens, T tokens that a cache holds at most, H query heads, K key-value heads, E head dim.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .attention import attention


class Cache(NamedTuple):
    """Of one layer, or of stacked ones with a leading dim. length: the tokens that are in it, int32."""

    keys_BxTxKxE: jax.Array
    values_BxTxKxE: jax.Array
    length: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any) -> "Cache":
        """shape: (B, T, K, E)."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))


def cached_attention(q_BxSxHxE: jax.Array, k_BxSxKxE: jax.Array, v_BxSxKxE: jax.Array, cache: Cache, *,
                     window: Any = None, scale: float | None = None, softcap: float | None = None
                     ) -> tuple[jax.Array, Cache]:
    """(Causal attention of new tokens to themselves and those before, (B, S, H x E); the cache with them).

    window, scale, softcap: as in `attention`.
    """
    keys, values = (jax.lax.dynamic_update_slice_in_dim(before, new.astype(before.dtype), cache.length, axis=1)
                    for before, new in ((cache.keys_BxTxKxE, k_BxSxKxE), (cache.values_BxTxKxE, v_BxSxKxE)))
    new = q_BxSxHxE.shape[1]
    distance_SxT = (cache.length + jnp.arange(new))[:, None] - jnp.arange(keys.shape[1])[None]
    seen_SxT = distance_SxT >= 0 if window is None else (distance_SxT >= 0) & (distance_SxT < window)
    dtype = q_BxSxHxE.dtype
    bias = jnp.where(seen_SxT, 0.0, jnp.finfo(dtype).min).astype(dtype)[None, None]
    out = attention(q_BxSxHxE, keys, values, causal=False, bias=bias, scale=scale, softcap=softcap,
                    implementation="xla")
    return out, Cache(keys, values, cache.length + new)


def attention_with_variables(module: Any, q_BxSxHxE: jax.Array, k_BxSxKxE: jax.Array, v_BxSxKxE: jax.Array,
                             length: int, **options: Any) -> jax.Array:
    """`cached_attention` with a cache for `length` tokens in the collection `cache` of a Linen module.

    options: those of `cached_attention`.
    """
    shape = (k_BxSxKxE.shape[0], length, *k_BxSxKxE.shape[2:])
    names = ("keys", "values", "length")
    variables = [module.variable("cache", name, lambda leaf=leaf: leaf)
                 for name, leaf in zip(names, Cache.empty(shape, k_BxSxKxE.dtype), strict=True)]
    out, new = cached_attention(q_BxSxHxE, k_BxSxKxE, v_BxSxKxE, Cache(*(each.value for each in variables)),
                                **options)
    for variable, leaf in zip(variables, new, strict=True):
        variable.value = leaf
    return out
