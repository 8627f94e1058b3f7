"""How the devices of a mesh hold a value of the program of one device, and the collectives from one way to another."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.gather.gather import compute_spec
from zero_jax.gather.reduce_scatter import mesh_ordered_runs, reduce_parts
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.partition import axes_by_dim
from zero_jax.typing import AxisNames, Shape

Ways = Callable[[AxisNames], int]
"""The number of devices along mesh axes."""


@dataclasses.dataclass(frozen=True)
class Split:
    """A dim of which each device holds equal parts, by its place along `axes` (major first).

    outer: for each axis, into how many equal blocks what a device then holds is cut first: it keeps a part of each.
    All 1 (the default) but for what was reshaped into fewer dims, of which a minor one is split, and where `tensor`
    splits a stored dim before the others do.
    """

    axes: AxisNames
    outer: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "outer", self.outer or (1,) * len(self.axes))

    @property
    def is_plain(self) -> bool:
        """Whether each device's part is one block."""
        return set(self.outer) == {1}


@dataclasses.dataclass(frozen=True)
class Spread:
    """dims: for each dim its `Split`, or None: whole. partial: axes over which the devices' arrays are to be summed."""

    dims: tuple[Split | None, ...]
    partial: AxisNames = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))

    @property
    def is_whole(self) -> bool:
        """Whether every device holds the value."""
        return not self.partial and not any(self.dims)

    @property
    def without_sum(self) -> "Spread":
        """The same after the sum."""
        return Spread(self.dims)

    @property
    def is_plain(self) -> bool:
        """Whether no dim is cut into blocks first."""
        return all(dim is None or dim.is_plain for dim in self.dims)

    @property
    def spec(self) -> P:
        """As a `PartitionSpec`, where nothing is to be summed; of `blocks`."""
        assert not self.partial and all(dim is None or {*dim.outer[1:]} <= {1} for dim in self.dims), self
        entries = [[None] * (dim is not None and not dim.is_plain) + [None if dim is None else dim.axes]
                   for dim in self.dims]
        return P(*[axes for entry in entries for axes in entry])

    def blocks(self, value: jax.Array) -> jax.Array:
        """`value` with a dim of its own for the blocks into which a dim is cut."""
        for dim, split in reversed([*enumerate(self.dims)]):
            value = value if split is None or split.is_plain else _blocks(value, dim, split.outer[0])
        return value

    def joined(self, value: jax.Array) -> jax.Array:
        """The inverse of `blocks`."""
        for dim, split in enumerate(self.dims):
            value = value if split is None or split.is_plain else _joined(value, dim)
        return value


@dataclasses.dataclass(frozen=True)
class Plan:
    """ins, outs: how operands and results are spread. shapes: parameters that are shapes, by name, of local sizes.

    combine: "max" or "min": results of devices are to be combined so, over `over`. repeats: mesh axes along which all
    devices compute the same, as no rule says how each computes its part.
    """

    ins: tuple[Spread, ...]
    outs: tuple[Spread, ...]
    shapes: tuple[tuple[str, Any], ...] = ()
    combine: str = ""
    over: AxisNames = ()
    repeats: AxisNames = ()


def evenly(shape: Shape, axes: AxisNames, ways: Ways) -> list[Split | None]:
    """The longest dim that divides over `axes` split over them; all whole where none does."""
    longest = max((size for size in shape if size % ways(axes) == 0), default=0)
    return [Split(axes) if size == longest and at == shape.index(longest) else None for at, size in enumerate(shape)]


def shape_at(atom: Any) -> Shape:
    """The global shape of a variable or a literal of the program."""
    return tuple(atom.aval.shape)


def ndim_at(atom: Any) -> int:
    """Its number of dims."""
    return len(atom.aval.shape)


def whole(ndim: int) -> Spread:
    """Every device holds all of a value of `ndim` dims."""
    return Spread((None,) * ndim)


def spread_of(spec: P, ndim: int, axes: MeshAxes) -> Spread:
    """That of an array sharded by `spec`; mesh axes of size 1 split nothing, and `tensor` is the partitioner's."""
    dims: list[Split | None] = [None] * ndim
    for dim, names in enumerate(axes_by_dim(spec)):
        names = [name for name in names if axes.size(name) > 1]
        if own := tuple(name for name in names if name != axes.tensor):
            blocks = axes.tensor_size if names[0] == axes.tensor else 1
            dims[dim] = Split(own, (blocks, *(1,) * (len(own) - 1)))
    return Spread(tuple(dims))


