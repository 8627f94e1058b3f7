"""The arrays of a result, from the text of its shape: where they are in nested tuples, their bytes and memory space."""

import dataclasses
import functools
import math
import re

from zero_jax.hlo_text import shape_bytes

Path = tuple[int, ...]

_TOKEN = re.compile(r"[()]|([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\(([\d,]+)\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result. `bytes` counts the padding of its tiles, which TPUs have."""

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    space: int


@functools.cache
def arrays(shape_text: str) -> dict[Path, Array]:
    """The arrays of a shape, by their path in nested tuples."""
    found: dict[Path, Array] = {}
    path: list[int] = []
    next_index = [0]
    for token in _TOKEN.finditer(re.sub(r"/\*.*?\*/", "", shape_text)):
        if token[0] == "(":
            path.append(next_index[-1])
            next_index.append(0)
            continue
        if token[0] == ")":
            next_index.pop()
            path.pop()
        else:
            dims = tuple(int(dim.lstrip("<=")) for dim in token[2].split(",") if dim)
            found[(*path[1:], next_index[-1]) if path else ()] = _array(token[1], dims, token[3] or "")
        next_index[-1] += 1
    return found


def _array(dtype: str, dims: tuple[int, ...], layout: str) -> Array:
    order, _, rest = layout.partition(":")
    padded = list(dims)
    if (tile := _TILE.search(rest)) and dims:
        sizes = [int(size) for size in tile[1].split(",")]
        minor = [int(dim) for dim in order.split(",")]  # the fastest first
        for dim, size in zip(minor, reversed(sizes), strict=False):
            padded[dim] = math.ceil(padded[dim] / size) * size
    space = _SPACE.search(rest)
    return Array(dtype, dims, shape_bytes(dtype, tuple(padded)), int(space[1]) if space else 0)
