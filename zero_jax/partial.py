"""Gradients as sums over devices: each adds its own part, and on a TPU one mesh axis after another scatters the sum.

Left to the partitioner, a gradient is summed over all devices at once. A TPU slice has no such reduce-scatter, so that
the whole gradient is all-reduced and then cut: twice the bytes, and a gradient that lies whole on every chip.
`scatter_parts` edits the backward pass so that the product that makes a gradient stands in a `jax.shard_map` with the
scatters behind it; everything else stays the partitioner's, so that nothing that is global becomes local.
"""

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.gather import REDUCED, SCATTER
from zero_jax.mesh import TENSOR, fills_tiles, on_torus, tile_block
from zero_jax.rewrite import shape_of

_MOVES = ("transpose", "reshape", "squeeze", "expand_dims", "rev", "copy", "name", "convert_element_type")
_SUMS = ("add_any", "add")
_INTO = (*_MOVES, *_SUMS, "scatter-add", "reduce_sum", "concatenate")


def inline_calls(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The calls that a scattered gradient comes from, replaced by what they call: other edits look for its product."""
    while True:
        makers = _makers(jaxpr)
        atoms = [eqn.invars[0] for eqn in jaxpr.eqns if _is_scatter(eqn) or _is_mark(eqn)]
        calls: list[core.JaxprEqn] = []
        while atoms:
            eqn = makers.get(atoms.pop())
            if eqn is not None and _is_plain_call(eqn):
                calls.append(eqn)
            elif eqn is not None and eqn.primitive.name in _INTO:
                atoms += [atom for atom in eqn.invars if not isinstance(atom, core.Literal)]
        if not calls:
            return jaxpr
        jaxpr = jaxpr.replace(eqns=[
            inner for eqn in jaxpr.eqns for inner in (_inlined(eqn) if any(eqn is c for c in calls) else [eqn])])


def merge_scatters(jaxpr: core.Jaxpr, *, uneven: bool = False) -> core.Jaxpr:
    """The gradients of several readings of a parameter, scattered alike and added, are added and scattered once.

    uneven: only those that are stored in another shape than they have.
    """
    makers = _makers(jaxpr)
    uses = collections.Counter(atom for eqn in jaxpr.eqns for atom in eqn.invars if not isinstance(atom, core.Literal))
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        terms = [makers[atom] for atom in eqn.invars if eqn.primitive.name == "add_any" and atom in makers]
        if (len(terms) == 2 and all(_is_scatter(term) and uses[term.outvars[0]] == 1 for term in terms)
                and len({term.params["out_shardings"] for term in terms}) == 1
                and len({term.invars[0].aval.shape for term in terms}) == 1
                and (_is_uneven(terms[0]) or not uneven)):
            eqns = [other for other in eqns if not any(other is term for term in terms)]
            total = core.Var(terms[0].invars[0].aval)
            makers[eqn.outvars[0]] = terms[0].replace(invars=[total], outvars=eqn.outvars)
            eqns += [eqn.replace(invars=[term.invars[0] for term in terms], outvars=[total]), makers[eqn.outvars[0]]]
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def scatter_parts(jaxpr: core.Jaxpr, *, batch_size: int, uneven: bool = False) -> core.Jaxpr:
    """Every gradient whose product is found is summed and scattered explicitly.

    batch_size: of the global batch; the contracted dim of this size, or of a multiple, is split over the devices.
    uneven: only those that are stored in another shape than they have, each device's part before it is sent: what the
    partitioner pads after the sum is all-reduced.
    """
    makers = _makers(jaxpr)
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        part = _Part(makers, batch_size)
        wanted = _is_scatter(eqn) and (_is_uneven(eqn) or not uneven)
        eqns.append(part.scattered(eqn) if wanted and part.add(eqn.invars[0]) else eqn)
    return jaxpr.replace(eqns=eqns)


class _Part:
    """The equations that make one device's part of a gradient, and what goes into them."""

    def __init__(self, makers: dict[Any, core.JaxprEqn], batch_size: int):
        self.makers, self.batch_size = makers, batch_size
        self.eqns: list[core.JaxprEqn] = []
        self.cuts: dict[Any, int | None] = {}  # an input, and the dim in which it is split over the devices

    def add(self, atom: Any) -> bool:
        """Whether `atom` is a sum over devices; if so, adds what makes it."""
        eqn = None if isinstance(atom, core.Literal) else self.makers.get(atom)
        if eqn is None:
            return False
        if any(eqn is known for known in self.eqns):
            return True
        name, params = eqn.primitive.name, eqn.params
        if name in _MOVES:
            found = self.add(eqn.invars[0])
        elif name in _SUMS:
            found = all([self.add(term) for term in eqn.invars])
        elif name == "dot_general":
            found = self._split(eqn, *params["dimension_numbers"][0])
        elif name == "conv_general_dilated":
            lhs, rhs, _ = params["dimension_numbers"]
            alone = params["feature_group_count"] == params["batch_group_count"] == 1
            found = alone and self._split(eqn, lhs[1:2], rhs[1:2])
        elif name == "reduce_sum":
            found = params["axes"] == (0,) and self._comes_from_devices(eqn.invars[0]) and self._cut(eqn.invars[0], 0)
        else:
            found = name == "scatter-add" and self._split_rows(eqn)
        if found:
            self.eqns.append(eqn)
        return found

    def _comes_from_devices(self, atom: Any) -> bool:
        """Whether the leading dim of `atom` counts the devices, each of which made its own."""
        eqn = None if isinstance(atom, core.Literal) else self.makers.get(atom)
        while eqn is not None and eqn.primitive.name in ("convert_element_type", "copy"):
            eqn = self.makers.get(eqn.invars[0])
        return eqn is not None and eqn.primitive.name == "shard_map"

    def _split(self, eqn: core.JaxprEqn, lefts: Sequence[int], rights: Sequence[int]) -> bool:
        """Splits a product in a dim that both sides contract."""
        left = self._batch_dim(eqn.invars[0], lefts)
        return left is not None and all([
            self._cut(eqn.invars[0], left), self._cut(eqn.invars[1], rights[tuple(lefts).index(left)])])

    def _split_rows(self, eqn: core.JaxprEqn) -> bool:
        """Splits what is added to the rows of zeros: an embedding's gradient."""
        zeros, indices, updates = eqn.invars
        window, shape = eqn.params["dimension_numbers"].update_window_dims, getattr(updates.aval, "shape", ())
        rows = [dim for dim in range(len(shape)) if dim not in window]
        dim = self._batch_dim(updates, rows)
        return dim is not None and self._is_zero(zeros) and all([
            self._cut(zeros, None), self._cut(indices, rows.index(dim)), self._cut(updates, dim)])

    def _batch_dim(self, atom: Any, dims: Sequence[int]) -> int | None:
        fitting = [dim for dim in dims if atom.aval.shape[dim] % self.batch_size == 0]
        return min(fitting, key=lambda dim: atom.aval.shape[dim] != self.batch_size, default=None)

    def _is_zero(self, atom: Any) -> bool:
        while not isinstance(atom, core.Literal):
            eqn = self.makers.get(atom)
            if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "copy"):
                return False
            atom = eqn.invars[0]
        return not atom.val

    def _cut(self, atom: Any, dim: int | None) -> bool:
        return not isinstance(atom, core.Literal) and self.cuts.setdefault(atom, dim) == dim

    def scattered(self, scatter: core.JaxprEqn) -> core.JaxprEqn:
        """The equation `scatter`, which reduces and scatters a gradient, as one that does so with the parts."""
        sharding: NamedSharding = scatter.params["out_shardings"][0]
        axes = tuple(sharding.mesh.axis_names)
        scope = str(self.eqns[0].source_info.name_stack)

        def part(*values: jax.Array) -> jax.Array:
            env: dict[Any, Any] = dict(zip(self.cuts, values, strict=True))
            for eqn in self.eqns:
                args = [atom.val if isinstance(atom, core.Literal) else env[atom] for atom in eqn.invars]
                env[eqn.outvars[0]] = eqn.primitive.bind(*args, **eqn.params)
            return reduce_parts(_stored(scatter, env[scatter.invars[0]]), sharding.mesh, sharding.spec)

        summed = jax.shard_map(
            part, mesh=sharding.mesh, out_specs=sharding.spec, check_vma=False,
            in_specs=tuple(P() if dim is None else P(*[None] * dim, axes) for dim in self.cuts.values()))

        def zero_scatter(*values: jax.Array) -> jax.Array:
            with jax.named_scope(scope):
                return summed(*values)

        (made,) = jax.make_jaxpr(jax.jit(zero_scatter))(*map(shape_of, self.cuts)).jaxpr.eqns
        return made.replace(invars=list(self.cuts), outvars=scatter.outvars)


