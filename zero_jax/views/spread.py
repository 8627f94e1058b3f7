"""How the devices of a mesh hold a value of the program of one device, and the collectives from one way to another."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.sharding.gather import GATHER_SCOPE, compute_spec, gather_sequence, names_of
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.reduce_scatter import mesh_ordered_runs, reduce_parts
from zero_jax.typing import AxisNames, Shape


@dataclasses.dataclass(frozen=True)
class Split:
    """A dim of which each device holds equal parts, by its place along `axes` (major first).

    outer: into how many equal blocks the dim is cut first; a device holds a part of each. Other than 1 where an array
    whose minor dim is split was reshaped into fewer dims, and where `tensor` splits a stored dim before the others do.
    """

    axes: AxisNames
    outer: int = 1


@dataclasses.dataclass(frozen=True)
class Spread:
    """dims: for each dim its `Split`, or None: whole. partial: axes over which the devices' arrays are to be summed."""

    dims: tuple[Split | None, ...]
    partial: AxisNames = ()

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
        return all(dim is None or dim.outer == 1 for dim in self.dims)

    @property
    def spec(self) -> P:
        """As a `PartitionSpec`, where nothing is to be summed; of `blocks`."""
        assert not self.partial, self
        entries = [[None] * (dim is not None and dim.outer > 1) + [None if dim is None else dim.axes]
                   for dim in self.dims]
        return P(*[axes[0] if axes and len(axes) == 1 else axes for entry in entries for axes in entry])

    def blocks(self, value: jax.Array) -> jax.Array:
        """`value` with a dim of its own for the blocks into which a dim is cut."""
        for dim, split in reversed([*enumerate(self.dims)]):
            value = value if split is None or split.outer == 1 else _blocks(value, dim, split.outer)
        return value

    def joined(self, value: jax.Array) -> jax.Array:
        """The inverse of `blocks`."""
        for dim, split in enumerate(self.dims):
            value = value if split is None or split.outer == 1 else _joined(value, dim)
        return value


def whole(ndim: int) -> Spread:
    """Every device holds all of a value of `ndim` dims."""
    return Spread((None,) * ndim)


def spread_of(spec: P, ndim: int, axes: MeshAxes) -> Spread:
    """That of an array sharded by `spec`; mesh axes of size 1 split nothing, and `tensor` is the partitioner's."""
    dims: list[Split | None] = [None] * ndim
    for dim, entry in enumerate(spec):
        names = [name for name in names_of(P(entry)) if axes.size(name) > 1]
        if own := tuple(name for name in names if name != axes.tensor):
            dims[dim] = Split(own, axes.tensor_size if names[0] == axes.tensor else 1)
    return Spread(tuple(dims))


def local_shape(shape: Shape, spread: Spread, axes: MeshAxes) -> tuple[int, ...]:
    """The shape of a device's part of a value of shape `shape`."""
    return tuple(size if dim is None else size // axes.size(*dim.axes)
                 for size, dim in zip(shape, spread.dims, strict=True))


def moved(value: jax.Array, have: Spread, want: Spread, axes: MeshAxes) -> jax.Array:
    """A device's part of a value that is spread as `have`, spread as `want`; inside of a `jax.shard_map`."""
    if have == want:
        return value
    if have.partial and have.partial != want.partial:
        if (not any(have.dims) and any(want.dims) and want.is_plain and not want.partial
                and set(have.partial) == set(axes.batch)):
            return combined(lambda value, _: reduce_parts(value, axes, want.spec), value, have.partial, axes)
        value, have = combined(jax.lax.psum, value, have.partial, axes), have.without_sum
    if want.partial and not have.partial:
        value = jnp.where(_index(want.partial, axes) == 0, value, jnp.zeros(value.shape, value.dtype))
    differ = [dim for dim, (one, other) in enumerate(zip(have.dims, want.dims, strict=True)) if one != other]
    for dim in differ:
        if (split := have.dims[dim]) is not None:
            value = _gathered(value, dim, split, axes)
    for dim in differ:
        if (split := want.dims[dim]) is not None:
            value = _part(value, dim, split, axes)
    return value


