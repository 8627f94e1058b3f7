"""How a model accesses each of its parameters, from its trace and never from names."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from zero_jax.frontends.param_flow import GatherCache, mark_read, param_flow, read_name
from zero_jax.jaxpr.equations import Jaxpr, inner_jaxprs, is_literal, primitive_of, shape_of, trace_with_shape
from zero_jax.jaxpr.primitives import CALLS, CONSTRAINT, CONVERT, DOT, NAME, REMAT, dot_dims, permutation
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class AccessRecorder:
    """Takes the place of a `gather.ParamUse` while tracing: records with which of its dims a parameter is read."""

    name: str
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    seen: list[tuple[str, tuple[int, ...]]] = dataclasses.field(compare=False)
    unfit: set[str] = dataclasses.field(compare=False)
    """Names of parameters that were read in a shape that is not what loops over their leading dims leave."""
    derived: set[str] = dataclasses.field(compare=False)
    """Names of parameters by which the traced function itself differentiates: it gets such a gradient as stored."""

    def drop_dim(self, index: int) -> "AccessRecorder":
        """As `ParamUse.drop_dim`."""
        return self._edit(lambda dims: dims[:index] + dims[index + 1:])

    def add_dim(self, index: int) -> "AccessRecorder":
        """As `ParamUse.add_dim`; -1 marks a dim that the stored parameter does not have."""
        return self._edit(lambda dims: (*dims[:index], -1, *dims[index:]))

    def _edit(self, edit: Callable[[tuple[int, ...]], tuple[int, ...]]) -> "AccessRecorder":
        return dataclasses.replace(self, dims=edit(self.dims), shape=edit(self.shape))

    def encoded(self, value: jax.Array, stacked: Sequence[int]) -> jax.Array:
        """As `ParamUse.encoded`: the array as it is."""
        return value

    def gather(self, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `ParamUse.gather`: the array as it is, marked as read."""
        if any(size not in (own, -1) for size, own in zip(self.shape, value.shape, strict=True)):
            self.unfit.add(self.name)
        value = mark_read(self.name, value, self.dims, functools.partial(self.derived.add, self.name))
        return value, value

    def read(self, carrier: jax.Array, gathered: jax.Array) -> jax.Array:
        """As `ParamUse.read`: records one read."""
        self.seen.append((self.name, self.dims))
        return gathered


def trace_reads(run: Callable[..., Any], args: tuple[Any, ...], on_entry: frozenset[str]
                ) -> tuple[dict[str, ParamAccess], frozenset[str]]:
    """How `run` reads each parameter, and the names of those that must be gathered up front beside `on_entry`.

    It traces `run(uses, *args)`, an `AccessRecorder` for each leaf of the parameters `args[0]`, which returns
    (outputs, {name: what the parameter is afterwards}).
    """
    params = args[0]
    seen: list[tuple[str, tuple[int, ...]]] = []
    unfit, derived = set[str](), set[str]()
    leaves = named_leaves(params)
    recorders = [AccessRecorder(name, tuple(range(leaf.ndim)), leaf.shape, seen, unfit, derived)
                 for name, leaf in leaves]
    recorded_run = functools.partial(run, jax.tree.unflatten(jax.tree.structure(params), recorders))
    closed, (_, final) = trace_with_shape(recorded_run, *args)
    flow = param_flow(closed.jaxpr, [name for name, _ in leaves], sorted(final))
    reads, products = {}, Uses()
    _walk(closed.jaxpr, {}, products)
    for name, leaf in leaves:
        dims = {dims_read for reader, dims_read in seen if reader == name}
        always_read = set(range(leaf.ndim)).intersection(*dims)
        stacked = tuple(d for d in range(leaf.ndim) if d not in always_read)
        uses = products.get(name, [None])
        in_products_alone = all(use is not None and use.ndim == leaf.ndim - len(stacked) for use in uses)
        reads[name] = ParamAccess(
            stacked=stacked, contracted=_contracted_dims(uses, leaf.ndim, stacked),
            products=len(uses) if in_products_alone else 0,
            checkpointed=any(use.checkpointed for use in uses if use is not None),
            count=sum(reader == name for reader, _ in seen), on_entry=name in on_entry,
            on_entry_if_padded=name in flow.summed | derived, written=name in flow.written, derived=name in derived)
    return reads, (flow.bypassed | unfit) - on_entry