def _stored(scatter: core.JaxprEqn, value: jax.Array) -> jax.Array:
    """What `scatter` does to its argument, beside laying it out: merged and padded as it is stored."""
    inner = scatter.params["jaxpr"].jaxpr
    env: dict[Any, Any] = {inner.invars[0]: value}
    for eqn in inner.eqns:
        args = [atom.val if isinstance(atom, core.Literal) else env[atom] for atom in eqn.invars]
        laid_out = eqn.primitive.name == "sharding_constraint"
        env[eqn.outvars[0]] = args[0] if laid_out else eqn.primitive.bind(*args, **eqn.params)
    return env[inner.outvars[0]]


def reduce_parts(value: jax.Array, mesh: Any, spec: P) -> jax.Array:
    """The sum of the devices' `value`s, laid out by `spec`; each device returns its part. For `jax.shard_map`."""
    splits = [(dim, (entry,) if isinstance(entry, str) else entry) for dim, entry in enumerate(spec) if entry]
    splits = [(dim, tuple(axis for axis in axes if axis != TENSOR)) for dim, axes in splits]
    rest = tuple(axis for axis in mesh.axis_names if axis != TENSOR and all(axis not in axes for _, axes in splits))
    if on_torus(mesh):
        for dim, axis in _in_order(value.size, mesh, splits):
            value = _scatter_tiles(value, axis, mesh.shape[axis], dim, tile_block(mesh, axis))
    else:
        for dim, axes in splits:
            for together in _in_runs(axes, mesh):
                value = jax.lax.psum_scatter(value, together, scatter_dimension=dim, tiled=True)
    return jax.lax.psum(value, rest) if rest else value


