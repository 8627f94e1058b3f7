"""Passes of the local view: what every iteration reads is read once, what it widens is widened behind the loop."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from zero_jax.gather.gather import READS
from zero_jax.jaxpr.equations import (
    Jaxpr,
    JaxprEqn,
    eqn_of,
    is_literal,
    primitive_of,
    producers,
    replace_eqn,
    run_eqns,
    shape_of,
    value_of,
    variable_like,
    variables,
)
from zero_jax.jaxpr.primitives import CONVERT, REMAT, SCAN, Scan, call_jaxpr, with_call_jaxpr


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
    moved = set(map(id, hoisted))
    rest = body.jaxpr.replace(eqns=[inner for inner in body.jaxpr.eqns if id(inner) not in moved])

    def fun(*args: Any) -> list[Any]:
        before: dict[Any, Any] = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        before.update(zip(body.jaxpr.invars, args[:scan.num_consts], strict=False))
        run_eqns(hoisted, before)

        def iteration(*values: Any) -> list[Any]:
            env = {**before, **dict(zip(body.jaxpr.invars, values, strict=True))}
            run_eqns(rest.eqns, env)
            return [value_of(atom, env) for atom in rest.outvars]

        return scan.run(iteration, args)

    return replace_eqn(eqn, fun)


def stack_narrow(jaxpr: Jaxpr) -> Jaxpr:
    """What every iteration of a loop widens and stacks is stacked as it is, and widened behind the loop.

    Gradients of stacked layers are then held in the dtype in which they are reduced, until the update.
    """
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqns += _stacked_narrow(eqn) if primitive_of(eqn) == SCAN else [eqn]
    return jaxpr.replace(eqns=eqns) if len(eqns) > len(jaxpr.eqns) else jaxpr


def _stacked_narrow(eqn: JaxprEqn) -> list[JaxprEqn]:
    body = call_jaxpr(eqn).jaxpr
    stacked = range(Scan.of(eqn).num_carry, len(body.outvars))
    body, narrow = _unwidened(body, stacked)
    outs = {at: variable_like(eqn.outvars[at], dtype) for at, dtype in narrow.items()}
    loop = with_call_jaxpr(eqn, body)
    return [loop.replace(outvars=[outs.get(at, var) for at, var in enumerate(eqn.outvars)]), *(
        eqn_of(lambda value, at=at: value.astype(shape_of(eqn.outvars[at]).dtype), [outs[at]], [eqn.outvars[at]])
        for at in outs)]


def _unwidened(jaxpr: Jaxpr, outputs: Iterable[int]) -> tuple[Jaxpr, dict[int, Any]]:
    """(`jaxpr` with some of these outputs as they are before a last cast to a wider dtype, number -> narrow dtype)."""
    makers = producers(jaxpr)
    outvars: list[Any] = list(jaxpr.outvars)
    wanted = {at: makers[outvars[at]] for at in outputs if not is_literal(outvars[at]) and outvars[at] in makers}
    read = {var for eqn in jaxpr.eqns for var in variables(eqn.invars)}
    eqns: list[JaxprEqn] = []
    narrow: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        ends = {at: eqn.outvars.index(outvars[at]) for at, maker in wanted.items()
                if maker is eqn and outvars[at] not in read}
        if _widens(eqn):
            outvars = [eqn.invars[0] if at in ends else atom for at, atom in enumerate(outvars)]
            narrow |= dict.fromkeys(ends, shape_of(eqn.invars[0]).dtype)
        elif ends and primitive_of(eqn) == REMAT:
            inner, dtypes = _unwidened(eqn.params["jaxpr"], ends.values())
            made = [variable_like(var, dtypes[at]) if at in dtypes else var for at, var in enumerate(eqn.outvars)]
            narrow |= {at: dtypes[end] for at, end in ends.items() if end in dtypes}
            outvars = [made[ends[at]] if at in ends else atom for at, atom in enumerate(outvars)]
            eqn = eqn.replace(outvars=made, params={**eqn.params, "jaxpr": inner})
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns, outvars=outvars), narrow


def _widens(eqn: JaxprEqn) -> bool:
    if primitive_of(eqn) != CONVERT or is_literal(eqn.invars[0]):
        return False
    narrow, wide = (shape_of(atom).dtype for atom in (*eqn.invars, *eqn.outvars))
    floating = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(wide, jnp.floating)
    return floating and narrow.itemsize < wide.itemsize
