"""How one leaf is sharded over mesh axes: which dims, and what is merged or padded where they do not divide."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import PartitionSpec as P

from zero_jax.sharding.mesh import fills_tiles
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.sharding.stored_shape import StoredShape, identity_shape
from zero_jax.typing import AxisNames

OWNED = "owned"
"""In the names of optimizer states whose first dim is spread over the devices, whatever their shape."""

BLOCK_SCALES = "block_scales"
"""In the names of optimizer states with a number for each block of a parameter's last dim, which is not sharded."""

SMALL_LEAF = 2**14
"""Bytes of the largest parameter that may stay replicated where its dims do not divide."""

SMALL_SHARE = 1 / 200
"""The share of a device's part of all parameters that the replicated small ones may take together."""

CLOSE = 1e-3
"""Share of a leaf: dims are merged only if that saves more padding than this."""

MAX_MERGED = 2**31 - 1
"""Elements of a merged dim: positions in it are counted in int32."""

ROWS = ((1024, CLOSE), (128, 5 * CLOSE), (1, 1.0))
"""For merged dims on a TPU: what the size of a shard should be a multiple of, and the share of padding this may cost.

Measured on v5e: shards of full rows of 128 values are all-gathered, others all-reduced: twice the bytes.
"""

TILE_MULTIPLES = (16, 256)
"""For dims that are padded on a TPU so that shards fill tiles: what a shard's rows, and its columns, are multiples of.

Measured: shards of a matrix that do not (96 of the 768 columns of an embedding of 50,257 rows) are sent as flat
arrays. XLA takes 3 to 10 s to compile each reshape between the two, and makes slow loops of them.
"""

