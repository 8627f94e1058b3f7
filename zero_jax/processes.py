"""Agreement between the processes of a run; with one process nothing is sent."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")


def is_first() -> bool:
    """Whether this process is the one that does what is done once."""
    return jax.process_index() == 0


def told_by_first(numbers: Sequence[int]) -> list[int]:
    """The first process's `numbers`, on all."""
    if jax.process_count() == 1:
        return list(numbers)
    (count,) = multihost_utils.broadcast_one_to_all(np.array([len(numbers)], np.int32))
    mine = np.zeros((int(count), 2), np.uint32)
    if not mine.size:
        return []
    if is_first():
        mine[:] = [(number >> 32, number & 0xFFFFFFFF) for number in numbers]
    return [(int(high) << 32) + int(low) for high, low in multihost_utils.broadcast_one_to_all(mine)]


def all_or_none(do: Callable[[], T]) -> T:
    """`do()`, which raises on every process if it raises on any: none goes on alone."""
    error: Exception | None = None
    result: T | None = None
    try:
        result = do()
    except Exception as found:
        error = found
    if jax.process_count() > 1:
        failed = np.flatnonzero(multihost_utils.process_allgather(np.array(error is not None)))
        if error is None and failed.size:
            raise RuntimeError(f"Process {failed[0]} failed: see what it says.")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
