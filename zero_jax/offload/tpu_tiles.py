"""How XLA:TPU stores the last two dims of an array: in tiles, in the order of both that these pad least."""

from collections.abc import Sequence

TILE = 8, 128
"""Rows and columns of a tile of four bytes for each element, the dims of `minor_order`'s last two."""


def minor_order(shape: Sequence[int]) -> tuple[int, ...]:
    """The dims of a float32 array of `shape`, a device's shard, from the major to the minor one as XLA:TPU stores it.

    As libtpu 0.0.42.1 lays out what a program takes and returns: f32[12,128,2068] is {1,2,0}.
    """
    dims = tuple(range(len(shape)))
    if len(dims) < 2:
        return dims
    swapped = *dims[:-2], dims[-1], dims[-2]
    return swapped if padded(shape[-1], shape[-2]) < padded(*shape[-2:]) else dims


def padded(rows: int, columns: int) -> int:
    """Elements that a matrix takes in whole tiles."""
    high, wide = TILE
    return -(-rows // high) * high * -(-columns // wide) * wide
