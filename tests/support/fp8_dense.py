"""A dense layer in float8 written by hand in Flax, whose numbers the library's products are to have."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

LARGEST = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}


def rounded(values, dtype):
    """`values` as float8 of the smallest power of two by which all of them fit, and back."""
    largest = jnp.max(jnp.abs(values)).astype(jnp.float32)
    powers = jnp.exp2(jnp.arange(-120.0, 121.0))
    scale = powers[jnp.argmax(largest / LARGEST[dtype] <= powers)]
    return ((values.astype(jnp.float32) / scale).astype(dtype).astype(jnp.float32) * scale).astype(values.dtype)


@jax.custom_vjp
def product(x, weight):
    """`x` times a matrix, both as e4m3; in backward by the cotangent as e5m2."""
    return rounded(x, jnp.float8_e4m3fn) @ rounded(weight, jnp.float8_e4m3fn)


def _backward(saved, cotangent):
    x, weight = (rounded(each, jnp.float8_e4m3fn) for each in saved)
    cotangent = rounded(cotangent, jnp.float8_e5m2)
    return cotangent @ weight.T, jnp.tensordot(x, cotangent, (tuple(range(x.ndim - 1)),) * 2)


product.defvjp(lambda x, weight: (product(x, weight), (x, weight)), _backward)


class Fp8Dense(nn.Module):
    """`nn.Dense` whose product is `product`."""

    features: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return product(x, kernel) + jnp.broadcast_to(bias, (*x.shape[:-1], self.features))
