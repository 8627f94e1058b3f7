"""LayerNorm and RMSNorm that save one array for backward, in Linen and NNX: Flax's modules, with their parameters.

Flax's save three in float32, 12 bytes per element; these the normalised input in the dtype of the result. Values are
computed in float32, as Flax's are.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


class LayerNorm(nn.LayerNorm):
    """Linen's, over the last dim, with a scale and a bias."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., features) to the same, in `dtype`."""
        shape = (x.shape[-1],)
        scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        return normalised(x, scale, bias, self.epsilon, self.dtype)


class RMSNorm(nn.RMSNorm):
    """Linen's, over the last dim, with a scale. offset: is added to the stored scale, as Gemma has it."""

    offset: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., features) to the same, in `dtype`."""
        init = nn.initializers.constant(1 - self.offset) if self.offset else self.scale_init
        scale = self.param("scale", init, (x.shape[-1],), self.param_dtype)
        dtype = jnp.result_type(x, scale) if self.dtype is None else self.dtype
        scale = scale.astype(jnp.float32) + self.offset if self.offset else scale
        return normalised(x, scale, None, self.epsilon, dtype)


class NnxLayerNorm(nnx.LayerNorm):
    """NNX's, over the last dim, with a scale and a bias."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., features) to the same, in `dtype`."""
        assert self.scale is not None and self.bias is not None
        return normalised(x, self.scale[...], self.bias[...], self.epsilon, self.dtype)


class NnxRMSNorm(nnx.RMSNorm):
    """NNX's, over the last dim, with a scale."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., features) to the same, in `dtype`."""
        assert self.scale is not None
        return normalised(x, self.scale[...], None, self.epsilon, self.dtype)


def normalised(x: jax.Array, scale: jax.Array, bias: jax.Array | None, epsilon: float, dtype: Any) -> jax.Array:
    """`x`, (..., features), with a mean square of 1 over the last dim, times `scale`; with a bias also centred.

    dtype: of the result; None: the one to which all are promoted.
    """
    dtype = jnp.result_type(x, scale) if dtype is None else dtype
    return _normalised(epsilon, jnp.dtype(dtype), x.dtype, x, scale, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _normalised(epsilon: float, dtype: Any, x_dtype: Any, x: jax.Array, scale: jax.Array, bias: jax.Array | None
                ) -> jax.Array:
    return _forward(epsilon, dtype, x_dtype, x, scale, bias)[0]


def _forward(epsilon: float, dtype: Any, x_dtype: Any, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> Any:
    """(The result, what is saved: the normalised input, what it was multiplied by, scale and bias)."""
    x = x.astype(jnp.promote_types(x_dtype, jnp.float32))
    square = jnp.mean(jnp.square(x), -1, keepdims=True)
    if bias is None:
        factor = jax.lax.rsqrt(square + epsilon)
        unit = x * factor
        result = unit * _row(scale, x)
    else:
        mean = x.mean(-1, keepdims=True)
        factor = jax.lax.rsqrt(jnp.maximum(0.0, square - jnp.square(mean)) + epsilon)
        unit = (x - mean) * factor
        result = unit * _row(scale, x) + _row(bias, x)
    return result.astype(dtype), (unit.astype(dtype), factor, scale, bias)


def _backward(epsilon: float, dtype: Any, x_dtype: Any, saved: Any, cotangent: jax.Array) -> Any:
    unit, factor, scale, bias = saved
    unit, cotangent = unit.astype(factor.dtype), cotangent.astype(factor.dtype)
    rows = tuple(range(cotangent.ndim - 1))
    of_unit = cotangent * _row(scale, unit)
    of_x = of_unit - unit * jnp.mean(unit * of_unit, -1, keepdims=True)
    if bias is not None:
        of_x -= of_unit.mean(-1, keepdims=True)
    return ((of_x * factor).astype(x_dtype), jnp.sum(cotangent * unit, rows).astype(scale.dtype),
            None if bias is None else jnp.sum(cotangent, rows).astype(bias.dtype))


_normalised.defvjp(_forward, _backward)


def _row(features: jax.Array, x: jax.Array) -> jax.Array:
    """(features,) with the number of dims of `x`: tests raise where ranks are promoted in silence."""
    return features.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
