"""How arrays that are streamed through a bounded buffer are cut: equal blocks of contiguous memory, and a rest."""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import JaxprEqn, bind_in_scope, primitive_of, scope_of, shape_of
from zero_jax.jaxpr.primitives import BROADCAST, IOTA, iota_dim

MAX_LEAVES = 8
"""Leaves that share a loop, at most: the blocks of more would be small, and a copy costs 10 microseconds at least."""

TILE = 32, 128
"""Rows and columns of a TPU's tiles of one byte for each element; those of 4 bytes have 8 rows."""

_Key = TypeVar("_Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of an array of `shape`, a device's shard: `rows` of dim 0, or one row cut in `splits` along dim 1."""

    shape: tuple[int, ...]
    rows: int
    splits: int = 1

    @property
    def count(self) -> int:
        """The number of equal blocks."""
        return self.shape[0] // self.rows * self.splits

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of a block."""
        if self.splits == 1:
            return self.rows, *self.shape[1:]
        return 1, self.shape[1] // self.splits, *self.shape[2:]

    def start(self, index: Any) -> tuple[Any, ...]:
        """Where block `index` begins, in each dim."""
        first, rest = (index * self.rows, ()) if self.splits == 1 else (
            index // self.splits, (index % self.splits * (self.shape[1] // self.splits),))
        return first, *rest, *[0] * (len(self.shape) - 1 - len(rest))

    @property
    def rest(self) -> "Blocks | None":
        """What is left after the equal blocks, as one block of fewer rows; None if nothing is."""
        left = self.shape[0] % self.rows
        return Blocks((left, *self.shape[1:]), left) if left else None

    def places(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(start, sizes) of each block in order, of the rest last."""
        rest = self.rest
        last = [] if rest is None else [((self.count * self.rows, *[0] * (len(self.shape) - 1)), rest.shape)]
        return [(self.start(index), self.sizes) for index in range(self.count)] + last

    @property
    def is_whole(self) -> bool:
        """Whether there is one block, the array."""
        return self.count == 1 and self.rest is None


def cut_in_loops(shapes: Mapping[_Key, tuple[int, ...]], sizes: Mapping[_Key, int], buffer_bytes: int, *,
                 tiled: bool = False) -> list[dict[_Key, Blocks]]:
    """Groups of leaves, each of which is streamed in one loop, and how it cuts each of its leaves.

    An iteration of a loop moves a block of each of its leaves: one is read while another is computed and a third is
    written. Leaves of at most a quarter of the buffer are moved whole (`Blocks.is_whole`), in groups that fill half of
    it.

    Args:
      shapes: of a device's shard.
      sizes: bytes that are read for each leaf.
      buffer_bytes: that an iteration may read.
      tiled: of a TPU, which stores the last two dims in tiles, in an order that it chooses so as to pad them least, and
        cannot write a part of a tile to host memory ("Lane slice updating is not supported", libtpu of jax 0.10.2):
        matrices of whole tiles, which need no padding in either order, are cut between tiles, other matrices are moved
        whole, and of stacks whole layers.
    """
    small = [key for key, size in sizes.items() if size <= buffer_bytes // 4
             or tiled and len(shapes[key]) < 3 and not _has_whole_tiles(shapes[key])]
    groups = [dict.fromkeys(keys) for keys in _filled(small, sizes, buffer_bytes // 2)]
    whole = [{key: Blocks(shapes[key], shapes[key][0]) for key in group} for group in groups]
    by_rows: dict[tuple[int, bool], list[_Key]] = {}
    for key in shapes:
        if key not in small:
            by_rows.setdefault((shapes[key][0], tiled and len(shapes[key]) == 2), []).append(key)
    loops = [keys[at : at + MAX_LEAVES] for keys in by_rows.values() for at in range(0, len(keys), MAX_LEAVES)]
    return [each for keys in loops for each in _loops(keys, shapes, sizes, buffer_bytes, tiled)] + whole


def _has_whole_tiles(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and all(size % part == 0 for size, part in zip(shape, TILE, strict=True))


def _loops(keys: Sequence[_Key], shapes: Mapping[_Key, tuple[int, ...]], sizes: Mapping[_Key, int], buffer_bytes: int,
           tiled: bool) -> list[dict[_Key, Blocks]]:
    """One loop over leaves of as many rows, or one for each where no rows or parts of rows fit the buffer together."""
    rows, row_bytes = shapes[keys[0]][0], sum(sizes[key] for key in keys) // max(1, shapes[keys[0]][0])
    if tiled and len(shapes[keys[0]]) == 2:
        bands, most = rows // TILE[0], buffer_bytes // max(1, row_bytes * TILE[0])
        size = max(n for n in range(1, max(1, min(bands, most)) + 1) if bands % n == 0) * TILE[0]
        return [{key: Blocks(shapes[key], size) for key in keys}]
    if row_bytes <= buffer_bytes:
        size = _block_rows(rows, max(1, min(rows, buffer_bytes // max(1, row_bytes))))
        return [{key: Blocks(shapes[key], size) for key in keys}]
    common = math.gcd(*(shapes[key][1] if len(shapes[key]) > 1 else 1 for key in keys))
    common = 1 if tiled else common
    splits = [n for n in range(2, common + 1) if common % n == 0 and row_bytes <= n * buffer_bytes]
    if splits:
        return [{key: Blocks(shapes[key], 1, splits[0]) for key in keys}]
    if len(keys) > 1:
        return [each for key in keys for each in _loops([key], shapes, sizes, buffer_bytes, tiled)]
    return [{keys[0]: Blocks(shapes[keys[0]], 1, common)}]


def _block_rows(rows: int, most: int) -> int:
    """The rows of a block, at most `most`: a divisor of `rows` if one is large enough, else equal blocks and a rest."""
    divisor = max(n for n in range(1, most + 1) if rows % n == 0)
    return divisor if 2 * divisor >= most else -(-rows // -(-rows // most))


def _filled(keys: Sequence[_Key], sizes: Mapping[_Key, int], limit: int) -> list[list[_Key]]:
    """`keys` in order, in groups of at most `limit` bytes."""
    groups: list[list[_Key]] = []
    left = 0
    for key in keys:
        if not groups or sizes[key] > left:
            groups.append([])
            left = limit
        groups[-1].append(key)
        left -= sizes[key]
    return groups


def bind_on_block(eqn: JaxprEqn, values: Sequence[Any], *, spec: P, shape: tuple[int, ...], start: Sequence[Any],
                  sizes: tuple[int, ...]) -> Sequence[Any]:
    """The results of `eqn` for the block of `sizes` at `start` of a shard.

    spec: how the whole array is sharded. shape: of a device's shard.
    """
    primitive = primitive_of(eqn)
    if primitive not in (BROADCAST, IOTA):
        return bind_in_scope(eqn, values)
    with jax.named_scope(scope_of(eqn)):
        if primitive == BROADCAST:
            return [jnp.broadcast_to(values[0], sizes)]
        dim, dtype = iota_dim(eqn), shape_of(eqn.outvars[0]).dtype
        entry = spec[dim] if dim < len(spec) else None
        first = 0 if entry is None else jax.lax.axis_index(entry) * shape[dim]
        return [jax.lax.broadcasted_iota(dtype, sizes, dim) + jnp.asarray(first + start[dim], dtype)]
