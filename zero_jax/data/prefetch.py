"""Batches that a thread reads ahead of the step, and how long the step waited for them."""

import collections
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from zero_jax.arguments import whole
from zero_jax.data.batches import NumberedBatches


class Prefetched:
    """The batches of `batches` from its position on, of which `depth` are read, and put on the devices, ahead.

    One thread reads and transfers them in order, so that at most `depth` batches are in device memory beside that of
    the step; depth=2 is a double buffer, and 0 reads each one when it is asked for. `batches.position` counts what was
    returned, not what was read ahead: its `state()` resumes with the next one; after a `seek` what was read ahead is
    dropped. Use it in a `with`, or call `close`. By hand and not grain's prefetching: its iterators are stateful and of
    one process each, whereas batches here are found by number, for which a queue of futures is enough.

    Attributes:
      waited: seconds that the last `next` waited for its batch.

    An error in reading is raised by the `next` of its batch, and the `next` after that reads it again.
    """

    def __init__(self, batches: NumberedBatches, *, depth: int = 2) -> None:
        self._batches, self._depth = batches, whole("depth", depth, 0)
        self._pending: collections.deque[Future[dict[str, Any]]] = collections.deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="zero_jax-prefetch") if self._depth else None
        self.waited, self._next = 0.0, batches.position

    def __enter__(self) -> "Prefetched":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next batch; `waited` says how long it took."""
        started, position = time.perf_counter(), self._batches.position
        if self._executor is None:
            batch = self._batches[position]
        else:
            if position != self._next:
                self._drop()
            while len(self._pending) < self._depth:
                self._read(position + len(self._pending))
            try:
                batch = self._pending.popleft().result()
            except BaseException:
                self._drop()  # whoever goes on gets this batch, and not the one after it
                raise
            self._read(position + self._depth)
        self._batches.seek(position + 1)
        self._next = position + 1
        self.waited = time.perf_counter() - started
        return batch

    def close(self) -> None:
        """Ends the thread; what was read ahead is dropped."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._pending.clear()

    def _drop(self) -> None:
        for future in self._pending:
            future.cancel()
        self._pending.clear()

    def _read(self, position: int) -> None:
        assert self._executor is not None
        self._pending.append(self._executor.submit(self._batches.__getitem__, position))


class StarvationMonitor:
    """Tells, once for each `window` steps, that steps wait for data longer than `fraction` of their time.

    >>> monitor = StarvationMonitor(window=2)
    >>> [bool(monitor.observe(waited=0.5, seconds=1.0)) for _ in range(4)]
    [False, True, False, True]
    """

    def __init__(self, *, window: int = 50, fraction: float = 0.1) -> None:
        self._window, self._fraction = whole("window", window, 1), fraction
        self._steps, self._waited, self._seconds = 0, 0.0, 0.0

    def observe(self, *, waited: float, seconds: float) -> str | None:
        """A message after the last step of a window that starved; waited: of the `seconds` that one step took."""
        self._steps, self._waited, self._seconds = self._steps + 1, self._waited + waited, self._seconds + seconds
        if self._steps < self._window:
            return None
        share, steps = self._waited / max(self._seconds, 1e-9), self._steps
        self._steps, self._waited, self._seconds = 0, 0.0, 0.0
        if share <= self._fraction:
            return None
        return (f"{100 * share:.0f} % of the last {steps} steps went into waiting for data: tokenize text beforehand "
                "(zero_jax tokenize), keep data on a faster disk, or prefetch more batches.")
