"""Rematerialisation that composes: a checkpoint policy which leaves the model's own checkpoints alone.

`jax.checkpoint(fun, policy=...)` overrules the policies of every checkpoint inside `fun`: a model that
already rematerialises its blocks would have all their activations saved (measured on a 6.7B decoder:
3 GB became 83 GB). `checkpoint` here first gives each inner checkpoint a derivative of its own, whose
residuals are exactly what its own policy keeps; the outer policy then decides on what lies outside.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives


def checkpoint(fun: Callable[..., Any], policy: Callable[..., bool]) -> Callable[..., Any]:
    """Like `jax.checkpoint(fun, policy=policy)`, but checkpoints inside `fun` keep their own policies.

    `fun` takes and returns pytrees of arrays. Every argument may be differentiated.
    """

    def wrapped(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        closed, out_shape = jax.make_jaxpr(
            lambda *flat: fun(*jax.tree.unflatten(treedef, flat)), return_shape=True)(*leaves)
        opaque = closed.replace(jaxpr=_hide_checkpoints(closed.jaxpr))
        out = jax.checkpoint(core.jaxpr_as_fun(opaque), policy=policy)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(out_shape), out)

    return wrapped


def _hide_checkpoints(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """`jaxpr` with every checkpoint equation, at any depth, made opaque to a policy around it."""
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitives.remat_p:
            traced = jax.make_jaxpr(_own_derivative(eqn.params))(*(_shape_of(v.aval) for v in eqn.invars))
            (opaque,) = traced.jaxpr.eqns
            eqn = opaque.replace(invars=eqn.invars, outvars=eqn.outvars)
        else:
            eqn = eqn.replace(params={name: _hide_in(value) for name, value in eqn.params.items()})
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _hide_in(value: Any) -> Any:
    """A parameter of an equation: the jaxprs of loops, branches and calls are rewritten, the rest kept."""
    if isinstance(value, core.ClosedJaxpr):
        return value.replace(jaxpr=_hide_checkpoints(value.jaxpr))
    if isinstance(value, tuple) and value and all(isinstance(item, core.ClosedJaxpr) for item in value):
        return tuple(map(_hide_in, value))
    return value


def _own_derivative(params: dict[str, Any]) -> Callable[..., Any]:
    """A checkpoint's body as a function whose residuals are those that its own policy keeps."""
    body = core.jaxpr_as_fun(core.ClosedJaxpr(params["jaxpr"], ()))
    inner = jax.checkpoint(body, policy=params["policy"], prevent_cse=params["prevent_cse"])
    fun = jax.custom_vjp(inner)
    fun.defvjp(lambda *args: jax.vjp(inner, *args), lambda pullback, cotangents: pullback(cotangents))
    return fun


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