MAX_TILE_PADDING = 5 * CLOSE
"""Share of a leaf that the padding which fills tiles may take."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The dim of a leaf that tensor parallelism splits, and over how many devices of `axis`; ZeRO shards each part."""

    dim: int
    num_shards: int
    axis: str

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one part of a leaf of `shape`."""
        return (*shape[:self.dim], shape[self.dim] // self.num_shards, *shape[self.dim + 1:])

    def all_parts(self, part: StoredShape) -> StoredShape:
        """The stored shape of the leaf, from that of one part."""
        sizes, stored = list(part.dims), list(part.stored)
        sizes[self.dim] = (part.shape[self.dim] * self.num_shards,)
        stored[self.dim] *= self.num_shards
        return StoredShape(tuple(sizes), tuple(stored))

    def spec(self, spec: P) -> P:
        """The spec of the leaf, from that of one part."""
        return P(*spec[:self.dim], (self.axis, *axes_by_dim(spec)[self.dim]), *spec[self.dim + 1:])


def choose_spec(shape: tuple[int, ...], sizes: Mapping[str, int], read: ParamAccess | None = None, *,
                tiled: bool = False, split: Split | None = None) -> P:
    """The storage spec of a leaf over mesh axes of `sizes`: as many shards as its dims allow.

    Never a dim over which a loop of the model runs: each slice would be on one device. Then the fewest dims; on a TPU
    (`tiled`) shards that fill tiles, since others are padded to be scattered, and a dim for each axis.
    """
    if split:
        return split.spec(choose_spec(split.local(shape), sizes, read, tiled=tiled))
    stacked = () if read is None else read.undivided
    return P(*_choose_dims(shape, tuple(item for item in sizes.items() if item[1] > 1), stacked, tiled))


def choose_stored_shape(shape: tuple[int, ...], sizes: Mapping[str, int], read: ParamAccess | None = None, *,
                        tiled: bool = False, merge: bool = True, split: Split | None = None) -> tuple[StoredShape, P]:
    """How a leaf is stored and sharded over mesh axes of `sizes`: as it is where its dims divide, else in fewest bytes.

    On a TPU (`tiled`) also padded where its shards would else not fill tiles, if that takes little.

    merge: whether dims may be merged, for which all uses of the leaf must be elementwise; no dim is merged, and none
    padded that is split. What cannot be sharded at all (a scalar, a leaf all of whose dims loops run over) is stored
    as it is.
    """
    stacked = () if read is None else read.undivided
    if split:
        local = split.local(shape)
        spec = choose_spec(local, sizes, read, tiled=tiled)
        if parts_of(spec, sizes) == math.prod(sizes.values()):
            return identity_shape(shape), split.spec(spec)
        part, spec = choose_stored_shape(local, sizes, ParamAccess((*stacked, split.dim)), tiled=tiled, merge=False)
        return split.all_parts(part), split.spec(spec)
    spec, axes = choose_spec(shape, sizes, read, tiled=tiled), tuple(item for item in sizes.items() if item[1] > 1)
    num_shards, size = math.prod(sizes.values()), math.prod(shape)
    if tiled and (padded := _padded_to_tiles(shape, axes, stacked)):
        return padded[0], P(*padded[1])
    if size <= 1 or parts_of(spec, sizes) == num_shards or len(set(stacked)) == len(shape):
        return identity_shape(shape), spec
    stored_shape, dims = _padded(shape, axes, stacked, tiled)
    loops = len(stacked)
    if merge and stacked == tuple(range(loops)) and len(shape) > loops + 1:
        merged_size = _rounded(math.prod(shape[loops:]), num_shards, tiled)
        merged = StoredShape((*((size,) for size in shape[:loops]), shape[loops:]), (*shape[:loops], merged_size))
        if merged_size <= MAX_MERGED and merged.padding + CLOSE * size < stored_shape.padding:
            stored_shape, dims = merged, (*[()] * loops, tuple(name for name, _ in axes))
    return stored_shape, P(*dims)


def _rounded(size: int, num_shards: int, tiled: bool) -> int:
    """`size` rounded up to a multiple of `num_shards`; on a TPU to shards of full rows where that costs little."""
    sizes = [(-(-size // (num_shards * row)) * num_shards * row, share)
              for row, share in (ROWS if tiled else ROWS[-1:])]
    return next(padded for padded, share in sizes if padded - size <= share * size or share == 1)


def axes_by_dim(spec: P, ndim: int = 0) -> list[AxisNames]:
    """For each dim the mesh axes that split it, major first; of at least `ndim` dims."""
    entries = (*spec, *[None] * (ndim - len(spec)))
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries]


def names_of(spec: P) -> list[str]:
    """The mesh axes of a spec, the major first."""
    return [name for names in axes_by_dim(spec) for name in names]


def parts_of(spec: P, sizes: Mapping[str, int]) -> int:
    """The number of shards into which `spec` divides an array."""
    return math.prod(sizes[name] for name in names_of(spec) if name in sizes)


@functools.cache
def _choose_dims(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...], stacked: tuple[int, ...],
                 tiled: bool) -> tuple[AxisNames, ...]:
    """For each dim the axes that split it."""
    dims = [dim for dim, size in enumerate(shape) if size and dim not in stacked]

    def rank(choice: tuple[int | None, ...]) -> tuple[object, ...]:
        used = sorted({dim for dim in choice if dim is not None})
        num_shards = {dim: _num_shards(choice, dim, sizes) for dim in used}
        ragged = _ragged(shape, num_shards, tiled)
        cost = (ragged, -len(used)) if tiled else (len(used), ragged)
        return -math.prod(num_shards.values()), *cost, [-1 if dim is None else dim for dim in choice]

    fitting = (choice for choice in itertools.product([None, *dims], repeat=len(sizes))
               if all(shape[dim] % _num_shards(choice, dim, sizes) == 0 for dim in dims))
    return _by_dim(min(fitting, key=rank), len(shape), sizes)


@functools.cache
def _padded(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...], stacked: tuple[int, ...],
            tiled: bool) -> tuple[StoredShape, tuple[AxisNames, ...]]:
    """The stored shape of least padding with every axis on some dim, no dims merged; and the axes of each dim."""
    dims = [dim for dim, size in enumerate(shape) if size and dim not in stacked]

    def rank(choice: tuple[int, ...]) -> tuple[object, ...]:
        stored, used = _padded_shape(shape, choice, sizes), sorted(set(choice))
        ragged = _ragged(stored.stored, {dim: _num_shards(choice, dim, sizes) for dim in used}, tiled)
        return stored.padding, len(used), ragged, choice

    best = min(itertools.product(dims, repeat=len(sizes)), key=rank)
    return _padded_shape(shape, best, sizes), _by_dim(best, len(shape), sizes)


@functools.cache
def _padded_to_tiles(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...], stacked: tuple[int, ...]
                     ) -> tuple[StoredShape, tuple[AxisNames, ...]] | None:
    """The stored shape of least padding whose shards fill tiles, no dims merged; and the axes of each dim.

    None where that takes more than `MAX_TILE_PADDING`, for vectors, and where shards of the true shape fill tiles.
    """
    dims = [dim for dim, size in enumerate(shape) if size and dim not in stacked]
    if len(dims) < 2 or not sizes:
        return None

    def padded_shape(choice: tuple[int, ...]) -> StoredShape:
        return _padded_shape(shape, choice, sizes, {
            dim: TILE_MULTIPLES[dim == len(shape) - 1] for dim in choice})

    best = min(itertools.product(dims, repeat=len(sizes)),
               key=lambda choice: (padded_shape(choice).padding, -len(set(choice)), choice))
    if not 0 < padded_shape(best).padding <= MAX_TILE_PADDING * math.prod(shape):
        return None
    return padded_shape(best), _by_dim(best, len(shape), sizes)


def _padded_shape(shape: tuple[int, ...], choice: tuple[int, ...], sizes: tuple[tuple[str, int], ...],
                  multiples: Mapping[int, int] = MappingProxyType({})) -> StoredShape:
    """`shape` padded so that it divides over the axes as chosen, into shards whose dims are such multiples."""
    parts = [_num_shards(choice, dim, sizes) * multiples.get(dim, 1) for dim in range(len(shape))]
    return StoredShape(identity_shape(shape).dims, tuple(
        -(-size // part) * part for size, part in zip(shape, parts, strict=True)))


def _num_shards(choice: tuple[int | None, ...], dim: int, sizes: tuple[tuple[str, int], ...]) -> int:
    return math.prod(size for (_, size), chosen in zip(sizes, choice, strict=True) if chosen == dim)


def _ragged(shape: tuple[int, ...], num_shards: Mapping[int, int], tiled: bool) -> int:
    """How many of the dims that are split have parts which do not fill tiles, or are no multiples of 16."""
    return sum(not fills_tiles(shape[dim] // shards) if tiled else shape[dim] // shards % 16 != 0
               for dim, shards in num_shards.items())


def _by_dim(choice: tuple[int | None, ...], ndim: int, sizes: tuple[tuple[str, int], ...]
            ) -> tuple[AxisNames, ...]:
    return tuple(tuple(name for (name, _), chosen in zip(sizes, choice, strict=True) if chosen == dim)
                 for dim in range(ndim))
