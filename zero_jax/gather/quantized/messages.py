"""Block-quantised messages: floats as bytes of int8, fp8, int4 or fp4 codes, with a scale for each block.

A message is a `uint8` array whatever its format, so that no compiler sends it in another dtype: XLA:CPU turns float8
and bfloat16 collectives into wider ones, and int4 ones into int8.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.typing import AxisNames, DType

ROW_BYTES = 512
"""Of a row of 128 words, of which messages are made on TPUs: SparseCores gather no bytes (these block), and XLA gathers
words that fill no row by an all-reduce, which sends as much again."""

SCALE_BYTES = 2
"""Of a block's scale: the upper half of a float32, rounded up."""

_LIMITS = {"int8": 127.0, "fp8": 448.0, "int4": 7.0, "fp4": 1.0, "nf4": 1.0}
_BITS = {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4, "nf4": 4}
NAMES = ("int8", "fp8", "int4")
"""Formats of messages: symmetric integers, and float8_e4m3fn."""

GRADIENT_NAMES = (*NAMES, "fp4")
"""Those of gradients."""

FP4 = (*(-2.0**-power for power in range(7)), 0.0, *(2.0**-power for power in reversed(range(7))), 1.0)
"""The values of fp4 (e3m0, as for the gradients of arXiv 2112.10769): a sign and a power of two. The last one twice, as
there are 15.

A value is off by a third of itself at most, down to 1/85 of its block's largest one; int4 rounds all below 1/14 to
zero. That suits Adam, which divides each gradient by its own magnitude (docs/guide/communication.md has the losses).
"""

NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
       0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
"""The values of NormalFloat4 (QLoRA, arXiv 2305.14314, appendix E), a format of stored weights: quantiles of a normal
distribution."""

_VALUES = {"fp4": FP4, "nf4": NF4}

