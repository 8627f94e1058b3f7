"""Checkpoints of states in files, saved and restored leaf by leaf, so that the whole of them is in no memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.checkpoint.integrity import read_arrays, verify
from zero_jax.checkpoint.logical_state import LogicalState, on_bits
from zero_jax.checkpoint.manifest import Leaf, NewManifest
from zero_jax.checkpoint.orbax_files import ArrayWriter
from zero_jax.distributed.agreement import all_or_none
from zero_jax.sharding.checksum import digest_texts, digests
from zero_jax.step.disk.records import chunks


class LeavesToSave:
    """The leaves in files of a state, for `orbax_store.write`. names: of those with elements."""

    def __init__(self, logical: LogicalState, files: Any, names: Sequence[str], manifest: NewManifest):
        """files: as `step.in_files` returns them. names: of what is to be saved, in memory or in files."""
        self._conversions, self._files, self._manifest = _conversions_of(logical), files, manifest
        self._names = sorted(files.layout.disk.intersection(names))
        # Leaves without elements have a digest and no array.
        self.names = tuple(name for name in self._names if math.prod(self._conversions.like(name).shape))

    def write(self, folder: Any) -> dict[str, Any]:
        """Writes them, and returns the manifest. Every process calls this."""
        writer = all_or_none(lambda: ArrayWriter(folder, {name: self._conversions.like(name) for name in self.names}))
        # Some at a time, which take no more of a device than the largest of them.
        for names in chunks(self._names, {name: self._files.leaves[name].like for name in self._names}):
            leaves, arrays = self._files.read_leaves(names), dict[str, jax.Array]()
            for name in names:
                arrays[name], words = self._conversions.from_step(name, leaves.pop(name))
                self._manifest.digests[name] = _text(words)
            all_or_none(lambda arrays=arrays: writer.write({
                name: array for name, array in arrays.items() if array.size}))
        all_or_none(writer.finish)
        return self._manifest.json()


class LeavesOfCheckpoint:
    """A checkpoint's leaves as a step stores them; `step.from_leaves` reads them."""

    def __init__(self, logical: LogicalState, path: Any, saved: Mapping[str, Leaf]):
        """saved: the leaves by the manifest. Nothing is read yet."""
        self._logical, self._path, self._saved = logical, path, saved
        self._digests: dict[str, str] = {}

    def leaves(self, names: Sequence[str]) -> dict[str, Any]:
        """The leaves `names`, together."""
        saved = {name: self._saved[name] for name in names}
        leaves, digests = self._logical.to_leaves(read_arrays(self._path, self._logical.abstract(saved)), saved)
        self._digests |= digests
        return leaves

    def leaf(self, name: str) -> jax.Array:
        """A leaf that is in files."""
        if not math.prod(self._saved[name].shape):
            return self.leaves([name])[name]
        (array,) = read_arrays(self._path, self._logical.abstract({name: self._saved[name]})).values()
        leaf, words = _conversions_of(self._logical).to_step(name, array)
        self._digests[name] = _text(words)
        return leaf

    def check(self) -> None:
        """Raises DamagedCheckpointError unless all that was read has the digests that were saved."""
        verify(self._path, self._saved, self._digests)


class _Conversions:
    """As those of `LogicalState`, of one leaf each, an array of numbers on the devices; alike ones share a program."""

    def __init__(self, logical: LogicalState):
        self._logical = logical
        self._programs: dict[Any, Any] = {}

    def like(self, name: str) -> jax.ShapeDtypeStruct:
        """The leaf `name` in its logical shape, sharded."""
        row = self._logical.row(name)
        return jax.ShapeDtypeStruct(row.shape.shape, row.stored.dtype, sharding=row.sharding)

    def from_step(self, name: str, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the leaf `name` in its logical shape, and its digest."""
        row = self._logical.row(name)
        is_saved = row.shape.is_identity

        def convert(leaf: jax.Array) -> tuple[jax.Array | None, jax.Array]:
            saved = leaf if is_saved else on_bits(lambda bits: constrain(row.shape.load(bits), row.sharding), leaf)
            # A program would copy what it returns as it was given.
            return None if is_saved else saved, digests([saved], [row.sharding])[0]

        saved, words = self._program(("from", row), convert, row.sharding)(leaf)
        return leaf if is_saved else saved, words

    def to_step(self, name: str, array: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the leaf `name` as the step stores it, and its digest as it was read."""
        row = self._logical.row(name)
        is_stored = row.shape.is_identity and array.dtype == row.stored.dtype
        sharding: Any = row.stored.sharding

        def convert(array: jax.Array) -> tuple[jax.Array | None, jax.Array]:
            words = digests([array], [row.sharding])[0]
            if is_stored:
                return None, words
            leaf = array.astype(row.stored.dtype)
            return leaf if row.shape.is_identity else on_bits(
                lambda bits: constrain(row.shape.store(bits), sharding), leaf), words

        stored, words = self._program(("to", row, array.dtype), convert, sharding)(array)
        return array if is_stored else stored, words

    def _program(self, key: Any, convert: Callable[..., Any], sharding: NamedSharding) -> Any:
        if key not in self._programs:
            self._programs[key] = jax.jit(convert, out_shardings=(sharding, NamedSharding(sharding.mesh, P())))
        return self._programs[key]


def _conversions_of(logical: LogicalState) -> _Conversions:
    """Cached on the `LogicalState`: they are compiled once."""
    attributes = vars(logical)
    if "_conversions" not in attributes:
        attributes["_conversions"] = _Conversions(logical)
    return attributes["_conversions"]


def _text(words: Any) -> str:
    return digest_texts(np.asarray(words)[None])[0]
