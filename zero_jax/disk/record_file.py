"""Files of records: what is where in one, and how each record is read and written at once, with its checksum.

Access goes past the page cache where the file system allows it: states that are read once a step gain nothing from a
cache, which would fill the host's memory with them.
"""

import dataclasses
import errno
import itertools
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from zero_jax.errors import CheckpointError, DamagedCheckpointError
from zero_jax.files import checksum, retried

ALIGNMENT = 4096
"""Bytes that offsets and lengths of direct reads and writes are multiples of, on every disk that is in use."""

PART_ALIGNMENT = 64
"""Bytes that arrays inside a record are aligned to: a cache line."""

DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag of direct access; 0 where the system has none."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of a leaf's shard, contiguous in a record.

    Attributes:
        leaf: its name in the state.
        shard: number of the shard among those that this process stores.
        start, sizes: where the block is in the shard.
        dtype: as NumPy names it.
        offset: in the record.
    """

    leaf: str
    shard: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the block."""
        return math.prod(self.sizes) * np.dtype(self.dtype).itemsize

    @property
    def index(self) -> tuple[slice, ...]:
        """The block in its shard."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.sizes, strict=True))

    def view(self, buffer: memoryview) -> np.ndarray:
        """The block in a buffer that holds the record."""
        flat = np.frombuffer(buffer, np.uint8, self.num_bytes, self.offset)
        return flat.view(np.dtype(self.dtype)).reshape(self.sizes)


@dataclasses.dataclass(frozen=True)
class Record:
    """Blocks that are read and written at once.

    Attributes:
        number: its place among the records of the file.
        offset, num_bytes: in the file, multiples of `ALIGNMENT`.
        parts: what it holds.
        once: its contents never change: the first step of each generation writes it, and no other.
    """

    number: int
    offset: int
    num_bytes: int
    parts: tuple[Part, ...]
    once: bool = False


class RecordLayout:
    """The records of a file in order; `add` appends one."""

    def __init__(self) -> None:
        """Without records."""
        self.records: list[Record] = []
        self.num_bytes = 0

    def add(self, blocks: Iterable[tuple[str, int, Sequence[int], Sequence[int], str]], *, once: bool = False
            ) -> Record:
        """The next record, of (leaf, shard, start, sizes, dtype) for each block."""
        parts, size = [], 0
        for leaf, shard, start, sizes, dtype in blocks:
            part = Part(leaf, shard, tuple(start), tuple(sizes), dtype, size)
            parts.append(part)
            size += -(-part.num_bytes // PART_ALIGNMENT) * PART_ALIGNMENT
        size = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        record = Record(len(self.records), self.num_bytes, size, tuple(parts), once)
        self.records.append(record)
        self.num_bytes += record.num_bytes
        return record

    @property
    def largest(self) -> int:
        """Bytes of the largest record."""
        return max((record.num_bytes for record in self.records), default=0)

    def leaves(self) -> dict[str, list[object]]:
        """What a file of these records says of itself: for each leaf its dtype and its shards' shapes."""
        shapes: dict[str, dict[int, list[int]]] = {}
        dtypes: dict[str, str] = {}
        for part in itertools.chain.from_iterable(record.parts for record in self.records):
            ends = [first + size for first, size in zip(part.start, part.sizes, strict=True)]
            known = shapes.setdefault(part.leaf, {}).setdefault(part.shard, ends)
            shapes[part.leaf][part.shard] = [max(pair) for pair in zip(known, ends, strict=True)]
            dtypes[part.leaf] = part.dtype
        return {name: [dtypes[name], *[shards[key] for key in sorted(shards)]] for name, shards in shapes.items()}

    def fingerprint(self) -> str:
        """A checksum of where everything is."""
        return checksum([[record.offset, record.num_bytes, record.once, list(map(dataclasses.astuple, record.parts))]
                         for record in self.records])


def aligned_buffer(num_bytes: int) -> memoryview:
    """A buffer of its own pages."""
    return memoryview(mmap.mmap(-1, max(num_bytes, ALIGNMENT)))


