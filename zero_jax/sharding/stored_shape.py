"""Uneven shapes: how a leaf is stored whose dims do not divide over the devices: padded, or merged and padded.

The model, the optimizer and the user see the true shape. Padding is zeros and stays zeros.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class StoredShape:
    """The true and the stored shape of a leaf.

    dims: for each stored dim the sizes of the true dims that are merged into it, row-major. stored: the size of each
    stored dim, at least the product of those; the rest is padding at its end. Arrays may have another size along a dim
    that is neither merged nor padded, since a loop may slice it.
    """

    dims: tuple[tuple[int, ...], ...]
    stored: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape."""
        return sum(self.dims, ())

    @property
    def merges(self) -> bool:
        """Whether dims are merged, so that no sharding of the true shape matches that of the stored one."""
        return any(len(sizes) != 1 for sizes in self.dims)

    @property
    def is_identity(self) -> bool:
        """Whether the leaf is stored as it is."""
        return self.stored == self.shape and not self.merges

    @property
    def padding(self) -> int:
        """Number of stored elements that are padding."""
        return math.prod(self.stored) - math.prod(self.shape)

    def identity_dim(self, dims: Sequence[int]) -> int | None:
        """The stored dim of the first of these true dims that is neither merged nor padded; None if there is none."""
        firsts = itertools.accumulate((len(group) for group in self.dims), initial=0)
        return next((dim for dim, first in enumerate(firsts) if first in dims and dim < len(self.dims)
                     and self.dims[dim] == (self.stored[dim],)), None)

    def drop_dim(self, index: int) -> "StoredShape":
        """The stored shape inside a loop over the stored dim `index`, which is neither merged nor padded."""
        return StoredShape(self.dims[:index] + self.dims[index + 1:], self.stored[:index] + self.stored[index + 1:])

    def add_dim(self, index: int) -> "StoredShape":
        """The inverse of `drop_dim`, for a dim of any size."""
        return StoredShape((*self.dims[:index], (1,), *self.dims[index:]),
                           (*self.stored[:index], 1, *self.stored[index:]))

    def store(self, value: jax.Array) -> jax.Array:
        """A true array as it is stored; traceable."""
        if self.is_identity:
            return value
        sizes, dim = [], 0
        for group, true_size in zip(self.dims, self._true_sizes, strict=True):
            sizes.append(value.shape[dim] if true_size is None else math.prod(group))
            dim += len(group)
        value = jax.lax.reshape(value, sizes) if self.merges else value
        ends = [0 if true_size is None else size - true_size
                for size, true_size in zip(self.stored, self._true_sizes, strict=True)]
        zero = jnp.zeros((), value.dtype)
        return jax.lax.pad(value, zero, [(0, end, 0) for end in ends]) if any(ends) else value

    def load(self, value: Any) -> Any:
        """A stored array, of JAX or NumPy, in its true shape; traceable."""
        if self.is_identity:
            return value
        value = value[tuple(slice(true_size) for true_size in self._true_sizes)] if self.padding else value
        shape = [size for group, true_size, actual in zip(self.dims, self._true_sizes, value.shape, strict=True)
                 for size in ((actual,) if true_size is None else group)]
        return value.reshape(shape) if self.merges else value

    def filled(self, value: jax.Array, padding: Any) -> jax.Array:
        """A stored array whose padding elements are set to `padding`; traceable."""
        for dim, true_size in enumerate(self._true_sizes):
            if true_size is not None and true_size < self.stored[dim]:
                inside = jax.lax.broadcasted_iota(jnp.int32, value.shape, dim) < true_size
                value = jax.lax.select(inside, value, jnp.full_like(value, padding))
        return value

    @property
    def _true_sizes(self) -> tuple[int | None, ...]:
        """The size of each stored dim without padding; None for a dim that is neither merged nor padded."""
        return tuple(None if group == (size,) else math.prod(group)
                     for group, size in zip(self.dims, self.stored, strict=True))


def identity_shape(shape: tuple[int, ...]) -> StoredShape:
    """The stored shape of a leaf that is stored as it is."""
    return StoredShape(tuple((size,) for size in shape), tuple(shape))


def padding_note(stored_shape: StoredShape) -> str:
    """Which dims of a leaf are merged and padded, and the share of padding."""
    parts = []
    for dim, (group, size) in enumerate(zip(stored_shape.dims, stored_shape.stored, strict=True)):
        if len(group) != 1:
            parts.append(" x ".join(map(str, group)) + " merged")
        if math.prod(group) != size:
            parts.append(f"dim {dim} padded: {math.prod(group)} to {size}")
    share = f", {stored_shape.padding / math.prod(stored_shape.shape):.2%}" if stored_shape.padding else ""
    return ", ".join(parts) + share
