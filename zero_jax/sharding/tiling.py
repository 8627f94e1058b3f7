"""Which parameters are computed in tiles (memory-centric tiling, arXiv 2104.07857, section 5.1.3), and in which.

A tile is a part of a matrix along one dim that no mesh axis shards, so that each device's shard has an equal part of
every tile, and a tile is gathered as a small parameter would be.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zero_jax.arguments import patterns, shown, whole
from zero_jax.errors import UsageError
from zero_jax.sharding.param_access import ParamAccess, Tiles
from zero_jax.typing import Pattern, Shape, Spec

MIN_TILE_BYTES = 1024
"""Bytes of the smallest gathered copy that `tiling` may ask for, as a number."""

Tiling = Mapping[Pattern, int] | int
"""Pattern of a parameter's name -> number of tiles; or the bytes above which a gathered copy is made in tiles."""


def tiling_of(value: Any) -> Tiling | None:
    """The argument `tiling`; raises ValueError for anything that is none."""
    if value is None:
        return None
    if isinstance(value, Mapping) and value:
        names = patterns("tiling", tuple(value), "{\"mlp/up/kernel\": 16}")
        return {name: whole(f"tiling[{name!r}]", value[name], 2) for name in names}
    if isinstance(value, (Mapping, str)):
        raise UsageError(f"tiling={shown(value)}: give {{pattern of a parameter's name: number of tiles}}, as "
                         "{\"mlp/up/kernel\": 16}, or the bytes above which a gathered copy is made in tiles.")
    return whole("tiling", value, MIN_TILE_BYTES)


def with_tiles(reads: Mapping[str, ParamAccess], params: Mapping[str, Any], tiling: Tiling | None, num_shards: int,
               tensor_specs: Mapping[str, Spec]) -> tuple[dict[str, ParamAccess], tuple[str, ...]]:
    """`reads` with the tiles of each parameter, and why those above a number of bytes have none.

    params: by name, of true shape, in the dtype in which the model reads it. num_shards: over which ZeRO shards each.
    tensor_specs: of those that tensor parallelism splits: their tiles are along another dim. Raises ValueError for a
    parameter that is named and cannot be computed in tiles, and where there is none to tile.
    """
    if tiling is None:
        return dict(reads), ()
    named = isinstance(tiling, Mapping)
    wanted = _named(params, tiling) if named else _large(reads, params, tiling)
    tiled, left = dict(reads), list[str]()
    for name, count in wanted.items():
        reason = _unfit(reads[name])
        dims = [] if reason else _dims(params[name].shape, reads[name], num_shards, tensor_specs.get(name))
        fitting = [(dim, tiles) for dim in dims if (tiles := _divides(params[name].shape[dim], count, exactly=named))]
        if fitting:
            dim, tiles = min(fitting, key=lambda choice: choice[1])  # of equal ones the first
            tiled[name] = replace(reads[name], tiles=Tiles(name, dim, tiles))
        elif named:
            raise UsageError(f"tiling: {name} cannot be computed in {count} tiles: "
                             f"{reason or _undivided(params[name].shape, reads[name], dims)}: leave it out, or give "
                             "another number of tiles.")
        else:
            left.append(f"{name} ({reason or _undivided(params[name].shape, reads[name], dims)})")
    if not any(access.tiles for access in tiled.values()):
        raise UsageError(f"tiling={shown(tiling)}: no gathered parameter that is larger than this can be computed in "
                         f"tiles: {'; '.join(left) or 'all are smaller'}: leave tiling out, or give another number.")
    return tiled, tuple(left)