_SMALLEST = 2.0**-126
"""The smallest normal float32: compilers flush what is below it to zero, so that such scales would divide by zero."""


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """How values become codes: `name` is one of `GRADIENT_NAMES`; `block`: at most so many values share a scale.

    The scale is the block's largest magnitude over the format's largest code, rounded up to bfloat16: 0.8 % coarser
    than in float32 at most, and half its bytes (int4 in blocks of 256: 1.016 times 4 bits a value instead of 1.031).
    A block that holds a NaN or an infinity is decoded as values that are not finite, which guards and loss scales find.
    """

    name: str
    block: int

    def blocks(self, num_values: int) -> tuple[int, int]:
        """(Number of blocks, values in each) of so many values: equal blocks, of an even size, the last one padded."""
        number = math.ceil(num_values / self.block)
        size = math.ceil(num_values / number)
        return number, size + size % 2

    def message_bytes(self, num_values: int) -> int:
        """Bytes of the message of so many values."""
        number, size = self.blocks(num_values)
        return number * (size * _BITS[self.name] // 8 + SCALE_BYTES)

    @property
    def relative_error(self) -> float:
        """The largest error of a value over the largest magnitude in its block."""
        step = {"fp8": 32.0, "fp4": 0.5, "nf4": NF4[1] - NF4[0]}.get(self.name, 1.0)  # between its largest codes
        return (1 + 2**-7) * step / 2 / _LIMITS[self.name]

    def encode(self, values: jax.Array, *, shared: int = 0, axes: AxisNames = ()) -> jax.Array:
        """The message of the last dim: floats (..., n) become uint8 (..., message_bytes(n)).

        shared, axes: of `products.MatrixFormat`; the scales of blocks are their own.
        """
        number, size = self.blocks(values.shape[-1])
        padding = [(0, 0)] * (values.ndim - 1) + [(0, number * size - values.shape[-1])]
        blocks = jnp.pad(values.astype(jnp.float32), padding).reshape(*values.shape[:-1], number, size)
        limit = _LIMITS[self.name]
        bits = _scale_bits(jnp.max(jnp.abs(blocks), axis=-1) * jnp.float32(1 / limit))
        scales = jnp.where(bits == 0, jnp.float32(1), jax.lax.bitcast_convert_type(bits, jnp.float32))
        codes = self._codes(jnp.clip(blocks / scales[..., None], -limit, limit))
        low, high = ((bits >> shift).astype(jnp.uint8) for shift in (16, 24))
        return jnp.concatenate([codes.reshape(*values.shape[:-1], -1), low, high], axis=-1)

    def decode(self, message: jax.Array, num_values: int, dtype: DType, *, shared: int = 0) -> jax.Array:
        """The values of a message, (..., message_bytes(n)) to (..., n). Exact in float32, then rounded to `dtype`."""
        number, size = self.blocks(num_values)
        low, high = (message[..., start:start + number].astype(jnp.uint32)
                     for start in (message.shape[-1] - 2 * number, message.shape[-1] - number))
        scales = jax.lax.bitcast_convert_type((low << 16) | (high << 24), jnp.float32)
        codes = message[..., :-2 * number].reshape(*message.shape[:-1], number, -1)
        values = self._values(codes) * scales[..., None]
        return values.reshape(*message.shape[:-1], number * size)[..., :num_values].astype(dtype)

    def _codes(self, scaled: jax.Array) -> jax.Array:
        """Codes of (..., values of a block) within the format's limits; of 4 bits: halves of a block share bytes."""
        if self.name == "fp8":
            return _bitcast(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
        if self.name in _VALUES:
            borders = [(low + high) / 2 for low, high in itertools.pairwise(_VALUES[self.name])]
            above = (scaled > border if border > 0 else scaled >= border for border in borders)  # halves: towards zero
            low, high = jnp.split(sum(each.astype(jnp.uint8) for each in above), 2, axis=-1)
            return low | (high << 4)
        codes = _bitcast(jnp.round(scaled).astype(jnp.int8), jnp.uint8)
        if self.name == "int8":
            return codes
        low, high = jnp.split(codes, 2, axis=-1)
        return (low & 15) | (high << 4)

    def _values(self, codes: jax.Array) -> jax.Array:
        """The inverse of `_codes`, as float32."""
        if self.name == "fp8":
            return _bitcast(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        if self.name in _VALUES:
            return _chosen(_VALUES[self.name], jnp.concatenate([codes & 15, codes >> 4], axis=-1))
        if self.name == "int4":
            codes = jnp.concatenate([codes << 4, codes & 0xF0], axis=-1)
            return (_bitcast(codes, jnp.int8) >> 4).astype(jnp.float32)  # an arithmetic shift: it keeps the sign
        return _bitcast(codes, jnp.int8).astype(jnp.float32)


def num_words(num_bytes: int) -> int:
    """How many words `as_words` makes of so many bytes."""
    return -(-num_bytes // ROW_BYTES) * (ROW_BYTES // 4)


def as_words(message: jax.Array) -> jax.Array:
    """The bytes of the last dim in rows of words: (..., n) uint8 to (..., num_words(n)) uint32.

    Its quarters share the words, and not four neighbours: a dim of size 4 takes 128 in the memory of a TPU.
    """
    padded = jnp.pad(message, [(0, 0)] * (message.ndim - 1) + [(0, -message.shape[-1] % ROW_BYTES)])
    quarters = jnp.split(padded.astype(jnp.uint32), 4, axis=-1)
    return functools.reduce(jnp.bitwise_or, (each << (8 * place) for place, each in enumerate(quarters)))


def from_words(words: jax.Array, num_bytes: int) -> jax.Array:
    """The inverse of `as_words`: the last dim has `num_bytes` again."""
    quarters = [(words >> (8 * place)).astype(jnp.uint8) for place in range(4)]
    return jnp.concatenate(quarters, axis=-1)[..., :num_bytes]


def _chosen(values: Sequence[float], codes: jax.Array) -> jax.Array:
    """`values[codes]` as float32 by selects alone, which fuse on every backend; a lookup is a gather."""
    if len(values) == 1:
        return jnp.full(codes.shape, values[0], jnp.float32)
    half = len(values) // 2
    return jnp.where((codes & half) != 0, _chosen(values[half:], codes), _chosen(values[:half], codes))


def _scale_bits(scales: jax.Array) -> jax.Array:
    """The bits of positive float32 `scales`, rounded up to their upper half; 0 for those below `_SMALLEST`.

    Rounded by bits and not by a cast to bfloat16, which XLA leaves out where a cast back follows.
    """
    bits = (_bitcast(scales, jnp.uint32) + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
    bits = jnp.where(jnp.isnan(scales), jnp.uint32(0x7FC00000), bits)
    return jnp.where(scales < _SMALLEST, jnp.uint32(0), bits)


def _bitcast(value: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(value, dtype)