def _in_runs(axes: Sequence[str], mesh: Any) -> list[tuple[str, ...]]:
    """`axes` in runs that lie in the order of the mesh: others are inner ones, over which parts are summed first."""
    runs: list[tuple[str, ...]] = []
    for axis in axes:
        follows = runs and mesh.axis_names.index(runs[-1][-1]) < mesh.axis_names.index(axis)
        runs = [*runs[:-1], (*runs[-1], axis)] if follows else [*runs, (axis,)]
    return runs


def _in_order(size: int, mesh: Any, splits: Sequence[tuple[int, Sequence[str]]]) -> tuple[tuple[int, str], ...]:
    """The (dim, axis) to scatter an array of `size` values over, in turn.

    As the mesh has them, the fastest first; in another order where that saves a tenth of the bytes, since the parts of
    a small array fill the tiles of a short axis and not of a long one. Axes that split one dim stay major first.
    """
    steps = sorted(((dim, axis) for dim, axes in splits for axis in axes), key=lambda s: mesh.axis_names.index(s[1]))

    def sent(order: Sequence[tuple[int, str]]) -> float:
        total, part = 0, size
        for _, axis in order:
            part //= mesh.shape[axis]
            total += (mesh.shape[axis] - 1) * min(part + -part % tile_block(mesh, axis), 2 * part)
        return round(total / size, 1)

    return tuple(steps) if len(steps) > len(splits) else min(itertools.permutations(steps), key=sent)