def combined(combine: Callable[..., jax.Array], value: jax.Array, over: AxisNames, axes: MeshAxes) -> jax.Array:
    """`combine(value, over)`, an all-reduce or reduce-scatter.

    XLA for CPUs (jaxlib 0.10.2 and 0.12) ends the process on one of a narrow dtype beside an axis of the partitioner.
    """
    narrow = value.dtype.itemsize < 4 and axes.tensor_enabled and axes.platform == "cpu" or value.dtype == bool
    wide = jnp.promote_types(value.dtype, jnp.float32 if jnp.issubdtype(value.dtype, jnp.floating) else jnp.int32)
    return combine(value.astype(wide), over).astype(value.dtype) if narrow else combine(value, over)


def on_tensor(fun: Callable[..., Any], before: Sequence[P], after: Any, axes: MeshAxes) -> Callable[..., Any]:
    """`fun` of the parts that each device along `tensor` has, which splits arguments and results as these specs say.

    The partitioner gathers over `tensor` what a collective over other axes takes.
    """
    def of_tensor(specs: Any) -> Any:
        return jax.tree.map(lambda spec: compute_spec(spec, axes), specs, is_leaf=lambda spec: isinstance(spec, P))

    return jax.shard_map(fun, axis_names={axes.tensor}, in_specs=of_tensor(tuple(before)), out_specs=of_tensor(after),
                         check_vma=False) if axes.tensor_enabled else fun


def gathered_param(value: jax.Array, spec: P, axes: MeshAxes, kept: Sequence[str] = ()) -> jax.Array:
    """A parameter's shard, sharded by `spec`, gathered over all axes but `tensor` and those that are `kept`.

    In the order of `gather_sequence`, and of the axes of one dim always the minor ones first: what is gathered is then
    one block of each device that is left.
    """
    left = [[name for name in names_of(P(entry)) if name != axes.tensor] for entry in spec]
    steps = [[names_of(P(entry)) for entry in step] for step in gather_sequence(spec, axes, kept)]
    steps = [step for step in steps if {*kept} <= {name for names in step for name in names}]
    with jax.named_scope(GATHER_SCOPE):
        for before, after in itertools.pairwise(steps):
            dim = next(dim for dim, (names, rest) in enumerate(zip(before, after, strict=True)) if names != rest)
            count = len(before[dim]) - len(after[dim])
            left[dim], names = left[dim][:-count], left[dim][-count:]
            value = _gathered(value, dim, Split(tuple(names)), axes)
    return value


def positions(size: int, split: Split, axes: MeshAxes) -> jax.Array:
    """int32 (size of the part,): the places along a dim of `size` that a device's part has."""
    ways = axes.size(*split.axes)
    inner = size // split.outer // ways
    here = jax.lax.iota(jnp.int32, size // ways)
    return here // inner * (ways * inner) + _index(split.axes, axes) * inner + here % inner


def _index(names: Sequence[str], axes: MeshAxes) -> Any:
    """The place of a device along `names`, major first."""
    index: Any = 0
    for name in names:
        index = index * axes.size(name) + jax.lax.axis_index(name)
    return index


def _blocks(value: jax.Array, dim: int, outer: int) -> jax.Array:
    return value.reshape(*value.shape[:dim], outer, value.shape[dim] // outer, *value.shape[dim + 1:])


def _joined(value: jax.Array, dim: int) -> jax.Array:
    return value.reshape(*value.shape[:dim], math.prod(value.shape[dim:dim + 2]), *value.shape[dim + 2:])


def _gathered(value: jax.Array, dim: int, split: Split, axes: MeshAxes) -> jax.Array:
    if split.outer > 1:
        return _joined(_gathered(_blocks(value, dim, split.outer), dim + 1, Split(split.axes), axes), dim)
    for names in reversed(mesh_ordered_runs(split.axes, axes.mesh)):
        value = jax.lax.all_gather(value, names, axis=dim, tiled=True)
    return value


def _part(value: jax.Array, dim: int, split: Split, axes: MeshAxes) -> jax.Array:
    if split.outer > 1:
        return _joined(_part(_blocks(value, dim, split.outer), dim + 1, Split(split.axes), axes), dim)
    size = value.shape[dim] // axes.size(*split.axes)
    return jax.lax.dynamic_slice_in_dim(value, _index(split.axes, axes) * size, size, dim)
