"""Passes on the backward program that prepare the reductions of gradients, which `gather.ParamUse` makes calls."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from zero_jax.jaxpr.equations import (
    Jaxpr,
    JaxprEqn,
    eqn_of,
    is_literal,
    primitive_of,
    producers,
    shape_of,
    variable_like,
    variables,
)
from zero_jax.jaxpr.primitives import CONVERT, JIT, NAME, SCATTER_ADD, call_jaxpr, jit_name, out_shardings
from zero_jax.sharding.gather import SCATTER, SCATTER_QUANTIZED, SCATTER_WHOLE
from zero_jax.transforms.reduce_dtype import is_reduced_mark

MOVES = ("transpose", "reshape", "squeeze", "rev", "copy", NAME, CONVERT)
SUMS = ("add_any", "add")
"""Primitives through which a gradient is followed back to the product that makes it."""
_FOLLOWED = (*MOVES, *SUMS, SCATTER_ADD, "reduce_sum", "concatenate")


def merge_scatters(jaxpr: Jaxpr, *, uneven: bool = False) -> Jaxpr:
    """Adds the gradients of several reads of a parameter, and scatters the sum once instead of each.

    Why: `duplicate_param_reads` gives each read of a tied weight its own reduction.
    Cost without: 7.03 instead of 6.01 bytes sent per parameter, a tied embedding's gradient being scattered twice (4
    layers of width 1024 on 256 TPU v5e, `v5e:16x16`, stage 3).
    Order: first of the passes on the backward program: `scatter_partial_gradients` makes the calls that are merged
    here into others, and `inline_calls` follows the merged sum.

    Args:
      jaxpr: the program.
      uneven: merges only gradients that are stored in another shape than they have, or quantised.
    """
    makers = producers(jaxpr)
    num_uses = collections.Counter(atom for eqn in jaxpr.eqns for atom in variables(eqn.invars))
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        terms = [makers[atom] for atom in eqn.invars if primitive_of(eqn) == "add_any" and atom in makers]
        if (len(terms) == 2 and all(is_scatter(term) and num_uses[term.outvars[0]] == 1 for term in terms)
                and len({out_shardings(term) for term in terms}) == 1
                and len({shape_of(term.invars[0]).shape for term in terms}) == 1
                and (is_uneven(terms[0]) or is_quantized(terms[0]) or not uneven)):
            eqns = [other for other in eqns if not any(other is term for term in terms)]
            total = variable_like(terms[0].invars[0])
            makers[eqn.outvars[0]] = terms[0].replace(invars=[total], outvars=eqn.outvars)
            eqns += [eqn.replace(invars=[term.invars[0] for term in terms], outvars=[total]), makers[eqn.outvars[0]]]
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def inline_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Replaces the jitted calls from which a reduced gradient comes by what they call.

    Why: the next two passes look for the product that makes a gradient, and `jnp` functions are jitted calls.
    Cost without: the embedding's gradient is all-reduced in bf16: 8.07 instead of 7.01 bytes sent per parameter (the
    124M program with reduce=fp32).
    Order: after `merge_scatters`, whose sums it follows, and before the passes that need the products.
    """
    while True:
        makers = producers(jaxpr)
        atoms = [eqn.invars[0] for eqn in jaxpr.eqns if is_scatter(eqn) or is_reduced_mark(eqn)]
        calls: list[JaxprEqn] = []
        while atoms:
            eqn = makers.get(atoms.pop())
            if eqn is not None and is_plain_call(eqn):
                calls.append(eqn)
            elif eqn is not None and primitive_of(eqn) in _FOLLOWED:
                atoms += variables(eqn.invars)
        if not calls:
            return jaxpr
        jaxpr = jaxpr.replace(eqns=[
            inner for eqn in jaxpr.eqns
            for inner in (inlined(eqn) if any(eqn is call for call in calls) else [eqn])])


def is_scatter(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is the reduction of a gradient that `gather.ParamUse` asks for.

    Its derivatives have its name where a loss differentiates by parameters, and not its sharding.
    """
    return jit_name(eqn) in (SCATTER, SCATTER_QUANTIZED, SCATTER_WHOLE) and len(eqn.outvars) == 1 and isinstance(
        out_shardings(eqn)[0], NamedSharding)


def is_quantized(scatter: JaxprEqn) -> bool:
    """Whether the gradient is to be sent as codes."""
    return jit_name(scatter) == SCATTER_QUANTIZED


def is_of_whole(scatter: JaxprEqn) -> bool:
    """Whether the gradient is of a parameter that each device holds whole."""
    return jit_name(scatter) == SCATTER_WHOLE


def is_uneven(scatter: JaxprEqn) -> bool:
    """Whether the gradient is stored in another shape."""
    return shape_of(scatter.invars[0]).shape != shape_of(scatter.outvars[0]).shape


def is_plain_call(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a jit that `inlined` may replace."""
    return primitive_of(eqn) == JIT and not is_scatter(eqn) and not call_jaxpr(eqn).consts


def inlined(call: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equations of the jit that `call` is, and a copy of each result that none of them computes."""
    inner = call_jaxpr(call).jaxpr
    outer: dict[Any, Any] = dict(zip(inner.invars, call.invars, strict=True))
    own = {var for eqn in inner.eqns for var in eqn.outvars}
    results = {atom: out for atom, out in zip(inner.outvars, call.outvars, strict=True)
               if not is_literal(atom) and atom in own}

    def outside(atom: Any) -> Any:
        return atom if is_literal(atom) else outer[atom]

    for eqn in inner.eqns:
        invars = [outside(atom) for atom in eqn.invars]
        outer.update((var, results[var] if var in results else variable_like(var)) for var in eqn.outvars)
        yield eqn.replace(invars=invars, outvars=[outer[var] for var in eqn.outvars])
    for atom, out in zip(inner.outvars, call.outvars, strict=True):
        if outside(atom) is not out:
            yield eqn_of(jax.lax.copy_p.bind, [outside(atom)], [out])
