"""The one parser of HLO shapes: element type, dimensions, layout with tiles, memory space, nested tuples.

`bf16[8,128]{1,0:T(8,128)(2,1)S(1)}` is an array of 8 x 128 in tiles of 8 x 128, in memory space 1; `(f32[2], s32[])`
is a tuple of two. Everything that reads shapes of compiled programs reads them here.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

Shape = tuple[str, tuple[int, ...]]
"""`(dtype, dims)`, the dtype in HLO's spelling: "bf16", "pred"."""
HOST = 5
"""The memory space of the host."""
Path = tuple[int, ...]
"""Index of an array in nested tuples; () where the shape is one array."""

_TOKEN = re.compile(r"[()]|([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\(([\d,]+)\)")
_DTYPE = re.compile(r"(?:bf|f|s|u|c)(\d+)(?:e\d+m\d+\w*)?")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


def shape_bytes(dtype: str, dims: tuple[int, ...]) -> int:
    """Bytes of one dense array; layout and tile padding do not count. s4 takes half a byte.

    Raises ValueError for an unknown dtype.
    """
    if dtype in ("token", "opaque"):
        return 0
    bits = _DTYPE.fullmatch(dtype)
    if bits is None and dtype != "pred":
        raise ValueError(f"unknown HLO dtype {dtype!r} of {dtype}{list(dims)}")
    return math.ceil(math.prod(dims) * (int(bits[1]) if bits else 8) / 8)


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
        dtype: HLO's name of the element type.
        dims: its dimensions; an upper bound where one is dynamic (`<=8`).
        minor_to_major: its dimensions in the order of memory, the fastest first; () without a layout.
        tile: the first level of tiling, over the most minor dimensions; () where there is none.
        space: memory space. 0: HBM. On TPU 1: VMEM, 5: host memory. On GPU 1: HBM for collectives, 5: host memory.
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @property
    def shape(self) -> Shape:
        """`(dtype, dims)`."""
        return self.dtype, self.dims

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def dense_bytes(self) -> int:
        """Bytes without padding."""
        return shape_bytes(self.dtype, self.dims)

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes in memory, with the padding of tiles, which TPUs have."""
        padded = list(self.dims)
        for dim, tile_size in zip(self.minor_to_major, reversed(self.tile), strict=False):
            padded[dim] = math.ceil(padded[dim] / tile_size) * tile_size
        return shape_bytes(self.dtype, tuple(padded))

    @property
    def in_hbm(self) -> bool:
        """Whether it is in HBM. Space 1 of a tiled layout is TPU's VMEM; GPU's layouts have no tiles."""
        return self.space == 0 or (self.space == 1 and not self.tile)


@functools.lru_cache(maxsize=65536)
def arrays(shape_text: str) -> Mapping[Path, Array]:
    """The arrays of a shape by their path in nested tuples, in the order of the text."""
    result: dict[Path, Array] = {}
    path: list[int] = []
    next_index = [0]
    for token in _TOKEN.finditer(_COMMENT.sub("", shape_text)):
        if token[0] == "(":
            path.append(next_index[-1])
            next_index.append(0)
            continue
        if token[0] == ")":
            next_index.pop()
            path.pop()
        else:
            result[(*path[1:], next_index[-1]) if path else ()] = _array(token[1], token[2], token[3] or "")
        next_index[-1] += 1
    return MappingProxyType(result)


def _array(dtype: str, dims: str, layout: str) -> Array:
    order, _, rest = layout.partition(":")
    tile, space = _TILE.search(rest), _SPACE.search(rest)
    sizes = tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
    return Array(dtype, sizes, integers(order), integers(tile[1]) if tile else (), int(space[1]) if space else 0)


def integers(text: str) -> tuple[int, ...]:
    """The whole numbers in `text`, such as a path `{1, 0}` or a list of dims."""
    return tuple(int(number) for number in re.findall(r"\d+", text))


def aliases(text: str) -> Iterator[tuple[Path, int, Path]]:
    """Aliases of results and operands, as (path of the result, number of the operand, its path).

    Args:
        text: the value of `input_output_alias` or `output_to_operand_aliasing`, or a text with one of them.
    """
    return ((integers(result), int(number), integers(operand)) for result, number, operand in _ALIAS.findall(text))
