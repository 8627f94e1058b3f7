"""A pass for CPUs on a program in parts: one collective after the other, as those of one `jax.shard_map` must be.

JAX gives all of these one channel, and XLA:CPU begins a collective behind a loop before other threads have ended the
loop (jax 0.10.2, `kScheduling` in its `execution_graph.h`): devices would meet at different ones, which ends the
process. So a loop waits for what is sent before it, and what is sent behind it for the loop.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    closed_jaxpr,
    eqn_of,
    inner_jaxprs,
    is_literal,
    primitive_of,
    shape_of,
    variable_like,
    variables,
)
from zero_jax.jaxpr.passes import applied
from zero_jax.jaxpr.primitives import COND, SCAN

_COLLECTIVES = ("all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "pmax", "pmin", "ppermute", "psum",
                "psum_invariant", "ragged_all_to_all", "reduce_scatter")
_LOOPS = (COND, SCAN, "while")


def one_by_one(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with data that every loop that sends, and everything sent behind one, waits for."""
    return applied(_in_order, closed)


def _in_order(jaxpr: Jaxpr) -> Jaxpr:
    eqns: list[JaxprEqn] = []
    sent: list[Any] = []  # of the last loop, and what was sent since
    behind_loop = False
    for eqn in jaxpr.eqns:
        sends, loops = _sends(eqn)
        operands = [var for var in variables(eqn.invars) if _is_number(var)]
        if loops:
            waiting = sorted(operands, key=lambda var: math.prod(shape_of(var).shape))[:1] if sent else []
        else:
            waiting = operands if sends and behind_loop else []
        behind = sent if loops else sent[:1]
        later: dict[Any, Any] = {var: variable_like(var) for var in waiting}
        eqns += [eqn_of(jax.jit(_wait), [var, *behind], [other]) for var, other in later.items()]
        eqns.append(eqn.replace(invars=[atom if is_literal(atom) else later.get(atom, atom) for atom in eqn.invars]))
        made = [var for var in eqn.outvars if _is_number(var)]
        if loops:
            sent, behind_loop = made[:1], True
        elif sends:
            sent += made[:1]
    return jaxpr.replace(eqns=eqns) if behind_loop else jaxpr


def _sends(eqn: JaxprEqn) -> tuple[bool, bool]:
    """Whether an equation is or holds a collective, and whether it is or holds a loop that does."""
    inner = [_sends(each) for jaxpr in inner_jaxprs(eqn) for each in closed_jaxpr(jaxpr).jaxpr.eqns]
    sends = primitive_of(eqn) in _COLLECTIVES or any(sends for sends, _ in inner)
    return sends, sends and primitive_of(eqn) in _LOOPS or any(loops for _, loops in inner)


def _is_number(var: Any) -> bool:
    """Whether a variable is an array with elements, other than of keys."""
    return math.prod(shape_of(var).shape) > 0 and not jnp.issubdtype(shape_of(var).dtype, jax.dtypes.extended)


def _wait(value: jax.Array, *sent: jax.Array) -> jax.Array:
    """`value`, by way of `sent`: on CPUs XLA keeps no barrier, but does not know that no square is below -1."""
    firsts = [jnp.real(each[(0,) * each.ndim]).astype(jnp.float32) for each in sent]
    never = functools.reduce(jnp.logical_or, [first * first < -1 for first in firsts])
    return jnp.where(never, ~value if value.dtype == bool else value + jnp.ones_like(value), value)
