"""One shard of a stored leaf, read from just those slices of the logical leaf that it consists of."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zero_jax.sharding.stored_shape import StoredShape


def stored_part(shape: StoredShape, spans: Sequence[tuple[int, int]], dtype: Any,
                read: Callable[[tuple[slice, ...]], np.ndarray]) -> np.ndarray:
    """The part `spans` (start and stop in each stored dim) of a leaf stored in `shape`; padding is zeros.

    read: returns a slice of the logical leaf as `dtype`; it is called for no element outside of the result.
    """
    out = np.zeros([stop - start for start, stop in spans], dtype)
    boxes = [[*_boxes(group, start, max(start, min(stop, math.prod(group))))]
             for group, (start, stop) in zip(shape.dims, spans, strict=True)]
    for combination in itertools.product(*boxes):
        ends = [start + math.prod(way.stop - way.start for way in box) for start, box in combination]
        at = tuple(slice(start, end) for (start, _), end in zip(combination, ends, strict=True))
        out[at] = read(sum((box for _, box in combination), ())).reshape([way.stop - way.start for way in at])
    return out


def _boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """Boxes of exactly the row-major elements start to stop of dims `sizes`: (offset in the result, slices)."""
    if start == stop:
        return
    if len(sizes) <= 1:
        yield 0, (slice(start, stop),) if sizes else ()
        return
    inner, done = math.prod(sizes[1:]), 0
    while start < stop:
        row, begin = divmod(start, inner)
        if begin == 0 and stop - start >= inner:
            rows = (stop - start) // inner
            yield done, (slice(row, row + rows), *(slice(0, size) for size in sizes[1:]))
            end = start + rows * inner
        else:
            end = min(stop, (row + 1) * inner)
            for place, box in _boxes(sizes[1:], begin, begin + end - start):
                yield done + place, (slice(row, row + 1), *box)
        done, start = done + end - start, end
