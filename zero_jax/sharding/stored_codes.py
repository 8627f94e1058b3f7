"""Frozen weights that are stored, gathered and checkpointed as codes, and decoded where they are read (QLoRA)."""

import dataclasses

import jax
import jax.numpy as jnp

from zero_jax.sharding.quantized import BlockFormat
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

    @property
    def _format(self) -> BlockFormat:
        return BlockFormat(self.name, BLOCK)
