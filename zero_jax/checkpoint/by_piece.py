"""Checkpoints of states in files, saved and restored in pieces: leaf by leaf, and of stacks layer by layer."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.checkpoint import orbax_store as storage
from zero_jax.checkpoint.array_pieces import PieceReader, PieceWriter, joined
from zero_jax.checkpoint.integrity import read_arrays, reading, verify
from zero_jax.checkpoint.logical_pieces import LogicalPieces
from zero_jax.checkpoint.logical_state import LogicalState
from zero_jax.checkpoint.manifest import Leaf
from zero_jax.checkpoint.new_manifest import NewManifest
from zero_jax.distributed.agreement import all_or_none
from zero_jax.sharding.checksum import digest_texts, join_layers
from zero_jax.step.disk.leaf import chunks


class PiecesToSave:
    """The leaves in files of a state, for `orbax_store.write`. names: of those with elements."""

    def __init__(self, logical: LogicalState, state: Any, names: Sequence[str], manifest: NewManifest):
        """state: as `step.in_pieces` returns it. names: of what is to be saved, in memory or in files."""
        self._pieces, self._state, self._manifest = _pieces_of(logical), state, manifest
        self._stacks = [name for name in state.stacks if name in names]
        self._others = [name for name in state.others if name in names]
        # Leaves without elements have a digest and no array.
        self.names = tuple(name for name in (*self._stacks, *self._others) if math.prod(self._like(name).shape))

    def write(self, folder: Any) -> dict[str, Any]:
        """Writes them, and returns the manifest. Every process calls this."""
        parts = {}
        for name in self.names:
            layer = name in self._stacks
            like: Any = self._pieces.like(name, layer=layer)
            parts[name] = (1,) * layer + like.sharding.shard_shape(like.shape)
        writer = all_or_none(lambda: PieceWriter(folder, {name: self._like(name) for name in self.names}, parts))
        words: dict[str, list[Any]] = {name: [] for name in self._stacks}
        whole = {}
        with self._state.layers(self._stacks) as layers:
            for index, layer in layers:
                for some in chunks(list(layer), {name: self._pieces.like(name, layer=True) for name in layer}):
                    rows = []
                    for name in some:
                        row, word = self._pieces.from_step(name, self._state.layer(name, layer.pop(name)), index)
                        words[name].append(word)
                        rows.append((name, (index, *[0] * row.ndim), row))
                    all_or_none(lambda rows=rows: writer.write(rows))
        for leaves in self._state.chunks(self._others):
            rows = []
            for name in list(leaves):
                leaf, whole[name] = self._pieces.from_step(name, leaves.pop(name), None)
                rows.append((name, (0,) * leaf.ndim, leaf))
            all_or_none(lambda rows=rows: writer.write([row for row in rows if row[2].size]))
        all_or_none(writer.finish)
        joint = {name: join_layers(each, self._like(name)) for name, each in words.items()}
        self._manifest.digests |= _texts(joint | whole)
        return self._manifest.json()

    def _like(self, name: str) -> jax.ShapeDtypeStruct:
        return self._pieces.like(name, layer=False)


class PiecesToRead:
    """A checkpoint's leaves as a step stores them; `step.from_pieces` reads them."""

    def __init__(self, logical: LogicalState, path: Any, saved: Mapping[str, Leaf]):
        """saved: the leaves by the manifest. Nothing is read yet."""
        self._logical, self._pieces, self._path, self._saved = logical, _pieces_of(logical), path, saved
        self._digests: dict[str, str] = {}
        self._layers: dict[str, dict[int, Any]] = {}
        self._reader = PieceReader(path / storage.ARRAYS)

    def expect(self, together: Sequence[set[str]]) -> None:
        """Sizes the cache for what will be read more than once: parts of the file that have more than one layer."""
        sizes = [sum(self._spanning_bytes(name) for name in names) for names in together]
        # The cache counts more than the elements: at their exact size a part was decoded again for each layer.
        self._reader = PieceReader(self._path / storage.ARRAYS, max(sizes, default=0) * 5 // 4)

    def _spanning_bytes(self, name: str) -> int:
        """Of the parts of the file with more than a layer of a leaf, what this process reads."""
        chunk = self._read(name, lambda: self._reader.chunk_shape(name))
        if not chunk or chunk[0] == 1:
            return 0
        like, sizes = self._pieces.like(name, self._saved[name].dtype, layer=True), self._saved[name].shape
        sharding: Any = like.sharding
        chunks = set()
        for index in sharding.addressable_devices_indices_map(like.shape).values():
            spans = [(low // each, -(-high // each)) for each, (low, high) in zip(chunk[1:], (
                part.indices(size)[:2] for part, size in zip(index, like.shape, strict=True)), strict=True)]
            chunks.update(itertools.product(*(range(*span) for span in spans)))
        layers = math.ceil(sizes[0] / chunk[0]) * chunk[0]
        return len(chunks) * math.prod(chunk[1:]) * layers * like.dtype.itemsize

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
        leaf, words = self._pieces.to_step(name, array, None)
        self._digests |= _texts({name: words})
        return leaf

    def layer(self, name: str, index: int) -> jax.Array:
        """Layer `index` of a stack."""
        like = self._pieces.like(name, self._saved[name].dtype, layer=True)
        parts = self._read(name, lambda: self._reader.read(name, like, (index, *[0] * len(like.shape))))
        layer, words = self._pieces.to_step(name, joined(like, parts), index)
        self._layers.setdefault(name, {})[index] = words
        return layer

    def _read(self, name: str, read: Callable[[], Any]) -> Any:
        def attempt() -> Any:
            with reading(self._path, self._logical.abstract({name: self._saved[name]})):
                return read()

        return all_or_none(attempt)

    def check(self) -> None:
        """Raises DamagedCheckpointError unless all that was read has the digests that were saved."""
        for name, layers in self._layers.items():
            stack = jax.ShapeDtypeStruct(self._saved[name].shape, np.dtype(self._saved[name].dtype))
            self._digests |= _texts({name: join_layers([layers[index] for index in sorted(layers)], stack)})
        verify(self._path, self._saved, self._digests)


def _texts(words: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest_texts(np.asarray(each)[None])[0] for name, each in words.items()}


def _pieces_of(logical: LogicalState) -> LogicalPieces:
    """The `LogicalPieces` of a `LogicalState`, cached there: its conversions are compiled once."""
    attributes = vars(logical)
    if "_logical_pieces" not in attributes:
        attributes["_logical_pieces"] = LogicalPieces(logical)
    return attributes["_logical_pieces"]
