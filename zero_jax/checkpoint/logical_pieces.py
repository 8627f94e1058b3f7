"""Leaves and layers of stacks as a checkpoint has them, in logical shapes, from and to a step's layout, one by one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.checkpoint.logical_state import LogicalState, on_bits
from zero_jax.sharding.checksum import digests, layer_words


class LogicalPieces:
    """As `LogicalState`, of single leaves that are arrays in the memory of devices, and of layers of them.

    A layer is of a leaf that is stored whole along its first dim, which counts them. What is stored alike shares a
    program.
    """

    def __init__(self, logical: LogicalState):
        """Compiles nothing yet."""
        self._logical = logical
        self._programs: dict[Any, Any] = {}

    def like(self, name: str, dtype: Any = None, *, layer: bool) -> jax.ShapeDtypeStruct:
        """The leaf `name`, or a layer of it, in its logical shape, sharded; dtype: as it was saved, None: as stored."""
        row = self._logical.row(name)
        if not layer:
            return jax.ShapeDtypeStruct(row.shape.shape, jnp.dtype(dtype or row.stored.dtype), sharding=row.sharding)
        shape, stored = row.shape.drop_dim(0), self._stored(name, layer=True)
        return jax.ShapeDtypeStruct(shape.shape, jnp.dtype(dtype or row.stored.dtype),
                                    sharding=self._logical.logical_sharding(stored, shape))

    def from_step(self, name: str, piece: jax.Array, layer: int | None) -> tuple[jax.Array, jax.Array]:
        """(the leaf `name`, or that layer of it, in its logical shape; its digest, or what it adds to the leaf's)."""
        like, stored, shape, words = self._of(name, None, layer)

        def convert(piece: jax.Array, index: jax.Array) -> tuple[jax.Array | None, jax.Array]:
            if piece_is_saved:
                return None, words(piece, index)
            piece = piece if shape.is_identity else on_bits(
                lambda bits: constrain(shape.load(bits), like.sharding), piece)
            return piece, words(piece, index)

        # A program would copy what it returns as it was given.
        piece_is_saved = shape.is_identity and piece.sharding.is_equivalent_to(like.sharding, piece.ndim)

        saved, read = self._run(
            ("from", piece_is_saved, layer is None, self._logical.row(name).shape.shape, shape, like, stored), convert,
            like.sharding, piece, layer)
        return piece if piece_is_saved else saved, read

    def to_step(self, name: str, piece: jax.Array, layer: int | None) -> tuple[jax.Array, jax.Array]:
        """(the leaf, or that layer of it, as the step stores it; its digest, or what it adds to it, as it was read)."""
        like, stored, shape, words = self._of(name, piece.dtype, layer)

        def convert(piece: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
            read = words(piece, index)
            piece = piece.astype(stored.dtype)
            return piece if shape.is_identity else on_bits(
                lambda bits: constrain(shape.store(bits), stored.sharding), piece), read

        return self._run(("to", layer is None, self._logical.row(name).shape.shape, shape, like, stored), convert,
                         stored.sharding, piece, layer)

    def _of(self, name: str, dtype: Any, layer: int | None) -> tuple[Any, Any, Any, Callable[[Any, Any], jax.Array]]:
        row, is_layer = self._logical.row(name), layer is not None
        like, stored = self.like(name, dtype, layer=is_layer), self._stored(name, layer=is_layer)
        stack = jax.ShapeDtypeStruct(row.shape.shape, like.dtype)

        def words(piece: jax.Array, index: jax.Array) -> jax.Array:
            if is_layer:
                return layer_words(piece, like.sharding, index, stack)
            return digests([piece], [like.sharding])[0]

        return like, stored, row.shape.drop_dim(0) if is_layer else row.shape, words

    def _stored(self, name: str, *, layer: bool) -> jax.ShapeDtypeStruct:
        stored: Any = self._logical.row(name).stored
        if not layer:
            return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=stored.sharding)
        return jax.ShapeDtypeStruct(stored.shape[1:], stored.dtype, sharding=NamedSharding(
            stored.sharding.mesh, P(*stored.sharding.spec[1:])))

    def _run(self, key: Any, convert: Any, sharding: NamedSharding, piece: jax.Array, layer: int | None) -> Any:
        if key not in self._programs:
            self._programs[key] = jax.jit(convert, out_shardings=(sharding, NamedSharding(sharding.mesh, P())))
        return self._programs[key](piece, jnp.int32(layer or 0))
