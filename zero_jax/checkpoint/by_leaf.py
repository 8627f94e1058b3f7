"""Checkpoints of states in files, saved and restored leaf by leaf, so that the whole of them is in no memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zero_jax.checkpoint.integrity import read_arrays, verify
from zero_jax.checkpoint.logical_state import LogicalState
from zero_jax.checkpoint.manifest import Leaf, Manifest
from zero_jax.checkpoint.orbax_files import ArrayWriter
from zero_jax.distributed.agreement import all_or_none
from zero_jax.step.disk.records import chunks


class LeavesToSave:
    """The leaves in files of a state, for `orbax_store.write`. names: of those with elements."""

    def __init__(self, logical: LogicalState, files: Any, names: Sequence[str], manifest: Manifest,
                 digests: dict[str, str]):
        """files: as `step.in_files` returns them. names: of what is to be saved, in memory or in files.

        digests: by name, those of leaves in memory, when `write` is called.
        """
        self._logical, self._files, self._manifest, self._digests = logical, files, manifest, digests
        self._names = sorted(files.layout.disk.intersection(names))
        self._likes = logical.abstract(logical.leaves(self._names))
        self.names = tuple(self._likes)

    def write(self, folder: Any) -> dict[str, Any]:
        """Writes them, and returns the manifest. Every process calls this."""
        writer = all_or_none(lambda: ArrayWriter(folder, self._likes))
        # Some at a time, which take no more of a device than the largest of them.
        for names in chunks(self._names, {name: self._files.leaves[name].like for name in self._names}):
            leaves, arrays = self._files.read_leaves(names), dict[str, jax.Array]()
            for name in names:
                saved, digests = self._logical.from_leaves({name: leaves.pop(name)})
                arrays |= saved
                self._digests |= digests
            all_or_none(lambda arrays=arrays: writer.write(arrays))
        all_or_none(writer.finish)
        return self._manifest.to_json(self._digests)


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

    def check(self) -> None:
        """Raises DamagedCheckpointError unless all that was read has the digests that were saved."""
        verify(self._path, self._saved, self._digests)
