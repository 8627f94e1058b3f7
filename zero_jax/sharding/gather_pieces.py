"""Whole weights, gathered in pieces into those of the step before.

What a SparseCore of a TPU writes is never a result of the program that replaces an argument: XLA copies the old weights
before the model reads them, and the new ones into their place, which takes memory (4.5 GB instead of 3.2 of temporaries
for 1.5B at stage 2 on eight v5p: docs/results.md). A piece is small, and is copied into the old weights. A v5e sends
each piece within the update of others: of whole stacks of weights the last would have none beside it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.lax import dynamic_update_slice_in_dim, slice_in_dim
from jax.lax import optimization_barrier as barrier
from jax.sharding import PartitionSpec as P

PIECE_BYTES = 2**25
"""Bytes on a device of what is gathered at a time, of a small model; of a large one `NUM_PIECES` decide."""
NUM_PIECES = 64
"""About so many are all leaves of a large model, since each takes time to compile."""
MIN_BYTES = 2**20
"""Of a leaf that is gathered in pieces; the others are gathered whole, as small as they are."""
IN_FLIGHT = 2
"""So many pieces may be sent, or wait to be copied, at a time: the memory that they take together."""
ALIGNED = 128
"""Of the last two dims of an array pieces have a multiple of so many elements, which are whole tiles of a TPU."""


class Piece(NamedTuple):
    """Elements `start` to `stop` of dim `dim` of the leaf `name`."""

    name: str
    dim: int
    start: int
    stop: int


def piece_bytes(total: int) -> int:
    """How large a piece is of leaves that take `total` bytes on a device."""
    return max(PIECE_BYTES, math.ceil(total / NUM_PIECES))


def cut(name: str, shape: Sequence[int], specs: Sequence[P], size: int, piece: int) -> list[Piece]:
    """The pieces of about `piece` bytes of a leaf of `size` on a device; none where it is small, or cannot be cut.

    specs: those with which it is sharded and gathered; a dim that either of them splits is not cut. At least two, since
    XLA takes one that is all of the leaf for the leaf.
    """
    for dim, length in enumerate(shape):
        aligned = ALIGNED if dim >= len(shape) - 2 else 1
        if size < MIN_BYTES or any(spec[dim] for spec in specs if dim < len(spec)) or length <= aligned:
            continue
        count = min(max(2, math.ceil(size / piece)), length)
        step = math.ceil(math.ceil(length / count) / aligned) * aligned
        return [Piece(name, dim, start, min(start + step, length)) for start in range(0, length, step)]
    return []


def gather_pieces(pieces: Sequence[Piece], shards: Mapping[str, jax.Array], into: Mapping[str, jax.Array],
                  gather: Callable[[str, jax.Array], jax.Array], begin: Callable[[str, jax.Array], jax.Array]
                  ) -> dict[str, jax.Array]:
    """`into`, whose leaves are whole, with `pieces` of `shards`, which `gather` gathers; traceable.

    One begins when the piece `IN_FLIGHT` before it is in its place, whichever leaves they are of.
    begin: what is done with a leaf's shards before its first piece, such as to gather them over some of the axes.
    """
    results, sent, begun = dict(into), list[tuple[Piece, jax.Array]](), dict[str, jax.Array]()

    def write() -> str:
        piece, value = sent.pop(0)
        results[piece.name] = dynamic_update_slice_in_dim(results[piece.name], value, piece.start, piece.dim)
        return piece.name

    for piece in pieces:
        written = write() if len(sent) == IN_FLIGHT else None

        def behind(value: jax.Array, written: str | None = written) -> jax.Array:
            if written is not None:
                value, results[written] = barrier((value, results[written]))
            return value

        if piece.name not in begun:
            begun[piece.name] = begin(piece.name, behind(shards[piece.name]))
        part = behind(slice_in_dim(begun[piece.name], piece.start, piece.stop, axis=piece.dim))
        sent.append((piece, gather(piece.name, part)))
    while sent:
        write()
    return results