def held(use: Any, value: Any, read: ParamAccess | None, cache: GatherCache) -> tuple[Any, Any]:
    """(use, value) that a model holds of the stored `value`: it reads its value through that use; None: as it is.

    A parameter whose reads cannot be intercepted is gathered already.
    """
    if use is None:
        return None, value
    encoded = use.encoded(value, read.stacked if read else ())
    is_padded = not isinstance(use, AccessRecorder) and not use.stored_shape.is_identity
    if read is not None and (read.on_entry or read.on_entry_if_padded and is_padded):
        return None, cache(use, encoded)
    return use, encoded


def smallest_plain(works: Callable[[frozenset[str]], bool], names: list[str]) -> frozenset[str]:
    """The fewest of `names` with which `works`, given that it does with all of them, by bisection."""

    def needed(candidates: list[str], others: frozenset[str]) -> frozenset[str]:
        if works(others):
            return frozenset()
        if len(candidates) == 1:
            return frozenset(candidates)
        half = math.ceil(len(candidates) / 2)
        left = needed(candidates[:half], others | frozenset(candidates[half:]))
        return left | needed(candidates[half:], others | left)

    return needed(names, frozenset())


_FOLLOWED = (CONVERT, CONSTRAINT, NAME, "copy")


class Product(NamedTuple):
    """A product that uses an array of `ndim` dims, and sums over those in `summed`; in a checkpoint or not."""

    ndim: int
    summed: tuple[int, ...]
    checkpointed: bool


Uses = dict[str, list[Product | None]]
"""By parameter its uses; None for what is no product."""


def _contracted_dims(uses: Sequence[Product | None], ndim: int, stacked: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dims of a parameter of `ndim` dims that all of its uses sum over; None where it has other uses.

    stacked: its dims that loops run over, which a use inside of them does not have.
    """
    found = set()
    for use in uses:
        if use is None:
            return None
        own = [dim for dim in range(ndim) if use.ndim == ndim or dim not in stacked]
        if len(own) != use.ndim:
            return None
        found.add(tuple(sorted(own[dim] for dim in use.summed)))
    return found.pop() if len(found) == 1 else None


def _walk(jaxpr: Jaxpr, known: Mapping[Any, tuple[str, tuple[int, ...]]], uses: Uses, checkpointed: bool = False
          ) -> None:
    """Adds what `jaxpr` does with the parameters whose reads it marks (`mark_read`) to `uses`.

    known: of variables that are parameters, the name, and for each dim that of the array as it was read.
    """
    aliases = dict(known)
    for eqn in jaxpr.eqns:
        taken = [None if is_literal(atom) else aliases.get(atom) for atom in eqn.invars]
        if name := read_name(eqn):
            aliases[eqn.outvars[0]] = name, tuple(range(shape_of(eqn.outvars[0]).ndim))
            uses.setdefault(name, [])
        elif primitive_of(eqn) in _FOLLOWED and taken[0]:
            aliases[eqn.outvars[0]] = taken[0]
        elif primitive_of(eqn) == "transpose" and taken[0]:
            name, dims = taken[0]
            aliases[eqn.outvars[0]] = name, tuple(dims[dim] for dim in permutation(eqn))
        elif primitive_of(eqn) == DOT:
            for side, alias in enumerate(taken):
                if alias:
                    summed = tuple(alias[1][dim] for dim in dot_dims(eqn).contracted[side])
                    uses[alias[0]].append(Product(len(alias[1]), summed, checkpointed))
        else:
            inner = inner_jaxprs(eqn)
            through = primitive_of(eqn) in CALLS and len(inner) == 1 and len(inner[0].invars) == len(taken)
            for alias in taken:
                if alias and not through:
                    uses[alias[0]].append(None)
            for each in inner:
                _walk(each, {var: alias for var, alias in zip(each.invars, taken, strict=False)
                             if alias and through}, uses, checkpointed or primitive_of(eqn) == REMAT)
    for atom in jaxpr.outvars:
        if not is_literal(atom) and atom in aliases:
            uses[aliases[atom][0]].append(None)
