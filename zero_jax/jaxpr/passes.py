"""Applies jaxpr passes to a traced function, recursively through scans, branches and calls."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    bind_eqn,
    call_of,
    inner_jaxprs,
    jaxpr_to_fun,
    primitive_of,
    run_jaxpr,
    scope_of,
    trace,
    trace_flat,
    type_of,
)
from zero_jax.jaxpr.primitives import CALLS, call_jaxpr

Pass = Callable[[Jaxpr], Jaxpr]
"""A jaxpr pass: it returns another program for the same values (up to rounding, where it says so)."""


def with_jaxpr_passes(fun: Callable[..., Any], *passes: Pass, as_call: str = "",
                      first: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None,
                      last: Callable[[ClosedJaxpr], ClosedJaxpr] | None = None) -> Callable[..., Any]:
    """`fun` with `passes` applied in order, each to the whole program, inner jaxprs before the one that holds them.

    first, last: applied to the outermost jaxpr alone, before and after the others. `fun` takes and returns pytrees of
    arrays. as_call: the result is one jitted call of that name, which is cheaper than its equations traced again, one
    by one, and is all that the trace around it sees.
    """

    def wrapped(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        closed, out_treedef = trace_flat(fun, leaves, treedef)
        closed = first(closed) if first else closed
        for each in passes:
            closed = applied(each, closed)
        closed = last(closed) if last else closed
        outs = call_of(closed, leaves, as_call) if as_call else jaxpr_to_fun(closed)(*leaves)
        return jax.tree.unflatten(out_treedef, outs)

    return wrapped


def without_calls(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with the equations of what it calls in the place of the calls, at any depth; loops and branches stay."""
    def bind(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        with jax.named_scope(scope_of(eqn)):
            return run_jaxpr(call_jaxpr(eqn), args, bind) if primitive_of(eqn) in CALLS else bind_eqn(eqn, args)

    return trace(lambda *args: run_jaxpr(closed, args, bind), *map(type_of, closed.jaxpr.invars))


def applied(each: Pass, closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with a pass applied to it and to every jaxpr within, those within first."""
    return _apply(each, closed, {})


def _apply(each: Pass, param: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """`param`, a parameter of an equation, with the pass applied if it is a jaxpr or a tuple of closed ones.

    What does not change stays the same object, and what is the same object before is so afterwards: JAX differentiates
    and lowers a function that is called twice (`jnp.where`, say) once. known: by id, each jaxpr and its result.
    """
    if isinstance(param, ClosedJaxpr) and not isinstance(param, Jaxpr):  # one class from JAX 0.12 on
        jaxpr = _apply(each, param.jaxpr, known)
        return param if jaxpr is param.jaxpr else _once(param, known, lambda: param.replace(jaxpr=jaxpr))
    if isinstance(param, Jaxpr):
        return _once(param, known, lambda: _applied(each, param, known))
    if isinstance(param, tuple) and param and all(isinstance(item, ClosedJaxpr) for item in param):
        items = tuple(_apply(each, item, known) for item in param)
        return items if _differ(items, param) else param
    return param


def _once(param: Any, known: dict[int, tuple[Any, Any]], make: Callable[[], Any]) -> Any:
    if id(param) not in known:
        known[id(param)] = param, make()  # holding `param` keeps its id from being used again
    return known[id(param)][1]


def _applied(each: Pass, jaxpr: Any, known: dict[int, tuple[Any, Any]]) -> Jaxpr:
    eqns = [_inside(each, eqn, known) if inner_jaxprs(eqn) else eqn for eqn in jaxpr.eqns]
    jaxpr = jaxpr.replace(eqns=eqns) if _differ(eqns, jaxpr.eqns) else jaxpr
    new = each(jaxpr)
    return new if any(_differ(getattr(new, field), getattr(jaxpr, field))
                      for field in ("eqns", "invars", "outvars", "constvars")) else jaxpr


def _inside(each: Pass, eqn: JaxprEqn, known: dict[int, tuple[Any, Any]]) -> JaxprEqn:
    params = {name: _apply(each, value, known) for name, value in eqn.params.items()}
    return eqn.replace(params=params) if _differ(params.values(), eqn.params.values()) else eqn


def _differ(items: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether these are not the same objects."""
    items, others = tuple(items), tuple(others)
    return len(items) != len(others) or any(item is not other for item, other in zip(items, others, strict=True))
