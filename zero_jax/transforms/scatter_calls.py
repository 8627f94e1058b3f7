"""Passes on the backward program that prepare the reductions of gradients, which `gather.ParamUse` makes calls."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from zero_jax.jaxpr.equations import (
    JaxprEqn,
    eqn_of,
    is_literal,
    variable_like,
)
from zero_jax.jaxpr.primitives import call_jaxpr, jit_name, out_shardings
from zero_jax.sharding.gather import SCATTER, SCATTER_QUANTIZED, SCATTER_WHOLE


def is_scatter(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is the reduction of a gradient that `gather.ParamUse` asks for.

    Its derivatives have its name where a loss differentiates by parameters, and not its sharding.
    """
    return jit_name(eqn) in (SCATTER, SCATTER_QUANTIZED, SCATTER_WHOLE) and len(eqn.outvars) == 1 and isinstance(
        out_shardings(eqn)[0], NamedSharding)


def inlined_eqns(call: JaxprEqn) -> Iterator[JaxprEqn]:
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
