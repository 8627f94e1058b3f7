"""How one leaf is divided over mesh axes: which dims, and what is merged or padded where they do not divide."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

from jax.sharding import PartitionSpec as P

from zero_jax.mesh import TENSOR, fills_tiles
from zero_jax.reads import Read
from zero_jax.view import View, natural

OWNED = "owned"
"""In the names of optimizer states whose first dim is spread over the devices, whatever their shape."""

SMALL_LEAF = 2**14
"""Bytes: the largest parameter that may stay whole where its dims do not divide."""

SMALL_SHARE = 1 / 200
"""Of a device's part of all parameters: what those that stay whole may take together."""

CLOSE = 1e-3
"""Share of a leaf: so much more padding is no reason to merge dims."""

ROWS = ((1024, CLOSE), (128, 5 * CLOSE), (1, 1.0))
"""Of merged dims on a TPU: what a part should be a multiple of, and the share of the leaf that this may pad.

Measured on v5e: parts of whole rows of 128 values are gathered, others all-reduced: twice the bytes.
"""


@dataclasses.dataclass(frozen=True)
class Split:
    """The dim of a leaf that tensor parallelism splits, and into how many parts; ZeRO divides what each device has."""

    dim: int
    ways: int

    def local(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What each device has of `shape`."""
        return (*shape[:self.dim], shape[self.dim] // self.ways, *shape[self.dim + 1:])

    def whole(self, view: View) -> View:
        """The view of all of a leaf, from that of what each device has of it."""
        sizes, stored = list(view.dims), list(view.stored)
        sizes[self.dim], stored[self.dim] = (view.shape[self.dim] * self.ways,), stored[self.dim] * self.ways
        return View(tuple(sizes), tuple(stored))

    def spec(self, spec: P) -> P:
        """`spec` of what each device has, as one of the whole leaf."""
        entry = spec[self.dim]
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        return P(*spec[:self.dim], (TENSOR, *names) if names else TENSOR, *spec[self.dim + 1:])


def choose_spec(shape: tuple[int, ...], sizes: Mapping[str, int], read: Read | None = None, *,
                tiled: bool = False, split: Split | None = None) -> P:
    """The storage spec of a leaf over mesh axes of `sizes`: in as many parts as its dims allow.

    Never a dim over which a loop of the model's runs: each slice would lie on one device. Then the fewest dims; on a
    TPU (`tiled`) shards that fill tiles, since others are padded to be scattered, and a dim for each axis.
    """
    if split:
        return split.spec(choose_spec(split.local(shape), sizes, read, tiled=tiled))
    stacked = () if read is None else read.stacked
    return _spec(_choose_dims(shape, tuple(item for item in sizes.items() if item[1] > 1), stacked, tiled))


def choose_view(shape: tuple[int, ...], sizes: Mapping[str, int], read: Read | None = None, *, tiled: bool = False,
                merge: bool = True, split: Split | None = None) -> tuple[View, P]:
    """How a leaf is stored and divided over mesh axes of `sizes`: as it is where its dims divide, else in fewest bytes.

    merge: whether dims may be merged, for which all uses of the leaf must be elementwise; no dim is merged, and none
    padded that is split. What cannot be divided at all (a scalar, a leaf whose every dim a loop runs over) is stored
    as it is.
    """
    stacked = () if read is None else read.stacked
    if split:
        local = split.local(shape)
        spec = choose_spec(local, sizes, read, tiled=tiled)
        if parts_of(spec, sizes) == math.prod(sizes.values()):
            return natural(shape), split.spec(spec)
        view, spec = choose_view(local, sizes, Read((*stacked, split.dim)), tiled=tiled, merge=False)
        return split.whole(view), split.spec(spec)
    spec, axes = choose_spec(shape, sizes, read, tiled=tiled), tuple(item for item in sizes.items() if item[1] > 1)
    ways, size = math.prod(sizes.values()), math.prod(shape)
    if size <= 1 or parts_of(spec, sizes) == ways or len(set(stacked)) == len(shape):
        return natural(shape), spec
    view, dims = _padded(shape, axes, stacked, tiled)
    kept = len(stacked)
    if merge and stacked == tuple(range(kept)) and len(shape) > kept + 1:
        merged = _rounded(math.prod(shape[kept:]), ways, tiled)
        flat = View((*((size,) for size in shape[:kept]), shape[kept:]), (*shape[:kept], merged))
        if flat.padding + CLOSE * size < view.padding:
            view, dims = flat, (*[()] * kept, tuple(name for name, _ in axes))
    return view, _spec(dims)


def _rounded(size: int, ways: int, tiled: bool) -> int:
    """`size` or little more, so that it divides by `ways`; on a TPU in parts of whole rows, where those cost little."""
    sizes = [(-(-size // (ways * row)) * ways * row, share) for row, share in (ROWS if tiled else ROWS[-1:])]
    return next(padded for padded, share in sizes if padded - size <= share * size or share == 1)


def parts_of(spec: P, sizes: Mapping[str, int]) -> int:
    """Into how many parts `spec` divides an array."""
    names = (name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry))
    return math.prod(sizes[name] for name in names if name in sizes)


def _spec(dims: tuple[tuple[str, ...], ...]) -> P:
    return P(*[None if not entry else entry[0] if len(entry) == 1 else entry for entry in dims])


@functools.cache
def _choose_dims(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...], stacked: tuple[int, ...],
                 tiled: bool) -> tuple[tuple[str, ...], ...]:
    """For each dim the axes that split it."""
    dims = [dim for dim, size in enumerate(shape) if size and dim not in stacked]

    def rank(choice: tuple[int | None, ...]) -> tuple[object, ...]:
        used = sorted({dim for dim in choice if dim is not None})
        ways = {dim: _ways(choice, dim, sizes) for dim in used}
        ragged = _ragged(shape, ways, tiled)
        cost = (ragged, -len(used)) if tiled else (len(used), ragged)
        return -math.prod(ways.values()), *cost, [-1 if dim is None else dim for dim in choice]

    fitting = (choice for choice in itertools.product([None, *dims], repeat=len(sizes))
               if all(shape[dim] % _ways(choice, dim, sizes) == 0 for dim in dims))
    return _by_dim(min(fitting, key=rank), len(shape), sizes)


@functools.cache
def _padded(shape: tuple[int, ...], sizes: tuple[tuple[str, int], ...], stacked: tuple[int, ...],
            tiled: bool) -> tuple[View, tuple[tuple[str, ...], ...]]:
    """The view with every axis on some dim, dims padded to divide, and the axes of each dim: the least padding."""
    dims = [dim for dim, size in enumerate(shape) if size and dim not in stacked]

    def view(choice: tuple[int, ...]) -> View:
        ways = [_ways(choice, dim, sizes) for dim in range(len(shape))]
        return View(natural(shape).dims, tuple(-(-size // way) * way for size, way in zip(shape, ways, strict=True)))

    def rank(choice: tuple[int, ...]) -> tuple[object, ...]:
        stored, used = view(choice), sorted(set(choice))
        ragged = _ragged(stored.stored, {dim: _ways(choice, dim, sizes) for dim in used}, tiled)
        return stored.padding, len(used), ragged, choice

    best = min(itertools.product(dims, repeat=len(sizes)), key=rank)
    return view(best), _by_dim(best, len(shape), sizes)


def _ways(choice: tuple[int | None, ...], dim: int, sizes: tuple[tuple[str, int], ...]) -> int:
    return math.prod(size for (_, size), chosen in zip(sizes, choice, strict=True) if chosen == dim)


def _ragged(shape: tuple[int, ...], ways: Mapping[int, int], tiled: bool) -> int:
    """How many of the dims that are split have parts which do not fill tiles, or are no multiples of 16."""
    return sum(not fills_tiles(shape[dim] // way) if tiled
               else shape[dim] // way % 16 != 0 for dim, way in ways.items())


def _by_dim(choice: tuple[int | None, ...], ndim: int, sizes: tuple[tuple[str, int], ...]
            ) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(name for (name, _), chosen in zip(sizes, choice, strict=True) if chosen == dim)
                 for dim in range(ndim))
