"""What happens to a traced loss before it is differentiated: edits of its jaxpr, and what backward may keep.

They hold for any model, since they look at what it does with its parameters and not at how it is written.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.extend.core import primitives

from zero_jax.gather import GATHERED, SECONDARY
from zero_jax.rewrite import as_fun, shape_of


def separate_reads(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Each equation that takes a parameter reads it for itself.

    Else the gradients of a weight that is used twice (a tied embedding) are added before they are reduced,
    and the partitioner all-reduces one of them to do so.
    """
    reads: dict[core.Var, core.JaxprEqn] = {}
    taken: set[core.Var] = set()
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        invars: list[Any] = list(eqn.invars)
        for i, atom in enumerate(invars):
            if _is_among(atom, reads):
                if atom in taken:
                    invars[i] = core.Var(atom.aval)
                    eqns.append(reads[atom].replace(outvars=[invars[i]]))
                taken.add(atom)
        if _is_use(eqn) and len(eqn.invars) == 2:
            reads[eqn.outvars[0]] = eqn
        eqns.append(eqn.replace(invars=invars))
    return jaxpr.replace(eqns=eqns)


def mark_derived(jaxpr: core.Jaxpr, derived: Iterable[core.Var] = ()) -> core.Jaxpr:
    """What is computed from gathered parameters alone (a cast, a transpose, a norm) counts as gathered too.

    Else such a copy of the whole weight is what backward keeps. `derived`: inputs that are such values.
    """
    found = set(derived)
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        atoms = [atom for atom in eqn.invars if not isinstance(atom, core.Literal)]
        if _is_use(eqn):
            found.update(eqn.outvars)
        elif atoms and any(atom in found for atom in atoms):
            inner = eqn.params["jaxpr"] if eqn.primitive is primitives.jit_p else None
            alone = all(atom in found for atom in atoms)
            if inner is not None and not alone:
                known = [v for v, atom in zip(inner.jaxpr.invars, eqn.invars, strict=True) if _is_among(atom, found)]
                inner = inner.replace(jaxpr=mark_derived(inner.jaxpr, known))
                eqn = eqn.replace(params={**eqn.params, "jaxpr": inner})
            elif alone and (inner is not None or not any(True for _ in core.jaxprs_in_params(eqn.params))):
                eqn = _gathered_too(eqn)
                found.update(eqn.outvars)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def hide_checkpoints(jaxpr: core.Jaxpr, *, activations: Any = None) -> core.Jaxpr:
    """Every checkpoint of the model's own becomes opaque to a checkpoint policy around it.

    `jax.checkpoint(fun, policy=...)` overrules the policies of every checkpoint inside `fun`: a model that
    already rematerialises its blocks would have all their activations saved (measured on a 6.7B decoder:
    3 GB became 83 GB). With a derivative of its own, its residuals are exactly what its own policy keeps, and
    `activations` (`activations.Activations`) may keep them elsewhere.
    """

    def hidden(eqn: core.JaxprEqn) -> core.JaxprEqn:
        params = eqn.params
        return _as_call(eqn, _keeping(
            as_fun(params["jaxpr"]), params["policy"], prevent_cse=params["prevent_cse"], activations=activations))

    return jaxpr.replace(eqns=[hidden(eqn) if eqn.primitive is primitives.remat_p else eqn for eqn in jaxpr.eqns])


def checkpoint_loops(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The body of each loop that reads parameters gets a checkpoint of its own, with `keep_all_but_gathered`.

    From a checkpoint around a loop, backward makes two loops: the first gathers what the second uses, all
    layers of it at once.
    """

    def guarded(eqn: core.JaxprEqn) -> core.JaxprEqn:
        body = eqn.params["jaxpr"]
        call = _keeping(as_fun(body), keep_all_but_gathered, prevent_cse=False)  # forward is another loop
        return eqn.replace(params={**eqn.params, "jaxpr": jax.make_jaxpr(call)(*map(shape_of, body.jaxpr.invars))})

    return jaxpr.replace(eqns=[
        guarded(eqn) if eqn.primitive is primitives.scan_p and _reads(eqn.params["jaxpr"].jaxpr) else eqn
        for eqn in jaxpr.eqns])


def keep_all_but_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """A checkpoint policy: everything may be kept for the backward pass except gathered parameters.

    The name alone is not enough: the call that it stands in is itself an equation whose output could be kept.
    """
    if prim.name == "name":
        return params["name"] != GATHERED
    return not (prim.name == "custom_vjp_call" and _holds_name(params))


def _keeping(fun: Callable[..., Any], policy: Any, *, prevent_cse: bool, activations: Any = None) -> Callable[..., Any]:
    """`fun` with a derivative of its own, which keeps what `policy` says whatever a policy around it says."""
    def saveable(prim: Any, *avals: Any, **params: Any) -> Any:
        own = policy is not None and policy(prim, *avals, **params)
        return own or prim.name == "custom_vjp_call" and _holds_name(params, SECONDARY)

    checkpointed = jax.checkpoint(fun, policy=saveable, prevent_cse=prevent_cse)

    def forward(*args: Any) -> tuple[Any, Any]:
        out, pullback = jax.vjp(checkpointed, *args)
        return out, pullback if activations is None else jax.tree.map(activations.stash, pullback)

    def backward(pullback: Any, cotangents: Any) -> Any:
        return (pullback if activations is None else jax.tree.map(activations.fetch, pullback))(cotangents)

    call = jax.custom_vjp(checkpointed)
    call.defvjp(forward, backward)
    return call


def _gathered_too(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """`eqn`, whose inputs are all gathered, as a call whose outputs the policy will not keep."""

    def fun(*args: Any) -> list[Any]:
        if eqn.primitive is primitives.jit_p:
            out = as_fun(eqn.params["jaxpr"])(*args)
        else:
            out = eqn.primitive.bind(*args, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        return [checkpoint_name(value, GATHERED) for value in out]

    call = jax.custom_vjp(fun)
    # Forward calls `call` and not `fun`: an equation that stands open could be kept before it gets its name.
    call.defvjp(lambda *args: (call(*args), args), lambda args, cotangents: jax.vjp(fun, *args)[1](cotangents))
    return _as_call(eqn, call)


def _as_call(eqn: core.JaxprEqn, call: Callable[..., Any]) -> core.JaxprEqn:
    """`eqn` replaced by a call of `call`, a `jax.custom_vjp` that computes the same."""
    (traced,) = jax.make_jaxpr(call)(*map(shape_of, eqn.invars)).jaxpr.eqns
    return traced.replace(invars=eqn.invars, outvars=eqn.outvars)


def _reads(jaxpr: core.Jaxpr) -> bool:
    """Whether `jaxpr` reads a parameter outside of what has a derivative of its own."""
    return any(_is_use(eqn) or eqn.primitive is primitives.jit_p and _reads(eqn.params["jaxpr"].jaxpr)
               for eqn in jaxpr.eqns)


def _is_use(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive is primitives.custom_vjp_call_p and _holds_name(eqn.params)


def _holds_name(params: Any, name: str = GATHERED) -> bool:
    eqns = params["call_jaxpr"].jaxpr.eqns
    return any(eqn.primitive.name == "name" and eqn.params["name"] == name for eqn in eqns)


def _is_among(atom: Any, found: Any) -> bool:
    return not isinstance(atom, core.Literal) and atom in found
