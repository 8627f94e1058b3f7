"""Over which dims a traced model's matrix products sum its parameters: which of them are matrices, and which way."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zero_jax.frontends.param_flow import read_name
from zero_jax.jaxpr.equations import Jaxpr, inner_jaxprs, is_literal, primitive_of, shape_of
from zero_jax.jaxpr.primitives import CALLS, CONSTRAINT, CONVERT, DOT, NAME, REMAT, dot_dims, permutation

_FOLLOWED = (CONVERT, CONSTRAINT, NAME, "copy")


class Product(NamedTuple):
    """A product that uses an array of `ndim` dims, and sums over those in `summed`; in a checkpoint or not."""

    ndim: int
    summed: tuple[int, ...]
    checkpointed: bool


Uses = dict[str, list[Product | None]]
"""By parameter its uses; None for what is no product."""


def product_uses(jaxpr: Jaxpr) -> Uses:
    """What `jaxpr` does with the parameters whose reads it marks (`mark_read`)."""
    uses: Uses = {}
    _walk(jaxpr, {}, uses)
    return uses


def contracted_dims(uses: Sequence[Product | None], ndim: int, stacked: tuple[int, ...]) -> tuple[int, ...] | None:
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


def num_products(uses: Sequence[Product | None], ndim: int) -> int:
    """The number of `uses` if each is a product with an array of `ndim` dims; else 0."""
    return len(uses) if all(use is not None and use.ndim == ndim for use in uses) else 0


def _walk(jaxpr: Jaxpr, known: Mapping[Any, tuple[str, tuple[int, ...]]], uses: Uses, checkpointed: bool = False
          ) -> None:
    """known: of variables that are parameters, the name, and for each dim that of the array as it was read."""
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
