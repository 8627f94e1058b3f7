"""A pass on the backward program: what the update writes in place is written behind the last read of it."""

from collections.abc import Mapping
from typing import Any

import jax

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    eqn_of,
    is_literal,
    is_on_host_atom,
    variable_like,
    variables,
)


def wait_for_reads(closed: ClosedJaxpr, gradients: Mapping[int, int], num_gradients: int) -> ClosedJaxpr:
    """Makes the gradients of arrays in host memory wait for the next one that follows from their last read.

    gradients: by the number of such an array among the inputs in host memory that of its gradient among the results,
    of which the first `num_gradients` are gradients.

    Why: backward reads a weight once more for the gradients of what is before it, and not for its own. Nothing keeps
    its update, which writes it in place, behind that read, and XLA:GPU copies it within host memory to be able to.
    Not for all of backward: 72.1 instead of 53.1 GiB of temporaries (a block of width 65,536 on 8 H100).
    Cost without: 512 MiB of temporaries in host memory, and 1036 instead of 531 MiB on the device (one product of
    16k x 16k on an H100).
    Order: last, on the outermost program alone, whose results the update gets.
    """
    jaxpr = closed.jaxpr
    on_host = [var for var in jaxpr.invars if is_on_host_atom(var)]
    last = _last_reads(jaxpr)
    eqns, outvars = list(jaxpr.eqns), list(jaxpr.outvars)
    for number, result in gradients.items():
        after = _following(jaxpr, last[on_host[number]], num_gradients) if on_host[number] in last else []
        if after and result not in after:
            pair = [outvars[result], outvars[after[0]]]
            outvars[result], outvars[after[0]] = map(variable_like, pair)
            eqns.append(eqn_of(lambda *both: jax.lax.optimization_barrier(both), pair,
                               [outvars[result], outvars[after[0]]]))
    return closed.replace(jaxpr=jaxpr.replace(eqns=eqns, outvars=outvars))


def _following(jaxpr: Jaxpr, eqn: JaxprEqn, num_gradients: int) -> list[int]:
    """The numbers of the gradients that follow from the results of `eqn`, in the order in which they are computed."""
    found, made = set(eqn.outvars), dict[Any, int]()
    for place, each in enumerate(jaxpr.eqns):
        made |= dict.fromkeys(each.outvars, place)
        if not found.isdisjoint(variables(each.invars)):
            found |= set(each.outvars)
    numbers = [number for number, var in enumerate(jaxpr.outvars[:num_gradients])
               if not is_literal(var) and var in found and not is_on_host_atom(var)]
    return sorted(numbers, key=lambda number: made[jaxpr.outvars[number]])


def _last_reads(jaxpr: Jaxpr) -> dict[Any, JaxprEqn]:
    """For each variable in host memory the last equation that takes it, itself or behind barriers and the like."""
    last, names = dict[Any, JaxprEqn](), {var: var for var in jaxpr.invars}
    for eqn in jaxpr.eqns:
        if len(eqn.invars) == len(eqn.outvars) and any(map(is_on_host_atom, eqn.outvars)):
            names |= {out: names[atom] for atom, out in zip(eqn.invars, eqn.outvars, strict=True)
                      if is_on_host_atom(out) and atom in variables(eqn.invars) and atom in names}
        else:
            last |= {names[atom]: eqn for atom in variables(eqn.invars) if atom in names}
    return last
