"""Records read ahead of those that use them, and written after them, by threads with a bounded number of buffers.

Direct reads and writes, checksums and copies release Python's lock, so that threads are enough: two of each reach what
`fio` does with the same pattern (`scripts/bench/disk.py`).
"""

import collections
import contextlib
import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from zero_jax.disk.record_file import Record, RecordLayout, aligned_buffer

T = TypeVar("T")

THREADS = 2
"""Of reads and of writes each: one record is moved while the next one's checksum is computed."""

AHEAD = 2
"""Records that are read before they are asked for, and that may wait to be written."""


class RecordFiles(Protocol):
    """Where records are: `Generations`, or the file that measures a disk (`planning.disk_rate`)."""

    layout: RecordLayout

    def read(self, record: Record, buffer: memoryview) -> None:
        """Reads a record that was written."""

    def write(self, record: Record, fill: Callable[[], memoryview]) -> None:
        """Writes a record from the buffer that `fill` returns."""

    def abandon(self) -> None:
        """Forgets what was written last, and is not whole."""

    def close(self) -> None:
        """Closes the files."""


class Streaming:
    """Reads and writes records; one step at a time uses it."""

    def __init__(self, files: RecordFiles):
        """Starts no thread yet; pages of the buffers take memory once they are used."""
        self.files = files
        self._readers = ThreadPoolExecutor(THREADS, "zero_jax disk reader")
        self._writers = ThreadPoolExecutor(THREADS, "zero_jax disk writer")
        self._buffers = {kind: queue.SimpleQueue[memoryview]() for kind in ("read", "write")}
        for free in self._buffers.values():
            for _ in range(THREADS):
                free.put(aligned_buffer(files.layout.largest))
        self._pending = collections.deque[Future[None]]()

    @property
    def ring_bytes(self) -> int:
        """The most that records take in memory at a time: in buffers, and as arrays that wait, in use or written."""
        return (2 * THREADS + 2 * AHEAD + 1) * self.files.layout.largest

    @contextlib.contextmanager
    def read(self, records: Sequence[Record], use: Callable[[Record, memoryview], T]) -> Iterator[Iterator[T]]:
        """In it, `use(record, buffer)` for each record, as it is read, in order; it copies what it needs.

        Reading starts at once, and goes on while the caller works; at most `AHEAD` results wait. At the end of the
        `with` what was not asked for is dropped.
        """
        todo, pending = iter(records), collections.deque[Future[T]]()

        def one(record: Record) -> T:
            with self.buffer() as buffer:
                self.files.read(record, buffer)
                return use(record, buffer)

        def start(number: int) -> None:
            pending.extend(self._readers.submit(one, record) for record in itertools.islice(todo, number))

        def results() -> Iterator[T]:
            while pending:
                result = pending.popleft().result()
                start(1)
                yield result

        start(AHEAD)
        try:
            yield results()
        finally:
            for future in pending:
                if not future.cancel():
                    future.exception()

    def write(self, record: Record, fill: Callable[[Record, memoryview], None]) -> None:
        """Writes a record, which `fill(record, buffer)` copies into a buffer of zeros or more.

        At most `AHEAD` records wait; raises what an earlier one met.
        """
        while len(self._pending) >= AHEAD:
            self._pending.popleft().result()

        def one() -> None:
            with self.buffer("write") as buffer:
                def filled() -> memoryview:
                    fill(record, buffer)
                    return buffer

                self.files.write(record, filled)

        self._pending.append(self._writers.submit(one))

    def finish(self) -> None:
        """Waits for all writes; raises what one of them met."""
        while self._pending:
            self._pending.popleft().result()

    @contextlib.contextmanager
    def abandoned_by_errors(self) -> Iterator[None]:
        """At the end of the `with` by an error, waits for all writes, and forgets what is not whole."""
        try:
            yield
        except BaseException:
            while self._pending:
                self._pending.popleft().exception()
            self.files.abandon()
            raise

    def close(self) -> None:
        """Ends the threads and closes the files."""
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown()
        self._buffers = {}
        self.files.close()

    @contextlib.contextmanager
    def buffer(self, kind: str = "read") -> Iterator[memoryview]:
        """A buffer of the size of the largest record, for the time of a `with`; kind: of those to "read" or "write"."""
        free = self._buffers[kind]
        buffer = free.get()
        try:
            yield buffer
        finally:
            free.put(buffer)
