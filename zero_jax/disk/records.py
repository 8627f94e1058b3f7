"""What lies where in a file of states: records that are read and written at once, each of one block of some leaves."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from zero_jax.files import checksum

ALIGNMENT = 4096
"""Bytes that offsets and lengths of direct reads and writes are multiples of, on every disk that is in use."""

PART_ALIGNMENT = 64
"""Bytes that arrays inside a record are aligned to: a cache line."""


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
        for part in self._parts():
            ends = [first + size for first, size in zip(part.start, part.sizes, strict=True)]
            known = shapes.setdefault(part.leaf, {}).setdefault(part.shard, ends)
            shapes[part.leaf][part.shard] = [max(pair) for pair in zip(known, ends, strict=True)]
            dtypes[part.leaf] = part.dtype
        return {name: [dtypes[name], *[shards[key] for key in sorted(shards)]] for name, shards in shapes.items()}

    def fingerprint(self) -> str:
        """A checksum of where everything lies."""
        table = [[record.offset, record.num_bytes, record.once, [dataclasses.astuple(part) for part in record.parts]]
                 for record in self.records]
        return checksum(table)

    def _parts(self) -> Iterator[Part]:
        for record in self.records:
            yield from record.parts
