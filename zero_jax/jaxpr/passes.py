"""Applies jaxpr passes to a traced function, recursively through scans, branches and calls."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from zero_jax.jaxpr.equations import ClosedJaxpr, Jaxpr, inner_jaxprs, trace_flat

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