def tile_lines(reads: Mapping[str, ParamAccess], shapes: Mapping[str, Any], uses: Mapping[str, Any],
               not_tiled: Sequence[str]) -> list[str]:
    """A line for each parameter that is used in tiles, and one for those that are too large and are not.

    shapes: the `StoredShape` of each parameter; uses: its `ParamUse`.
    """
    lines = list[str]()
    for name, access in reads.items():
        if access.tiles is not None:
            layer = [size for dim, size in enumerate(shapes[name].shape) if dim not in access.stacked]
            whole_bytes, count = _bytes(layer, uses[name]), access.tiles.count
            lines.append(f"computed in tiles: {name}, {count} along dim {access.tiles.dim}: "
                         f"{whole_bytes // count:,} of {whole_bytes:,} bytes are gathered at a time")
    return lines + [f"not computed in tiles, and larger than asked for: {', '.join(not_tiled)}"] * bool(not_tiled)


def _named(params: Mapping[str, Any], tiling: Mapping[Pattern, int]) -> dict[str, int]:
    """The number of tiles of each parameter that a pattern finds: the first counts."""
    wanted: dict[str, int] = {}
    for pattern, count in tiling.items():
        found = [name for name in params if re.search(pattern, name)]
        if not found:
            largest = sorted(params, key=lambda name: -_bytes(params[name].shape, params[name]))[:5]
            raise UsageError(f"tiling: no parameter's name matches {pattern!r}. The largest are {', '.join(largest)}.")
        wanted = {**dict.fromkeys(found, count), **wanted}
    return wanted


def _large(reads: Mapping[str, ParamAccess], params: Mapping[str, Any], max_bytes: int) -> dict[str, int]:
    """The least number of tiles that bring each gathered parameter to `max_bytes`, for those that are larger."""
    sizes = {name: _bytes([size for dim, size in enumerate(leaf.shape) if dim not in reads[name].stacked], leaf)
             for name, leaf in params.items() if name in reads}
    return {name: -(-size // max_bytes) for name, size in sizes.items() if size > max_bytes}


def _unfit(read: ParamAccess) -> str:
    """Why a parameter that is read so cannot be computed in tiles; empty if it can."""
    if read.on_entry or read.on_entry_if_padded or read.written:
        return "its module reads it other than through Flax's accessor, or overwrites it, so that it is whole"
    if not read.count:
        return "the loss does not read it"
    if not read.products:
        return "something else than a matrix product uses it (a lookup of rows, a sum, a loop or vmap)"
    if read.products > 1:
        return f"{read.products} matrix products use it (tied, or of a layer that is called more than once)"
    return ""


def _dims(shape: Shape, read: ParamAccess, num_shards: int, tensor_spec: Spec | None) -> list[int]:
    """The dims along which a matrix may be cut, the best first: one of the others divides over the devices; the last.

    Not the dim that tensor parallelism splits: each of its devices has a part of every tile.

    XLA:GPU gathers along the first dim in memory: it would transpose a shard as a whole, in float32, to gather tiles of
    it along another (4.1 instead of 2.1 GiB of temporaries for a product of 64k x 64k on 8 H100).
    """
    free = [dim for dim in range(len(shape)) if dim not in read.stacked and shape[dim] > 1]

    def rank(dim: int) -> tuple[bool, int]:
        return all(shape[other] % num_shards for other in free if other != dim), -dim

    if len(free) < 2:
        return []
    return sorted((dim for dim in free if tensor_spec is None or tensor_spec[dim] is None), key=rank)


def _divides(size: int, count: int, *, exactly: bool) -> int:
    """The tiles along a dim of `size`: `count`, or the next number that divides it; 0 if there is none."""
    if exactly:
        return count if size % count == 0 else 0
    return next((tiles for tiles in range(count, size + 1) if size % tiles == 0), 0)


def _undivided(shape: Shape, read: ParamAccess, dims: list[int]) -> str:
    if not dims:
        return "it is no matrix"
    return f"none of its dims {' x '.join(str(shape[dim]) for dim in sorted(dims))} divides by that"


def _bytes(shape: Any, leaf: Any) -> int:
    return math.prod(shape) * np.dtype(leaf.dtype).itemsize
