"""A pass on the traced loss: what every iteration of a loop reads is read once, before the loop."""

from typing import Any

import jax

from zero_jax.jaxpr.equations import (
    Jaxpr,
    JaxprEqn,
    primitive_of,
    replace_eqn,
    run_eqns,
    value_of,
    variables,
)
from zero_jax.jaxpr.primitives import SCAN, Scan, call_jaxpr

READS = ("zero_read", "zero_last_read")


def read_before_loops(jaxpr: Jaxpr) -> Jaxpr:
    """Moves out of each loop the reads of parameters that are the same in all of its iterations.

    A recurrent cell reads its parameters in every iteration. Read before the loop they are gathered once, and backward
    adds up a device's own gradient of all iterations, which is reduced once.
    Order: first, before loops become checkpoints.
    """
    eqns = []
    for eqn in jaxpr.eqns:
        hoisted = _invariant_reads(eqn) if primitive_of(eqn) == SCAN else []
        eqns.append(_with_reads_before(eqn, hoisted) if hoisted else eqn)
    return jaxpr.replace(eqns=eqns)


def _invariant_reads(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The equations of a loop's body that read parameters by the loop's constants alone, and what they read."""
    body = call_jaxpr(eqn).jaxpr
    known: set[Any] = set(body.invars[:Scan.of(eqn).num_consts])
    invariant = []
    for inner in body.eqns:
        operands = variables(inner.invars)
        if operands and not inner.effects and all(var in known for var in operands):
            known.update(inner.outvars)
            invariant.append(inner)
    needed, kept = set(), []
    for inner in reversed(invariant):
        if primitive_of(inner) in READS or needed.intersection(inner.outvars):
            needed.update(variables(inner.invars))
            kept.insert(0, inner)
    return kept


def _with_reads_before(eqn: JaxprEqn, hoisted: list[JaxprEqn]) -> JaxprEqn:
    scan, body = Scan.of(eqn), call_jaxpr(eqn)
    ends = scan.num_consts, scan.num_consts + scan.num_carry
    moved = set(map(id, hoisted))
    rest = [inner for inner in body.jaxpr.eqns if id(inner) not in moved]

    def fun(*args: Any) -> list[Any]:
        before: dict[Any, Any] = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        before.update(zip(body.jaxpr.invars, args[:ends[0]], strict=False))
        run_eqns(hoisted, before)

        def step(carry: Any, xs: Any) -> Any:
            env = {**before, **dict(zip(body.jaxpr.invars[ends[0]:], (*carry, *xs), strict=True))}
            run_eqns(rest, env)
            out = [value_of(atom, env) for atom in body.jaxpr.outvars]
            return out[:scan.num_carry], out[scan.num_carry:]

        carry, ys = jax.lax.scan(step, list(args[ends[0]:ends[1]]), list(args[ends[1]:]), length=scan.length,
                                 reverse=scan.reverse, unroll=scan.unroll)
        return [*carry, *ys]

    return replace_eqn(eqn, fun)
