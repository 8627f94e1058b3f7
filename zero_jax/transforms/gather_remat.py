"""Passes on the traced loss, before differentiation: what is read for the last time, and a model's own checkpoints."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.gather.gather import KEPT, SECONDARY, differentiated_last, use_of_read
from zero_jax.jaxpr.equations import (
    Jaxpr,
    JaxprEqn,
    Var,
    eqn_of,
    is_literal,
    is_on_host_atom,
    jaxpr_to_fun,
    primitive_of,
    shape_of,
    variable_like,
)
from zero_jax.jaxpr.primitives import (
    NAME,
    REMAT,
    Checkpoint,
    call_jaxpr,
    policy_names,
)


def mark_last_reads(jaxpr: Jaxpr) -> Jaxpr:
    """Marks reads of parameters as differentiated for the last time, and gives each use of a tiled one its own read.

    Why: what the loss itself differentiates is behind: from here on a read has one derivative, and nothing of it is
    left beside the gathered array (`differentiated_last`). And each product in tiles takes the place of a read.
    Order: first.
    """
    reads: dict[Var, JaxprEqn] = {}  # of weights in tiles
    consumed: set[Var] = set()
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        invars: list[Any] = list(eqn.invars)
        for i, atom in enumerate(invars):
            if _is_among(atom, reads):
                if atom in consumed:
                    invars[i] = variable_like(atom)
                    eqns.append(reads[atom].replace(outvars=[invars[i]]))
                consumed.add(atom)
        eqn = eqn if invars == list(eqn.invars) else eqn.replace(invars=invars)
        if (use := use_of_read(eqn)) is not None:
            eqn = differentiated_last(eqn)
            if use.tiles is not None:
                reads[eqn.outvars[0]] = eqn
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def isolate_inner_remat(jaxpr: Jaxpr, *, activations: Any = None, host_in_barriers: bool = True) -> Jaxpr:
    """Makes every checkpoint of the model's own a `jax.custom_vjp` that keeps for backward what its policy says.

    Why: gathered parameters that backward takes from forward are kept, and what hpZ gathered, whatever the model's
    policy says; and `activations` (an `activation_partitioning.Activations`) may keep its residuals elsewhere.
    Order: behind every pass that edits what is checkpointed, since the rules of a custom_vjp are functions, in which no
    pass can edit; before `gather_again_in_loops`, which leaves loops alone whose bodies are checkpointed already.

    host_in_barriers: whether parameters in host memory may be operands of the barrier that keeps XLA from merging
    forward and recomputation. XLA:TPU takes all operands of such a barrier for the host's (libtpu of jax 0.10.2).
    """

    def isolated(eqn: JaxprEqn) -> JaxprEqn:
        checkpoint = Checkpoint.of(eqn)
        prevent_cse = checkpoint.prevent_cse
        if prevent_cse is True and not host_in_barriers:
            prevent_cse = tuple(not is_on_host_atom(atom) for atom in eqn.invars)
        call = _with_own_policy(jaxpr_to_fun(call_jaxpr(eqn)), checkpoint.policy, prevent_cse=prevent_cse,
                                on_host=[is_on_host_atom(atom) for atom in eqn.invars], activations=activations)
        if any(not jnp.issubdtype(shape_of(var).dtype, jnp.inexact) for var in eqn.outvars):
            call = jax.jit(_without_tangents_of_integers(call))
        return eqn_of(call, eqn.invars, eqn.outvars)

    return jaxpr.replace(eqns=[isolated(eqn) if primitive_of(eqn) == REMAT else eqn for eqn in jaxpr.eqns])


def _with_own_policy(fun: Callable[..., Any], policy: Any, *, prevent_cse: Any, on_host: Sequence[bool],
                     activations: Any = None) -> Callable[..., Any]:
    """`fun` as a `jax.custom_vjp` whose residuals are what `policy` keeps, whatever a policy around it says.

    on_host: of each argument, whether it is in host memory.
    """
    def saveable(prim: Any, *avals: Any, **params: Any) -> Any:
        saved = policy is not None and policy(prim, *avals, **params)
        return saved or prim.name != NAME and not {KEPT, SECONDARY}.isdisjoint(policy_names(prim, params))

    checkpointed = jax.checkpoint(fun, policy=saveable, prevent_cse=prevent_cse)

    def forward(*args: Any) -> tuple[Any, Any]:
        out, pullback = jax.vjp(checkpointed, *args)
        return out, pullback if activations is None else jax.tree.map(activations.stash, pullback)

    def backward(pullback: Any, cotangents: Any) -> Any:
        pullback = pullback if activations is None else jax.tree.map(activations.fetch, pullback)
        # Parameters in host memory have no derivative (`gather.Encoded`), and JAX makes zeros of it in device memory.
        return tuple(None if host else each for host, each in zip(on_host, pullback(cotangents), strict=True))

    call = jax.custom_vjp(checkpointed)
    call.defvjp(forward, backward)
    return call


def _without_tangents_of_integers(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a custom_vjp, of whose integers JAX has tangents, which a `lax.cond` refuses of its index."""
    return lambda *args: [out if jnp.issubdtype(out.dtype, jnp.inexact) else jax.lax.stop_gradient(out)
                          for out in call(*args)]


def _is_among(atom: Any, known: Collection[Any]) -> bool:
    return not is_literal(atom) and atom in known
