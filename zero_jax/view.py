"""How a leaf is stored where its shape does not divide over the devices: dims padded, or merged into one and padded.

The model, the optimizer and the user see the true shape; padding is zeros and stays zeros.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class View:
    """A true shape as it is stored.

    dims: for each stored dim the sizes of the true dims that lie in it, merged row-major. stored: the size of each
    stored dim, at least the product of those; what is more is padding, at its end. A dim that is neither merged nor
    padded is taken as it comes, since a loop may run over it.
    """

    dims: tuple[tuple[int, ...], ...]
    stored: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape."""
        return sum(self.dims, ())

    @property
    def merges(self) -> bool:
        """Whether dims are merged, so that no layout of the true shape is that of the stored one."""
        return any(len(sizes) != 1 for sizes in self.dims)

    @property
    def natural(self) -> bool:
        """Whether the leaf is stored as it is."""
        return self.stored == self.shape and not self.merges

    @property
    def padding(self) -> int:
        """Elements that are stored and are none of the leaf's."""
        return math.prod(self.stored) - math.prod(self.shape)

    def alone(self, dims: Sequence[int]) -> int | None:
        """The stored dim of the first of these true dims that is neither merged nor padded; None if there is none."""
        firsts = itertools.accumulate((len(group) for group in self.dims), initial=0)
        return next((dim for dim, first in enumerate(firsts) if first in dims and dim < len(self.dims)
                     and self.dims[dim] == (self.stored[dim],)), None)

    def drop_dim(self, index: int) -> "View":
        """This view inside a loop over the stored dim `index`, which is neither merged nor padded."""
        return View(self.dims[:index] + self.dims[index + 1:], self.stored[:index] + self.stored[index + 1:])

    def add_dim(self, index: int) -> "View":
        """The inverse of `drop_dim`, for a dim of any size."""
        return View((*self.dims[:index], (1,), *self.dims[index:]), (*self.stored[:index], 1, *self.stored[index:]))

    def store(self, value: jax.Array) -> jax.Array:
        """A true array as it is stored; traceable."""
        if self.natural:
            return value
        sizes, dim = [], 0
        for group, whole in zip(self.dims, self._whole, strict=True):
            sizes.append(math.prod(group) if whole is not None else value.shape[dim])
            dim += len(group)
        value = jax.lax.reshape(value, sizes) if self.merges else value
        ends = [0 if whole is None else size - whole for size, whole in zip(self.stored, self._whole, strict=True)]
        zero = jnp.zeros((), value.dtype)
        return jax.lax.pad(value, zero, [(0, end, 0) for end in ends]) if any(ends) else value

    def load(self, value: Any) -> Any:
        """A stored array, of JAX or NumPy, in its true shape; traceable."""
        if self.natural:
            return value
        value = value[tuple(slice(whole) for whole in self._whole)] if self.padding else value
        shape = [size for group, whole, found in zip(self.dims, self._whole, value.shape, strict=True)
                 for size in ((found,) if whole is None else group)]
        return value.reshape(shape) if self.merges else value

    def filled(self, value: jax.Array, padding: Any) -> jax.Array:
        """A stored array with `padding` in place of what its padding holds; traceable."""
        for dim, whole in enumerate(self._whole):
            if whole is not None and whole < self.stored[dim]:
                inside = jax.lax.broadcasted_iota(jnp.int32, value.shape, dim) < whole
                value = jax.lax.select(inside, value, jnp.full_like(value, padding))
        return value

    @property
    def _whole(self) -> tuple[int | None, ...]:
        """The elements in each stored dim that are the leaf's; None for a dim that is taken as it comes."""
        return tuple(None if group == (size,) else math.prod(group)
                     for group, size in zip(self.dims, self.stored, strict=True))


def natural(shape: tuple[int, ...]) -> View:
    """The view of what is stored as it is."""
    return View(tuple((size,) for size in shape), tuple(shape))
