"""Frozen weights that are stored, gathered and checkpointed as codes, and decoded where they are read (QLoRA)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.gather.quantized.messages import BlockFormat
from zero_jax.sharding.shard_reader import UnreadLeaf
from zero_jax.typing import DType, Shape

BLOCK = 64
"""Values that share a scale, as in QLoRA: 0.53 bytes for each value of nf4, 1.03 of int8."""

FORMATS = ("int8", "nf4")


@dataclasses.dataclass(frozen=True)
class StoredCodes:
    """How one weight is stored as bytes: blocks of codes along `dim`, and their scales behind them.

    shape: of the weight. stacked: its dims that loops run over. dim: one that products sum over.
    """

    name: str
    shape: Shape
    stacked: tuple[int, ...]
    dim: int

    def encode(self, weight: jax.Array) -> jax.Array:
        """A weight as uint8, with as many dims, of which `dim` has another size."""
        message = self._format.encode(jnp.moveaxis(weight, self.dim, -1))
        return jnp.moveaxis(message, -1, self.dim)

    def decode(self, codes: jax.Array, dtype: DType) -> jax.Array:
        """The weight, whole or inside of the loops over its stacked dims."""
        inside = codes.ndim < len(self.shape)
        dim = self.dim - sum(each < self.dim for each in self.stacked) if inside else self.dim
        values = self._format.decode(jnp.moveaxis(codes, dim, -1), self.shape[self.dim], dtype)
        return jnp.moveaxis(values, -1, dim)

    def encode_unread(self, weight: UnreadLeaf) -> UnreadLeaf:
        """The codes of a weight that is not read yet: each part of them is encoded from what it needs, by layers.

        One layer of a part is in float32 at a time. A part along `dim` needs the whole of that dim, whose codes are
        kept on the host for the other parts.
        """
        shape = jax.eval_shape(self.encode, jax.ShapeDtypeStruct(self.shape, jnp.float32)).shape
        return UnreadLeaf(weight.name, shape, np.dtype(np.uint8), lambda: self._encoding(weight.open(), shape))

    def _encoding(self, read: Callable[[tuple[slice, ...]], np.ndarray], shape: Shape
                  ) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """From a function that reads parts of the weight, one that reads parts of its codes."""
        encode, kept = jax.jit(self.encode), dict[Any, np.ndarray]()

        def codes_of(index: tuple[slice, ...]) -> np.ndarray:
            whole = tuple(slice(0, size) if dim == self.dim else way
                          for dim, (way, size) in enumerate(zip(index, self.shape, strict=True)))
            key, part = str(whole), index[self.dim]
            codes = kept[key] if key in kept else np.asarray(encode(read(whole).astype(np.float32)))
            if (part.start, part.stop) == (0, shape[self.dim]):
                return codes
            kept[key] = codes
            return codes[(*[slice(None)] * self.dim, part)]

        def layers_of(index: tuple[slice, ...]) -> np.ndarray:
            if not self.stacked:
                return codes_of(index)
            first = self.stacked[0]
            return np.concatenate([codes_of((*index[:first], slice(at, at + 1), *index[first + 1:]))
                                   for at in range(index[first].start, index[first].stop)], axis=first)

        return layers_of

    @property
    def _format(self) -> BlockFormat:
        return BlockFormat(self.name, BLOCK)
