"""Applies jaxpr passes to a traced function, recursively through scans, branches and calls."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    bind_eqn,
    inner_jaxprs,
    primitive_of,
    run_eqns,
    scope_of,
    shape_of,
    trace,
    trace_flat,
    value_of,
)
from zero_jax.jaxpr.primitives import CALLS, call_jaxpr

Pass = Callable[[Jaxpr], Jaxpr]
"""A jaxpr pass: it returns another program for the same values (up to rounding, where it says so)."""


def with_jaxpr_passes(fun: Callable[..., Any], *passes: Pass,
                      first: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None) -> Callable[..., Any]:
    """`fun` with `passes` applied in order, each to the whole program, inner jaxprs before the one that holds them.

    first: applied to the outermost jaxpr alone, before the others. `fun` takes and returns pytrees of arrays.
    """

    def wrapped(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        closed, out_treedef = trace_flat(fun, leaves, treedef)
        closed = first(closed) if first else closed
        for each in passes:
            closed = _apply(each, closed)
        return jax.tree.unflatten(out_treedef, core.jaxpr_as_fun(closed)(*leaves))

    return wrapped


def without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with the equations of what it calls in the place of the calls, at any depth; loops and branches stay."""
    def run(closed: ClosedJaxpr, args: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        run_eqns(jaxpr.eqns, env, bind)
        return [value_of(atom, env) for atom in jaxpr.outvars]

    def bind(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        with jax.named_scope(scope_of(eqn)):
            return run(call_jaxpr(eqn), args) if primitive_of(eqn) in CALLS else bind_eqn(eqn, args)

    return trace(lambda *args: run(closed, args), *map(shape_of, closed.jaxpr.invars))


def _apply(each: Pass, param: Any) -> Any:
    """`param`, a parameter of an equation, with the pass applied if it is a jaxpr or a tuple of closed ones."""
    if isinstance(param, ClosedJaxpr) and not isinstance(param, Jaxpr):  # one class from JAX 0.12 on
        return param.replace(jaxpr=_apply(each, param.jaxpr))
    if isinstance(param, Jaxpr):
        eqns = [eqn.replace(params={name: _apply(each, value) for name, value in eqn.params.items()})
                if inner_jaxprs(eqn) else eqn for eqn in param.eqns]
        jaxpr: Any = param  # else pyright takes it for a closed one, too
        return each(jaxpr.replace(eqns=eqns))
    if isinstance(param, tuple) and param and all(isinstance(item, ClosedJaxpr) for item in param):
        return tuple(_apply(each, item) for item in param)
    return param
