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

    def lower(self, name: str, *, layer: bool) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        """The programs by which the leaf `name`, or a layer of it, is saved and restored."""
        number, at = jax.ShapeDtypeStruct((), jnp.int32), 0 if layer else None
        stored, like = self._stored(name, layer=layer), self.like(name, layer=layer)
        return self._from(name, stored, at)[0].lower(stored, number), self._to(name, like, at)[0].lower(like, number)

    def from_step(self, name: str, piece: jax.Array, layer: int | None) -> tuple[jax.Array, jax.Array]:
        """(the leaf `name`, or that layer of it, in its logical shape; its digest, or what it adds to the leaf's)."""
        program, is_saved = self._from(name, piece, layer)
        saved, read = program(piece, jnp.int32(layer or 0))
        return piece if is_saved else saved, read

    def to_step(self, name: str, piece: jax.Array, layer: int | None) -> tuple[jax.Array, jax.Array]:
        """(the leaf, or that layer of it, as the step stores it; its digest, or what it adds to it, as it was read)."""
        program, is_stored = self._to(name, piece, layer)
        stored, read = program(piece, jnp.int32(layer or 0))
        return piece if is_stored else stored, read

    def _from(self, name: str, piece: Any, layer: int | None) -> tuple[Any, bool]:
        """(the program of `from_step`, whether the piece is what is saved)."""
        like, _, shape, words = self._of(name, None, layer)
        is_saved = shape.is_identity and piece.sharding.is_equivalent_to(like.sharding, len(like.shape))

        def convert(piece: jax.Array, index: jax.Array) -> tuple[jax.Array | None, jax.Array]:
            saved = piece if shape.is_identity else on_bits(
                lambda bits: constrain(shape.load(bits), like.sharding), piece)
            # A program would copy what it returns as it was given.
            return None if is_saved else saved, words(saved, index)

        return self._program(("from", is_saved), name, None, layer, convert, like.sharding), is_saved

    def _to(self, name: str, piece: Any, layer: int | None) -> tuple[Any, bool]:
        """(the program of `to_step`, whether the piece is what is stored)."""
        like, stored, shape, words = self._of(name, piece.dtype, layer)
        is_stored = shape.is_identity and like.dtype == stored.dtype and like.sharding.is_equivalent_to(
            stored.sharding, len(like.shape))

        def convert(piece: jax.Array, index: jax.Array) -> tuple[jax.Array | None, jax.Array]:
            read = words(piece, index)
            if is_stored:
                return None, read
            piece = piece.astype(stored.dtype)
            return piece if shape.is_identity else on_bits(
                lambda bits: constrain(shape.store(bits), stored.sharding), piece), read

        return self._program(("to",), name, piece.dtype, layer, convert, stored.sharding), is_stored

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

    def _program(self, way: Any, name: str, dtype: Any, layer: int | None, convert: Any, sharding: NamedSharding
                 ) -> Any:
        like, stored, shape, _ = self._of(name, dtype, layer)
        key = way, layer is None, self._logical.row(name).shape.shape, shape, like, stored
        if key not in self._programs:
            self._programs[key] = jax.jit(convert, out_shardings=(sharding, NamedSharding(sharding.mesh, P())))
        return self._programs[key]
