"""Programs as data: a traced function with the equations of its jaxpr edited, at every depth."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

Edit = Callable[[core.Jaxpr], core.Jaxpr]


def rewritten(fun: Callable[..., Any], *edits: Edit, first: Callable[[core.ClosedJaxpr], core.ClosedJaxpr] | None = None
              ) -> Callable[..., Any]:
    """`fun` with `edits` applied, in order, to its jaxpr and to those of the loops, branches and calls in it.

    first: an edit of the whole, before the others. `fun` takes and returns pytrees of arrays. An edit must keep what
    the jaxpr computes.
    """

    def wrapped(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        closed, out_shape = jax.make_jaxpr(
            lambda *flat: fun(*jax.tree.unflatten(treedef, flat)), return_shape=True)(*leaves)
        closed = first(closed) if first else closed
        for edit in edits:
            closed = _edit(closed, edit)
        return jax.tree.unflatten(jax.tree.structure(out_shape), core.jaxpr_as_fun(closed)(*leaves))

    return wrapped


def _edit(value: Any, edit: Edit) -> Any:
    """An equation's parameter: jaxprs are edited from the inside out, whatever else it is stays."""
    if isinstance(value, core.ClosedJaxpr) and not isinstance(value, core.Jaxpr):  # one class from JAX 0.12 on
        return value.replace(jaxpr=_edit(value.jaxpr, edit))
    if isinstance(value, core.Jaxpr):
        eqns = [eqn.replace(params={name: _edit(param, edit) for name, param in eqn.params.items()})
                if any(True for _ in core.jaxprs_in_params(eqn.params)) else eqn for eqn in value.eqns]
        jaxpr: Any = value  # else pyright takes it for a closed one, too
        return edit(jaxpr.replace(eqns=eqns))
    if isinstance(value, tuple) and value and all(isinstance(item, core.ClosedJaxpr) for item in value):
        return tuple(_edit(item, edit) for item in value)
    return value


def as_fun(jaxpr: Any) -> Callable[..., list[Any]]:
    """An equation's inner jaxpr, closed or without constants, as a function of flat arguments."""
    if not isinstance(jaxpr, core.ClosedJaxpr):
        jaxpr = core.ClosedJaxpr(jaxpr, ())
    return core.jaxpr_as_fun(jaxpr)


def bound(eqn: core.JaxprEqn, args: Sequence[Any], **params: Any) -> Sequence[Any]:
    """What `eqn` computes of `args`, with some of its parameters replaced."""
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params({**eqn.params, **params}))
    return out if eqn.primitive.multiple_results else [out]


def shape_of(atom: Any) -> jax.ShapeDtypeStruct:
    """A jaxpr's variable or literal as an abstract array."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, weak_type=atom.aval.weak_type)