def _scatter_tiles(value: jax.Array, axis: str, ways: int, dim: int, block: int) -> jax.Array:
    """The sum of `value` over `axis`, of which each of `ways` chips keeps its part of `dim`.

    Parts that are not scattered as they are travel as blocks of `block` values, which are whole tiles: in the order in
    which they lie where they are made of such, else flat and padded. Where half of it or more would be padding, the
    whole is summed and cut: that sends no more, and XLA (jax 0.10) fails to compile some such scatters.
    """
    shape = (*value.shape[:dim], value.shape[dim] // ways, *value.shape[dim + 1:])
    part = math.prod(shape)
    if fills_tiles(shape[dim]):
        # At most one dim before and one behind: dims of size 1, as in the kernel of a 1 x 1 convolution, change how an
        # array lies, and it is all-reduced.
        merged = [math.prod(shape[:dim]), value.shape[dim], math.prod(shape[dim + 1:])]
        flat, at = value.reshape([size for size in merged if size > 1]), int(merged[0] > 1)
        return jax.lax.psum_scatter(flat, axis, scatter_dimension=at, tiled=True).reshape(shape)
    if value.ndim == 2 and dim == 0 and shape[0] % 8 == shape[1] % 128 == part % block == 0:
        tiles = value.reshape(ways, shape[0] // 8, 8, shape[1] // 128, 128).swapaxes(2, 3)
        return jax.lax.psum_scatter(tiles, axis, scatter_dimension=0).swapaxes(1, 2).reshape(shape)
    parts = jnp.moveaxis(value.reshape(*shape[:dim], ways, *shape[dim:]), dim, 0).reshape(ways, -1)
    if part + -part % block >= 2 * part:
        return jax.lax.psum(parts, axis)[jax.lax.axis_index(axis)].reshape(shape)
    blocks = jnp.pad(parts, ((0, 0), (0, -part % block))).reshape(-1, 16, 128)
    return jax.lax.psum_scatter(blocks, axis, scatter_dimension=0, tiled=True).reshape(-1)[:part].reshape(shape)


def _makers(jaxpr: core.Jaxpr) -> dict[Any, Any]:
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def _is_scatter(eqn: core.JaxprEqn) -> bool:
    """Whether `eqn` is the reduction of a gradient that `gather.Use` asks for."""
    return eqn.primitive is primitives.jit_p and eqn.params["name"] == SCATTER


def _is_uneven(scatter: core.JaxprEqn) -> bool:
    """Whether the gradient is stored in another shape."""
    return shape_of(scatter.invars[0]).shape != shape_of(scatter.outvars[0]).shape


def _is_mark(eqn: core.JaxprEqn) -> bool:
    """Whether `eqn` marks a gradient that is to be reduced, here or after the last microbatch."""
    return eqn.primitive.name == "name" and eqn.params["name"] == REDUCED


def _is_plain_call(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive is primitives.jit_p and not _is_scatter(eqn) and not eqn.params["jaxpr"].consts


def _inlined(call: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """The equations of the jit that `call` is, and a copy of each result."""
    inner = call.params["jaxpr"].jaxpr
    env: dict[Any, Any] = dict(zip(inner.invars, call.invars, strict=True))

    def outer(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else env[atom]

    for eqn in inner.eqns:
        invars = [outer(atom) for atom in eqn.invars]
        env.update((var, core.Var(var.aval)) for var in eqn.outvars)
        yield eqn.replace(invars=invars, outvars=[env[var] for var in eqn.outvars])
    for atom, out in zip(inner.outvars, call.outvars, strict=True):
        (copy,) = jax.make_jaxpr(jax.lax.copy_p.bind)(shape_of(atom)).jaxpr.eqns
        yield copy.replace(invars=[outer(atom)], outvars=[out])
