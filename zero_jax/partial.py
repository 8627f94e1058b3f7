"""Gradients as sums over devices: each adds its own part, and on a TPU one mesh axis after another scatters the sum.

Left to the partitioner, a gradient is summed over all devices at once. A TPU slice has no such reduce-scatter, so that
the whole gradient is all-reduced and then cut: twice the bytes, and a gradient that lies whole on every chip.
`scatter_parts` edits the backward pass so that the product that makes a gradient stands in a `jax.shard_map` with the
scatters behind it; everything else stays the partitioner's, so that nothing that is global becomes local.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives
from jax.lax import GatherScatterMode
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.gather import REDUCED, SCATTER, names_of
from zero_jax.mesh import CONTEXT, TENSOR
from zero_jax.rewrite import shape_of
from zero_jax.scatter import reduce_parts

_MOVES = ("transpose", "reshape", "squeeze", "expand_dims", "rev", "copy", "name", "convert_element_type")
_KEEPS = ("copy", "name", "convert_element_type")
_SUMS = ("add_any", "add")
_INTO = (*_MOVES, *_SUMS, "scatter-add", "reduce_sum", "concatenate")

Cut = dict[int, tuple[str, ...]]
"""The dims of an array that mesh axes split."""


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


def scatter_parts(jaxpr: core.Jaxpr, *, batch_size: int, axes: tuple[str, ...], uneven: bool = False,
                  split: bool = False) -> core.Jaxpr:
    """Every gradient whose product is found is summed and scattered explicitly.

    batch_size: of the global batch; the contracted dim of this size, or of a multiple, is split over the mesh axes
    `axes`, and where there is an axis `context`, the next one over that. uneven: only those that are stored in another
    shape than they have, each device's part before it is sent: what the partitioner pads after the sum is all-reduced.
    split: only products of which `tensor` splits a side; what others take may be split along the sequence.
    """
    makers = _makers(jaxpr)
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if _is_scatter(eqn) and (_is_uneven(eqn) or not uneven):
            part = _Part(makers, batch_size, axes, eqn.params["out_shardings"][0], split)
            eqn = part.scattered(eqn) if part.add(eqn.invars[0], part.tensor_dim) else eqn
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


class _Part:
    """The equations that make one device's part of a gradient, and what goes into them."""

    def __init__(self, makers: dict[Any, core.JaxprEqn], batch_size: int, axes: tuple[str, ...],
                 sharding: NamedSharding, split: bool):
        self.makers, self.batch_size, self.axes = makers, batch_size, axes
        self.sharding, self.split, self.mesh = sharding, split, sharding.mesh
        self.tensor_dim = next((dim for dim, entry in enumerate(sharding.spec) if TENSOR in names_of(P(entry))), None)
        self.eqns: list[core.JaxprEqn] = []
        self.cuts: dict[Any, Cut] = {}  # an input, and the dims in which mesh axes split it

    def add(self, atom: Any, dim: int | None) -> bool:
        """Whether `atom`, whose dim `dim` `tensor` splits, is a sum over devices; if so, adds what makes it."""
        eqn = None if isinstance(atom, core.Literal) else self.makers.get(atom)
        if eqn is None:
            return False
        if any(eqn is known for known in self.eqns):
            return True
        name, params = eqn.primitive.name, eqn.params
        if name in _MOVES:
            known = dim is None or name in _KEEPS or name == "transpose"
            found = known and self.add(
                eqn.invars[0], params["permutation"][dim] if dim is not None and name == "transpose" else dim)
        elif name in _SUMS:
            found = all([self.add(term, dim) for term in eqn.invars])
        elif name == "dot_general":
            lefts, rights = params["dimension_numbers"][0]
            found = self._split(eqn, lefts, rights, self._sides(eqn, dim))
        elif name == "conv_general_dilated":
            lhs, rhs, _ = params["dimension_numbers"]
            alone = params["feature_group_count"] == params["batch_group_count"] == 1
            found = alone and dim is None and self._split(eqn, lhs[1:2], rhs[1:2], ({}, {}))
        elif name == "reduce_sum":
            alone = self.axes == tuple(self.mesh.axis_names)
            found = alone and params["axes"] == (0,) and self._comes_from_devices(eqn.invars[0]) and self._cut(
                eqn.invars[0], {0: self.axes})
        else:
            found = name == "scatter-add" and (dim is not None or not self.split) and self._split_rows(eqn, dim)
        if found:
            self.eqns.append(eqn)
        return found

    def _comes_from_devices(self, atom: Any) -> bool:
        """Whether the leading dim of `atom` counts the devices, each of which made its own."""
        eqn = None if isinstance(atom, core.Literal) else self.makers.get(atom)
        while eqn is not None and eqn.primitive.name in ("convert_element_type", "copy"):
            eqn = self.makers.get(eqn.invars[0])
        return eqn is not None and eqn.primitive.name == "shard_map"

    def _sides(self, eqn: core.JaxprEqn, dim: int | None) -> tuple[Cut, Cut] | None:
        """Which dim of which side of a product gives its dim `dim`, which `tensor` splits; None if neither alone."""
        sides: tuple[Cut, Cut] = {}, {}
        if dim is not None:
            contracted, batched = eqn.params["dimension_numbers"]
            places: list[tuple[Cut, int] | None] = [None] * len(batched[0])
            for cut, atom, gone, shared in zip(sides, eqn.invars, contracted, batched, strict=True):
                places += [(cut, at) for at in range(len(shape_of(atom).shape)) if at not in (*gone, *shared)]
            if (place := places[dim]) is None:
                return None
            place[0][place[1]] = (TENSOR,)
        return None if self.split and dim is None else sides

    def _split(self, eqn: core.JaxprEqn, lefts: Sequence[int], rights: Sequence[int],
               sides: tuple[Cut, Cut] | None) -> bool:
        """Splits a product in the dims of the batch, which both sides contract, beside what `sides` says."""
        batch = self._batch(eqn.invars[0], lefts)
        if batch is None or sides is None:
            return False
        other = {rights[tuple(lefts).index(dim)]: axes for dim, axes in batch.items()}
        return all([self._cut(eqn.invars[0], sides[0] | batch), self._cut(eqn.invars[1], sides[1] | other)])

    def _split_rows(self, eqn: core.JaxprEqn, dim: int | None) -> bool:
        """Splits what is added to the rows of zeros, an embedding's gradient, of which `tensor` may split the rows."""
        zeros, indices, updates = eqn.invars
        numbers, shape = eqn.params["dimension_numbers"], getattr(updates.aval, "shape", ())
        rows = [at for at in range(len(shape)) if at not in numbers.update_window_dims]
        batch = self._batch(updates, rows)
        if batch is None or not self._is_zero(zeros) or dim is not None and (
                numbers.scatter_dims_to_operand_dims != (dim,) or eqn.params["mode"] == GatherScatterMode.CLIP):
            return False
        return all([self._cut(zeros, {} if dim is None else {dim: (TENSOR,)}), self._cut(updates, batch),
                    self._cut(indices, {rows.index(at): axes for at, axes in batch.items()})])

    def _batch(self, atom: Any, dims: Sequence[int]) -> Cut | None:
        """The dim of the batch among `dims`, and that of the sequence where `context` splits it; None if not found."""
        fitting = [dim for dim in dims if atom.aval.shape[dim] % self.batch_size == 0]
        batch = min(fitting, key=lambda dim: atom.aval.shape[dim] != self.batch_size, default=None)
        if batch is None:
            return None
        if CONTEXT not in self.mesh.axis_names:
            return {batch: self.axes}
        found = batch + 1 in dims and atom.aval.shape[batch] == self.batch_size and (
            atom.aval.shape[batch + 1] % self.mesh.shape[CONTEXT] == 0)
        return {batch: self.axes, batch + 1: (CONTEXT,)} if found else None

    def _is_zero(self, atom: Any) -> bool:
        while not isinstance(atom, core.Literal):
            eqn = self.makers.get(atom)
            if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "copy"):
                return False
            atom = eqn.invars[0]
        return not atom.val

    def _cut(self, atom: Any, dims: Cut) -> bool:
        return not isinstance(atom, core.Literal) and self.cuts.setdefault(atom, dims) == dims

    def scattered(self, scatter: core.JaxprEqn) -> core.JaxprEqn:
        """The equation `scatter`, which reduces and scatters a gradient, as one that does so with the parts."""
        scope = str(self.eqns[0].source_info.name_stack)

        def part(*values: jax.Array) -> jax.Array:
            env: dict[Any, Any] = dict(zip(self.cuts, values, strict=True))
            for eqn in self.eqns:
                args = [atom.val if isinstance(atom, core.Literal) else env[atom] for atom in eqn.invars]
                env[eqn.outvars[0]] = self._rows(eqn, *args) if eqn.primitive.name == "scatter-add" else (
                    eqn.primitive.bind(*args, **eqn.params))
            return reduce_parts(_stored(scatter, env[scatter.invars[0]]), self.mesh, self.sharding.spec)

        summed = jax.shard_map(
            part, mesh=self.mesh, out_specs=self.sharding.spec, check_vma=False,
            in_specs=tuple(P(*map(dims.get, range(max(dims, default=-1) + 1))) for dims in self.cuts.values()))

        def zero_scatter(*values: jax.Array) -> jax.Array:
            with jax.named_scope(scope):
                return summed(*values)

        (made,) = jax.make_jaxpr(jax.jit(zero_scatter))(*map(shape_of, self.cuts)).jaxpr.eqns
        return made.replace(invars=list(self.cuts), outvars=scatter.outvars)

    def _rows(self, eqn: core.JaxprEqn, zeros: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        """A device's part of what is added to rows: of those that it holds, which others' updates pass by."""
        params = eqn.params
        if dims := self.cuts[eqn.invars[0]]:
            indices = indices - jax.lax.axis_index(TENSOR) * zeros.shape[min(dims)]
            params = params | {"mode": GatherScatterMode.FILL_OR_DROP}
        return eqn.primitive.bind(zeros, indices, updates, **params)


def _stored(scatter: core.JaxprEqn, value: jax.Array) -> jax.Array:
    """What `scatter` does to its argument, beside laying it out: merged and padded as it is stored."""
    inner = scatter.params["jaxpr"].jaxpr
    env: dict[Any, Any] = {inner.invars[0]: value}
    for eqn in inner.eqns:
        args = [atom.val if isinstance(atom, core.Literal) else env[atom] for atom in eqn.invars]
        laid_out = eqn.primitive.name == "sharding_constraint"
        env[eqn.outvars[0]] = args[0] if laid_out else eqn.primitive.bind(*args, **eqn.params)
    return env[inner.outvars[0]]


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