class AlignedFile:
    """A file of fixed size; several threads may read and write different records at once."""

    def __init__(self, path: Path):
        """Nothing is opened yet."""
        self.path = path
        self._descriptor = -1
        self.is_direct = False

    def open(self, num_bytes: int, *, create: bool = False) -> None:
        """Opens the file, with `create` as one whose `num_bytes` bytes are reserved on the disk.

        Raises CheckpointError where the disk is too small or the file cannot be opened, and DamagedCheckpointError
        where a file to be read is gone or has another size.
        """
        self.close()
        flags = os.O_RDWR | (os.O_CREAT if create else 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            self._descriptor = self._direct(flags) if create else retried(lambda: self._direct(flags), what=self.path)
            if create:
                os.ftruncate(self._descriptor, num_bytes)
                if hasattr(os, "posix_fallocate") and num_bytes:
                    os.posix_fallocate(self._descriptor, 0, num_bytes)
        except OSError as error:
            self.close()
            if create:
                raise unwritten(self.path, error, num_bytes) from error
            raise DamagedCheckpointError(f"{self.path} is gone ({error}).") from error
        if (size := os.fstat(self._descriptor).st_size) != num_bytes:
            self.close()
            raise DamagedCheckpointError(f"{self.path} has {size:,} bytes, and {num_bytes:,} were written.")

    def _direct(self, flags: int) -> int:
        """A descriptor, of direct access if the file system has it: some refuse at once, some the first read."""
        try:
            descriptor = os.open(self.path, flags | DIRECT, 0o600)
        except OSError as error:
            if not DIRECT or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return os.open(self.path, flags, 0o600)
        self.is_direct = bool(DIRECT)
        return descriptor

    def is_there(self) -> bool:
        """Whether the open file is still the one at its path: what is written to another is lost."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def read(self, record: Record, buffer: memoryview) -> str:
        """Reads a record into `buffer`, and returns its checksum, of the padding, too.

        Raises CheckpointError where it cannot be read, and DamagedCheckpointError where the file ends before.
        """
        retried(lambda: self._whole(os.preadv, record, buffer), what=f"{self.path} at byte {record.offset:,}")
        return checksum(buffer[:record.num_bytes])

    def write(self, record: Record, buffer: memoryview) -> str:
        """Writes a record from `buffer`, and returns its checksum; raises CheckpointError where it cannot."""
        value = checksum(buffer[:record.num_bytes])
        try:
            self._whole(os.pwritev, record, buffer)
        except OSError as error:
            raise unwritten(self.path, error, record.num_bytes) from error
        return value

    def sync(self) -> None:
        """Waits until all that was written is on the disk."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise unwritten(self.path, error, 0) from error

    def close(self) -> None:
        """Closes the file; once is enough."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _whole(self, move: object, record: Record, buffer: memoryview) -> None:
        """Moves all bytes of a record: a call may move fewer, and a file system may refuse direct access late."""
        done = 0
        while done < record.num_bytes:
            rest = buffer[done:record.num_bytes]
            try:
                count = move(self._descriptor, [rest], record.offset + done)  # type: ignore[operator]
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self._without_direct()
                continue
            if not count:
                raise DamagedCheckpointError(f"{self.path} ends before byte {record.offset + record.num_bytes:,}.")
            done += count
            if done % ALIGNMENT and self.is_direct:  # the rest cannot be moved directly
                self._without_direct()

    def _without_direct(self) -> None:
        import fcntl

        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~DIRECT)
        self.is_direct = False


def unwritten(path: Path, error: OSError, num_bytes: int) -> CheckpointError:
    """What to say where a file of states cannot be written."""
    cures = {errno.ENOSPC: "free space on that disk", errno.EDQUOT: "raise the quota",
             errno.EFBIG: "raise the limit on the size of a file", errno.EACCES: "allow it",
             errno.EROFS: "name a folder on a disk that can be written"}
    size = f"{num_bytes:,} bytes of " if num_bytes else ""
    return CheckpointError(
        f"{size}{path} cannot be written ({error.strerror or error}): {cures.get(error.errno or 0, 'mend the disk')}, "
        "or name another folder as disk=. What was committed before is unchanged.")
