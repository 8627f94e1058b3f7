"""One shard of a stored leaf, read from just those slices of the logical leaf that it consists of."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.errors import UsageError
from zero_jax.sharding.stored_shape import StoredShape
from zero_jax.typing import DType, Shape


@dataclasses.dataclass(frozen=True)
class UnreadLeaf:
    """A logical leaf that is read part by part, as from a file.

    name: of its source, for messages. open: begins to read it, and returns a function of an index (slices with start
    and stop) to that part, as `dtype`; what that function keeps lives until all parts were read.
    """

    name: str
    shape: Shape
    dtype: DType
    open: Callable[[], Callable[[tuple[slice, ...]], np.ndarray]]

    def stored(self, shape: StoredShape, like: jax.ShapeDtypeStruct) -> jax.Array:
        """The stored array, each shard read by itself and those that several devices store once."""
        shards: dict[Any, np.ndarray] = {}
        read = self.open()

        def part(index: Any) -> np.ndarray:
            spans = tuple(way.indices(size)[:2] for way, size in zip(index, like.shape, strict=True))
            if spans not in shards:
                shards[spans] = stored_part(shape, spans, like.dtype, lambda at: self._converted(read(at), like.dtype))
            return shards[spans]

        return jax.make_array_from_callback(like.shape, like.sharding, part)

    def _converted(self, value: np.ndarray, dtype: DType) -> np.ndarray:
        with np.errstate(over="ignore"):
            converted = value.astype(dtype, copy=False)
        if value.dtype != dtype and np.isinf(converted).any() and not np.isinf(value).any():
            raise UsageError(f"{self.name} holds {float(np.abs(value).max()):g}, beyond the range of {dtype}: choose "
                             "another precision.")
        return converted


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
