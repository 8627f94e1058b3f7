"""Equations as calls that equal ones share, so that JAX differentiates each of them once and not in every place."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy

from zero_jax.jaxpr.equations import ClosedJaxpr, JaxprEqn, is_literal, shape_of, trace, variable_like, variables
from zero_jax.jaxpr.primitives import call_jaxpr, inlined


def with_shared_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed`, to be differentiated: its outermost equations as inlined calls, one program for all that are equal.

    Why: JAX derives an equation by tracing its rule, in every place and at every trace, but a call only once. A model
    that is traced by itself has calls (each function of `jnp` is one), and loses them where its jaxpr is.
    Cost without: 40 of 290 CPU ms to trace a step of two layers (tunix's Llama 3 at stage 3, of which 75 ms are left of
    a plain loop's 150). What is lowered is the same, to the source lines.

    Inlined calls vanish when they are traced again, into equations with the source of the call. Equal are equations of
    one primitive with the same parameters, types and constants; those with effects, of several results (which loops,
    branches and calls have) or of integers stay.
    """
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=[_as_call(eqn) for eqn in closed.jaxpr.eqns]))


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What equal equations have in common, and one of them."""

    primitive: Any
    params: Hashable
    atoms: Hashable
    context: Hashable
    eqn: JaxprEqn = dataclasses.field(compare=False, repr=False)


def _as_call(eqn: JaxprEqn) -> JaxprEqn:
    operands: list[Any] = variables(eqn.invars)
    if eqn.effects or eqn.primitive.multiple_results or not operands or not jnp.issubdtype(
            shape_of(eqn.outvars[0]).dtype, jnp.inexact):
        return eqn
    params, atoms = tuple(eqn.params.items()), tuple(map(_atom_kind, (*eqn.invars, *eqn.outvars)))
    try:
        hash(params)
    except TypeError:
        return eqn
    call = _call(_Kind(eqn.primitive, params, atoms, eqn.ctx, eqn))
    return eqn.replace(primitive=call.primitive, params=call.params, invars=operands)


def _atom_kind(atom: Any) -> Hashable:
    """The type of a variable; of a constant also its bits: 0.0 is equal to -0.0, and nan to nothing."""
    if not is_literal(atom):
        return atom.aval
    value = numpy.asarray(atom.val)
    return atom.aval, value.dtype, value.tobytes()


@functools.lru_cache(maxsize=1024)
def _call(kind: _Kind) -> JaxprEqn:
    """An inlined call of an equation of this kind, whose variables are its operands."""
    source = kind.eqn.source_info
    eqn = kind.eqn.replace(
        invars=[atom if is_literal(atom) else variable_like(atom) for atom in kind.eqn.invars],
        outvars=list(map(variable_like, kind.eqn.outvars)),
        source_info=source.replace(name_stack=type(source.name_stack)()))  # the call has its scopes
    operands = variables(eqn.invars)
    (call,) = trace(jax.jit(lambda *_: [0.0]), *[jax.ShapeDtypeStruct((), jnp.float32)] * len(operands)).jaxpr.eqns
    return inlined(call, call_jaxpr(call).jaxpr.replace(invars=operands, outvars=eqn.outvars, eqns=[eqn]))
