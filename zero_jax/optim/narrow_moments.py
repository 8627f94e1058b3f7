"""Optimizers whose moments are stored in fewer bits: in bfloat16, or in 8 bits with a scale for each block."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zero_jax.errors import UsageError
from zero_jax.optim.compatibility import takes_value
from zero_jax.tree import ending, map_named, named_leaves

BLOCK = 128
"""Elements of a row that share a scale, of 4 bytes: 8.25 bits for each element."""

MIN_ROW, MIN_ROWS = 32, 128
"""The least size of the last dim, and of all others together, of a moment that is stored in 8 bits: biases are not."""

_DROPPED = 20
"""Of the 23 bits of a float32's mantissa those that a code has not: neighbouring codes are 6 to 12 % apart."""


class NarrowState(NamedTuple):
    """The state of `narrow_moments`.

    count: of updates, from which the noise of the next one follows. inner: the optimizer's state, with codes in the
    place of its moments. block_scales: a scale for each block of the moment of that name; None for other leaves.
    """

    count: jax.Array
    inner: Any
    block_scales: Any


def narrow_moments(inner: optax.GradientTransformation, bits: Literal[8, 16]) -> optax.GradientTransformationExtraArgs:
    """`inner` with moments stored in `bits` each and computed in float32: AdamW's take 2.1 or 4 bytes for a parameter.

    Moments are the leaves of its state with a parameter's name and shape. They are rounded at random, so that what
    changes by less than a code does so on average: with b2=0.999 a second moment changes by 0.1 % in a step. The noise
    follows from a number's place and the step, so that every stage and number of devices draws the same.

    - 16: bfloat16.
    - 8: blocks of 128 elements of the last dim have the scale of their largest. `nu` has five bits of exponent, down
      to 2**-31 of that, and never rounds to zero, by which Adam would divide; others have a sign and four, to 2**-15.
      Biases and other small leaves stay as they are. Such parameters are sharded over other dims than the last, so
      that each block is on one device, and nothing is sent for it.

    Args:
      inner: any optax transform: `optax.adamw(1e-3)`, say.
      bits: 8 or 16.

    Raises ValueError for another number of bits, and, when it makes its state, where no moment is narrowed.

    >>> import optax, zero_jax
    >>> optimizer = zero_jax.narrow_moments(optax.adamw(1e-3), 8)
    """
    if bits not in (8, 16):
        raise UsageError(f"narrow_moments(bits={bits!r}): give 8 (codes with a scale for each block) or 16 (bfloat16).")
    run = takes_value(inner)

    def encode(state: Any, params: Any, count: jax.Array) -> NarrowState:
        shapes = {name: leaf.shape for name, leaf in named_leaves(params)}
        seeds = {name: _mixed(jnp.uint32(0x9E3779B9) * count.astype(jnp.uint32) + jnp.uint32(number))
                 for number, (name, _) in enumerate(named_leaves(state))}

        def is_moment(name: str, leaf: Any) -> bool:
            return shapes.get(ending(name, shapes)) == jnp.shape(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)

        def scale(name: str, leaf: Any) -> Any:
            return _block_scales(leaf) if bits == 8 and is_moment(name, leaf) and _is_large(leaf) else None

        def narrowed(name: str, leaf: Any, scales: Any) -> Any:
            if scales is not None:
                return _codes(leaf, scales, _noise(leaf.shape, seeds[name]), _top(name))
            if bits == 16 and is_moment(name, leaf):
                return to_bfloat16(leaf, _noise(leaf.shape, seeds[name]) >> 16)
            return leaf

        scales = map_named(scale, state)
        if not jax.tree.leaves(scales) and not (bits == 16 and any(is_moment(*each) for each in named_leaves(state))):
            raise UsageError(f"narrow_moments(bits={bits}): the optimizer has no moment that it changes" + (
                f", of at least {MIN_ROWS} rows of {MIN_ROW}: give 16 bits, or" if bits == 8 else ":")
                + " leave it out.")
        return NarrowState(count, map_named(narrowed, state, scales), scales)

    def decode(name: str, leaf: Any, scales: Any) -> Any:
        if scales is not None:
            return _values(leaf, scales, _top(name))
        return leaf.astype(jnp.float32) if getattr(leaf, "dtype", None) == jnp.bfloat16 and bits == 16 else leaf

    def init(params: Any) -> NarrowState:
        return encode(inner.init(params), params, jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, NarrowState]:
        wide = map_named(decode, state.inner, state.block_scales)
        new_updates, wide = run.update(updates, wide, params, **extra)
        return new_updates, encode(wide, updates, state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_large(leaf: Any) -> bool:
    return leaf.ndim > 1 and leaf.shape[-1] >= MIN_ROW and leaf.size // leaf.shape[-1] >= MIN_ROWS


def _top(name: str) -> int:
    """The code of a block's largest number: of `nu`, which has no sign, all eight bits."""
    return 255 if "nu" in name.split("/") else 127


def _block_scales(leaf: jax.Array) -> jax.Array:
    """(..., blocks): the largest size of a number in each block of the last dim."""
    size = leaf.shape[-1]
    block = min(BLOCK, size)
    padded = jnp.pad(jnp.abs(leaf).astype(jnp.float32), [(0, 0)] * (leaf.ndim - 1) + [(0, -size % block)])
    return padded.reshape(*leaf.shape[:-1], -1, block).max(-1)


def _of_elements(scales: jax.Array, size: int) -> jax.Array:
    """The scale of each of `size` elements of the last dim."""
    return jnp.repeat(scales, min(BLOCK, size), axis=-1)[..., :size]


def _codes(leaf: jax.Array, scales: jax.Array, noise: jax.Array, top: int) -> jax.Array:
    """Exponent and the upper three bits of the mantissa of each number over its scale, counted down from `top` for 1.

    0 is zero. The noise carries into what is kept with the probability of the fraction that is cut off.
    """
    scale = _of_elements(scales, leaf.shape[-1])
    share = jnp.abs(leaf).astype(jnp.float32) / jnp.where(scale > 0, scale, 1)
    kept = (_bits(share) + (noise >> (32 - _DROPPED))) >> _DROPPED
    code = jnp.clip(kept.astype(jnp.int32) - _lowest(top), 1 if top == 255 else 0, top)
    code = jnp.where(share == 0, 0, code).astype(jnp.uint8)
    return code if top == 255 else code | ((leaf < 0).astype(jnp.uint8) << 7)


def _values(codes: jax.Array, scales: jax.Array, top: int) -> jax.Array:
    """The numbers that `codes` stand for."""
    size = (codes & top).astype(jnp.uint32)
    share = jax.lax.bitcast_convert_type((size + _lowest(top)) << _DROPPED, jnp.float32)
    value = jnp.where(size == 0, 0, share) * _of_elements(scales, codes.shape[-1])
    return value if top == 255 else jnp.where(codes > top, -value, value)


def _lowest(top: int) -> int:
    """The upper bits of the float32 that code 0 would be, where `top` is 1.0."""
    return (127 << 23 >> _DROPPED) - top


def to_bfloat16(value: jax.Array, noise: jax.Array) -> jax.Array:
    """A floating `value` as bfloat16, rounded at random; noise: uint32, 16 random bits for each number.

    A bfloat16 is the upper half of a float32. What is added to the lower half carries over with the probability of the
    fraction that it holds; the cut leaves a bfloat16 exactly. Infinities and NaNs are cast as they are.
    """
    wide = value.astype(jnp.float32)
    cut = jax.lax.bitcast_convert_type((_bits(wide) + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(wide), cut, wide).astype(jnp.bfloat16)


def _bits(value: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(value, jnp.uint32)


def _noise(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """32 random bits for each place: of its number in the array, so that no device needs another's."""
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    return _mixed(place * jnp.uint32(0x9E3779B1) + seed)


def _mixed(value: jax.Array) -> jax.Array:
    """A permutation of the 32-bit numbers in which each bit depends on all (the finalizer of MurmurHash3)."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)