def local_shape(shape: Shape, spread: Spread, ways: Ways) -> Shape:
    """The shape of a device's part of a value of shape `shape`."""
    return tuple(size if dim is None else size // ways(dim.axes)
                 for size, dim in zip(shape, spread.dims, strict=True))


def moved(value: jax.Array, have: Spread, want: Spread, axes: MeshAxes) -> jax.Array:
    """A device's part of a value that is spread as `have`, spread as `want`; inside of a `jax.shard_map`."""
    dims, due, added = list(have.dims), {*have.partial} - {*want.partial}, {*want.partial} - {*have.partial}
    for dim, split in enumerate(have.dims):  # parts among zeros are to be summed
        if split and split != want.dims[dim] and {*split.axes} <= added:
            value = _each_run(_embedded, value, dim, split, 0, axes, major=False)
            dims[dim], added = None, added - {*split.axes}
    if added:
        value = jnp.where(_index(sorted(added), axes) == 0, value, jnp.zeros(value.shape, value.dtype))
    if due == summed_axes(axes) and not any(dims) and any(want.dims) and not want.partial and want.is_plain:
        return combined(lambda value, _: reduce_parts(value, axes, want.spec), value, have.partial, axes)
    for dim, split in enumerate(want.dims):
        if split and not dims[dim] and {*split.axes} <= due:
            scattered = functools.partial(_scattered_dim, dim=dim, split=split, axes=axes)
            value = combined(scattered, value, split.axes, axes)
            dims[dim], due = split, due - {*split.axes}
    value = combined(jax.lax.psum, value, tuple(sorted(due)), axes) if due else value
    for dim, split in enumerate(dims):
        to = next((at for at, other in enumerate(want.dims) if other == split and not dims[at]), None)
        if split and to is not None and want.dims[dim] is None and len(_runs(split, 0, axes)) == 1:
            value = _each_run(functools.partial(_exchanged, to=to), value, dim, split, 0, axes, major=False)
            dims[dim], dims[to] = None, split
    kept = [_common(one, other) for one, other in zip(dims, want.dims, strict=True)]
    for dim, split in enumerate(dims):
        if split:
            value = _each_run(_gathered, value, dim, split, kept[dim], axes, major=False)
    for dim, split in enumerate(want.dims):
        if split:
            value = _each_run(_part, value, dim, split, kept[dim], axes)
    return value


def combined(combine: Callable[..., jax.Array], value: jax.Array, over: AxisNames, axes: MeshAxes) -> jax.Array:
    """`combine(value, over)`, an all-reduce or reduce-scatter.

    XLA for CPUs (jaxlib 0.10.2 and 0.12) ends the process on one of a narrow dtype beside an axis of the partitioner.
    """
    narrow = value.dtype.itemsize < 4 and axes.tensor_enabled and axes.platform == "cpu" or value.dtype == bool
    wide = jnp.float32 if jnp.issubdtype(value.dtype, jnp.floating) else jnp.int32
    return combine(value.astype(wide), over).astype(value.dtype) if narrow else combine(value, over)


def on_tensor(fun: Callable[..., Any], before: Sequence[P], after: Any, axes: MeshAxes) -> Callable[..., Any]:
    """`fun` of the parts that each device along `tensor` has, which splits arguments and results as these specs say.

    The partitioner gathers over `tensor` what a collective over other axes takes.
    """
    def of_tensor(specs: Any) -> Any:
        return jax.tree.map(lambda spec: compute_spec(spec, axes), specs)

    return jax.shard_map(fun, axis_names={axes.tensor}, in_specs=of_tensor(tuple(before)), out_specs=of_tensor(after),
                         check_vma=False) if axes.tensor_enabled else fun


def summed_axes(axes: MeshAxes) -> set[str]:
    """The axes of several devices over which a gradient is summed."""
    return {name for name in axes.step_names if name != axes.tensor and axes.size(name) > 1}


