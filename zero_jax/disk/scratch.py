"""A file of records for what a process needs again before it ends: nothing is synced, and nothing is found later."""

import os
from collections.abc import Callable
from pathlib import Path

from zero_jax.disk.aligned_file import AlignedFile
from zero_jax.disk.records import Record, RecordLayout
from zero_jax.errors import DamagedCheckpointError, few

SCRATCH = "scratch.bin"
"""Its name, for as long as it takes to open it."""


class ScratchFile:
    """The records of one layout, which threads may write and read at once, each after it was written."""

    def __init__(self, folder: Path, layout: RecordLayout, after_damage: str):
        """Reserves the space in `folder`; raises CheckpointError where the disk has too little of it.

        after_damage: what to say of the state where a record is not as it was written.
        """
        self.layout, self._after_damage = layout, after_damage
        self._written: dict[int, str] = {}
        self._file = AlignedFile(folder / SCRATCH)
        self._file.open(layout.num_bytes, create=True)
        os.unlink(self._file.path)  # so that the space is free again however the process ends

    def read(self, record: Record, buffer: memoryview) -> None:
        """Reads a record; raises DamagedCheckpointError where it is not as it was written."""
        if self._file.read(record, buffer) != self._written[record.number]:
            raise DamagedCheckpointError(
                f"{self._file.path} is damaged: bytes {record.offset:,} to {record.offset + record.num_bytes:,}, which "
                f"hold {few(dict.fromkeys(part.leaf for part in record.parts), 3)}, are not what this step wrote "
                f"there: name another disk. {self._after_damage}")

    def write(self, record: Record, fill: Callable[[], memoryview]) -> None:
        """Writes a record from the buffer that `fill` returns."""
        self._written[record.number] = self._file.write(record, fill())

    @property
    def is_direct(self) -> bool:
        """Whether it was moved past the page cache."""
        return self._file.is_direct

    def sync(self) -> None:
        """Waits until all that was written is on the disk."""
        self._file.sync()

    def abandon(self) -> None:
        """Forgets what was written."""
        self._written = {}

    def close(self) -> None:
        """Closes the file, which frees its space."""
        self._file.close()
