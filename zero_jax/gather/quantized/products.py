"""Matrix products in float8 with current scaling (arXiv 2209.05433): what is rounded, by which scale, of which weights.

A scale is of a whole array and a power of two: what a value was rounded to is then exact in bfloat16, and the product
of such values is the same whether a compiler multiplies the codes or what they stand for.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.errors import UsageError
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.typing import AxisNames, DType

TAIL_BYTES = 16
"""Of a message behind its codes: the exponent of the scale, as often as keeps the codes of all devices aligned."""


@dataclasses.dataclass(frozen=True)
class Float8:
    """A float8 format whose largest value is 1.75 * 2**top."""

    dtype: Any
    top: int


E4M3, E5M2 = Float8(jnp.float8_e4m3fn, 8), Float8(jnp.float8_e5m2, 15)
"""Of weights and activations, and of the gradients of activations."""


@dataclasses.dataclass(frozen=True)
class ProductUse:
    """That the product with the parameter `name` is in float8; encoded: whether what is read is rounded already."""

    name: str
    encoded: bool


def exponent(largest: jax.Array, kind: Float8) -> jax.Array:
    """The exponent of the scale of values up to `largest`, biased by 127 as in float32 (uint32).

    The scale is the smallest power of two that brings `largest` within the format. 255 of what is not finite, which is
    decoded as values that are not finite.
    """
    bits = jax.lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.uint32)
    above = (bits + jnp.uint32(0x1FFFFF)) >> 23  # one more from 1.75 * 2**n on
    return jnp.where(above >= 255, jnp.uint32(255), jnp.clip(above, kind.top + 1, 254) - kind.top)


def scale_of(exponent: jax.Array) -> jax.Array:
    """2**(exponent - 127), in float32."""
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.uint32) << 23, jnp.float32)


def rounded(values: jax.Array, kind: Float8) -> jax.Array:
    """`values` rounded to float8 times their scale, in their dtype: as XLA:GPU finds operands of a float8 product."""
    scale = scale_of(exponent(jnp.max(jnp.abs(values)), kind))
    codes = (values.astype(jnp.float32) / scale).astype(kind.dtype)
    return codes.astype(values.dtype) * scale.astype(values.dtype)


@dataclasses.dataclass(frozen=True)
class MatrixFormat:
    """How a weight becomes messages of float8 (e4m3) with one scale: a `BlockFormat` whose block is the whole matrix.

    dtype: in which the model reads it: it is rounded to that first, so that all stages multiply the same values.
    """

    dtype: Any

    def message_bytes(self, num_values: int) -> int:
        """Bytes of the message of so many values."""
        return num_values + TAIL_BYTES

    def encode(self, values: jax.Array, *, shared: int = 0, axes: AxisNames = ()) -> jax.Array:
        """The messages of the last dim: floats (..., n) become uint8 (..., message_bytes(n)).

        shared: how many dims before the last one share a scale; axes: of a `shard_map`, over which it is shared, too.
        """
        info = jnp.finfo(self.dtype)
        values = jax.lax.reduce_precision(values.astype(jnp.float32), info.nexp, info.nmant)
        largest = jnp.max(jnp.abs(values), axis=tuple(range(-1 - shared, 0)), keepdims=True)
        power = exponent(jax.lax.pmax(largest, axes) if axes else largest, E4M3)
        codes = jax.lax.bitcast_convert_type((values / scale_of(power)).astype(E4M3.dtype), jnp.uint8)
        tail = jnp.broadcast_to(power.astype(jnp.uint8), (*values.shape[:-1], TAIL_BYTES))
        return jnp.concatenate([codes, tail], axis=-1)

    def decode(self, message: jax.Array, num_values: int, dtype: DType, *, shared: int = 0) -> jax.Array:
        """The values of messages, (..., message_bytes(n)) to (..., n); exact in bfloat16 and float32."""
        first = message[(..., *[0] * shared, num_values)]  # a scalar of each matrix: what XLA:GPU knows as its scale
        scale = jnp.expand_dims(scale_of(first), tuple(range(-1 - shared, 0))).astype(dtype)
        codes = jax.lax.bitcast_convert_type(message[..., :num_values], E4M3.dtype)
        return codes.astype(dtype) * scale


def product_names(fp8: Any, reads: Mapping[str, ParamAccess], params: Mapping[str, Any]
                  ) -> frozenset[str]:
    """The parameters whose products are in float8, of `Precision.fp8`; params: by name, of true shape.

    True: the matrices of blocks that one product alone uses: stacked ones, and those whose name another has with other
    numbers in it. Patterns: of all matrices. Raises UsageError where these find none, or one of another use.
    """
    found = [name for name in params if fp8 is True or fp8 and any(re.search(pattern, name) for pattern in fp8)]
    alike = Counter(re.sub(r"\d+", "0", name) for name in params)
    reasons = {name: why for name in found if (why := _unfit(reads[name], params[name]))}
    if fp8 is True:
        found = [name for name in found if name not in reasons and (
            reads[name].stacked or alike[re.sub(r"\d+", "0", name)] > 1)]
        if not found:
            raise UsageError("precision: fp8 would change nothing: no block of the model has a matrix that one product "
                             "alone uses: leave it out, or name matrices, as Precision(fp8=(\"mlp\",)).")
    for pattern in () if isinstance(fp8, bool) else fp8:
        if not any(re.search(pattern, name) for name in found):
            raise UsageError(f"precision: fp8: no parameter's name matches {pattern!r}: there are "
                             f"{', '.join([*params][:5])}: give another pattern.")
    if not isinstance(fp8, bool) and reasons:
        name, why = next(iter(reasons.items()))
        raise UsageError(f"precision: fp8: {name} is not multiplied in float8: {why}: give patterns without it.")
    return frozenset(found)


def _unfit(read: ParamAccess, leaf: Any) -> str:
    """Why a parameter's product cannot be in float8; empty if it can."""
    if read.on_entry or read.on_entry_if_padded or read.written:
        return "its module reads it other than through Flax's accessor, or overwrites it"
    if read.products != 1 or not read.contracted:
        return f"{read.products} matrix products use it" if read.products else "it has another use than a product"
    if len(leaf.shape) - len(read.stacked) <= len(read.contracted) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return "it is no matrix"
    return ""