def positions(size: int, split: Split, axes: MeshAxes) -> jax.Array:
    """int32 (size of the part,): the places along a dim of `size` that a device's part has."""
    left = size // axes.size(*split.axes)
    here, position = jax.lax.iota(jnp.int32, left), jnp.int32(0)
    for name, outer in zip(split.axes, split.outer, strict=True):
        size, left = size // (outer * axes.size(name)), left // outer
        position = position + (here // left * axes.size(name) + jax.lax.axis_index(name)) * size
        here = here % left
    return position + here


def group_sizes(sizes: jax.Array, rows: int, split: Split, axes: MeshAxes) -> jax.Array:
    """int32 (groups,): of groups of `sizes` among `rows` rows, how many rows a device has of each."""
    ends = jnp.searchsorted(positions(rows, split, axes), jnp.cumsum(sizes))
    return jnp.diff(ends, prepend=0).astype(sizes.dtype)


def _index(names: Sequence[str], axes: MeshAxes) -> Any:
    """The place of a device along `names`, major first."""
    index: Any = 0
    for name in names:
        index = index * axes.size(name) + jax.lax.axis_index(name)
    return index


def _common(one: Split | None, other: Split | None) -> int:
    """Of how many of the first axes two splits are alike."""
    if one is None or other is None:
        return 0
    pairs = zip(zip(one.axes, one.outer, strict=True), zip(other.axes, other.outer, strict=True), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _each_run(move: Callable[[jax.Array, int, AxisNames, int], jax.Array], value: jax.Array, dim: int, split: Split,
              first: int, axes: MeshAxes, *, major: bool = True) -> jax.Array:
    """`move(blocks of the value, dim of a block, names, devices)` for the axes of a split from number `first` on.

    Axes that follow in the order of the mesh, and in one block, go together. major: whether the major ones go first.
    """
    runs = _runs(split, first, axes)
    for blocks, names in runs if major else reversed(runs):
        value = _blocks(value, dim, blocks) if blocks > 1 else value
        value = move(value, dim + (blocks > 1), names, axes.size(*names))
        value = _joined(value, dim) if blocks > 1 else value
    return value


def _runs(split: Split, first: int, axes: MeshAxes) -> list[tuple[int, AxisNames]]:
    starts = [at for at in range(first, len(split.axes)) if at == first or split.outer[at] > 1]
    return [(math.prod(split.outer[:at + 1]), names) for at, end in itertools.pairwise([*starts, len(split.axes)])
            for names in mesh_ordered_runs(split.axes[at:end], axes.mesh)]


def _gathered(value: jax.Array, dim: int, names: AxisNames, devices: int) -> jax.Array:
    return jax.lax.all_gather(value, names, axis=dim, tiled=True)


def _scattered(value: jax.Array, dim: int, names: AxisNames, devices: int) -> jax.Array:
    return jax.lax.psum_scatter(value, names, scatter_dimension=dim, tiled=True)


def _scattered_dim(value: jax.Array, _: AxisNames, dim: int, split: Split, axes: MeshAxes) -> jax.Array:
    return _each_run(_scattered, value, dim, split, 0, axes)


def _part(value: jax.Array, dim: int, names: AxisNames, devices: int) -> jax.Array:
    size = value.shape[dim] // devices
    return jax.lax.dynamic_slice_in_dim(value, jax.lax.axis_index(names) * size, size, dim)


def _embedded(value: jax.Array, dim: int, names: AxisNames, devices: int) -> jax.Array:
    """The part at its place among zeros."""
    size = value.shape[dim]
    zeros = jnp.zeros((*value.shape[:dim], size * devices, *value.shape[dim + 1:]), value.dtype)
    return jax.lax.dynamic_update_slice_in_dim(zeros, value, jax.lax.axis_index(names) * size, dim)


def _exchanged(value: jax.Array, dim: int, names: AxisNames, devices: int, *, to: int) -> jax.Array:
    """Parts of `dim` for parts of the dim `to`."""
    return jax.lax.all_to_all(value, names, to, dim, tiled=True)


def _blocks(value: jax.Array, dim: int, blocks: int) -> jax.Array:
    shape = value.shape
    return value.reshape(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1:])


def _joined(value: jax.Array, dim: int) -> jax.Array:
    return value.reshape(*value.shape[:dim], math.prod(value.shape[dim:dim + 2]), *value.shape[dim + 2:])
