"""Passes on the traced loss, before differentiation: loops gather weights again in backward, and never save them.

They hold for any model, since they look at what a program does with its parameters, not at how it is written.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zero_jax.gather.gather import GATHERED, KEPT, SECONDARY, differentiated_last, use_of_read
from zero_jax.jaxpr.equations import (
    Jaxpr,
    JaxprEqn,
    Var,
    bind_eqn,
    eqn_of,
    inner_jaxprs,
    is_literal,
    is_on_host_atom,
    jaxpr_to_fun,
    primitive_of,
    shape_of,
    variable_like,
    variables,
)
from zero_jax.jaxpr.primitives import (
    JIT,
    NAME,
    REMAT,
    SCAN,
    Checkpoint,
    call_jaxpr,
    checkpoint_names,
    policy_dtypes,
    policy_names,
    with_body,
    with_call_jaxpr,
)

NEVER_SAVED = ("reshape", "squeeze", "broadcast_in_dim", "stop_gradient")
"""Primitives whose results cost nothing to compute again, whatever they are of."""


def mark_last_reads(jaxpr: Jaxpr) -> Jaxpr:
    """Marks reads of parameters as differentiated for the last time, and gives each use of a tiled one its own read.

    Why: what the loss itself differentiates is behind: from here on a read has one derivative, and nothing of it is
    left beside the gathered array (`differentiated_last`). And each product in tiles takes the place of a read.
    Order: first. A read is known by its form, a gathered call of two operands, and `tag_derived_as_gathered` makes
    calls that look like one.
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
        if _is_gathered_call(eqn) and len(eqn.invars) == 2:
            eqn = differentiated_last(eqn)
            if (use := use_of_read(eqn)) is not None and use.tiles is not None:
                reads[eqn.outvars[0]] = eqn
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def tag_derived_as_gathered(jaxpr: Jaxpr, derived: Iterable[Var] = ()) -> Jaxpr:
    """Tags what is computed from gathered parameters alone (a cast, a transpose, a norm) as gathered, too.

    Why: otherwise backward saves such a copy of the gathered weight, which no policy can tell from an activation.
    Cost without: 6895 instead of 6711 MiB of temporaries: all layers' weights in bf16 (the 124M program with fp32
    parameters and modules in bf16).
    Order: in `remat_scan_bodies`, after the passes that follow a weight through transposes and casts
    (`split_sequence`), which this turns into calls.

    Args:
      jaxpr: the program.
      derived: those of its inputs that are such values.
    """
    gathered = set(derived)
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        operands = variables(eqn.invars)
        if _is_gathered_call(eqn):
            gathered.update(eqn.outvars)
        elif any(atom in gathered for atom in operands):
            is_call = primitive_of(eqn) == JIT
            all_gathered = all(atom in gathered for atom in operands)
            if is_call and not all_gathered:
                inner = call_jaxpr(eqn).jaxpr
                inputs = [var for var, atom in zip(inner.invars, eqn.invars, strict=True) if _is_among(atom, gathered)]
                eqn = with_call_jaxpr(eqn, tag_derived_as_gathered(inner, inputs))
            elif all_gathered and (is_call or not inner_jaxprs(eqn)):
                eqn = eqn if primitive_of(eqn) in NEVER_SAVED else _tagged(eqn)
                gathered.update(eqn.outvars)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def isolate_inner_remat(jaxpr: Jaxpr, *, activations: Any = None, host_in_barriers: bool = True) -> Jaxpr:
    """Makes every checkpoint of the model's own opaque to the checkpoint policy of a loop around it.

    Why: `jax.checkpoint(fun, policy=...)` overrules the policies of every checkpoint inside `fun`: a model that
    already rematerialises its blocks would have all their activations saved. As a `jax.custom_vjp` its residuals are
    exactly what its own policy keeps, and `activations` (an `activation_partitioning.Activations`) may keep them
    elsewhere.
    Cost without: nothing where a loop's body is one checkpoint, and else all that is in the checkpoint: 83 instead of 3
    GB for a 6.7B decoder, measured with a policy around the whole loss.
    Order: behind every pass that edits what is checkpointed, since the rules of a custom_vjp are functions, in which no
    pass can edit; before `remat_scan_bodies`, which leaves loops alone whose bodies are checkpointed already.

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


def remat_scan_bodies(jaxpr: Jaxpr) -> Jaxpr:
    """Checkpoints the body of each loop that reads parameters, with the policy `keep_all_but_gathered`.

    Why: a loop stacks what its iterations save, which would be the gathered weights of all layers.
    Cost without: 6860 instead of 6691 MiB of temporaries: all layers' weights at once (the 124M program).
    Order: after `isolate_inner_remat`, so that a body that checkpoints itself is not checkpointed twice.
    """

    def checkpointed(eqn: JaxprEqn) -> JaxprEqn:  # no CSE to prevent: forward is another loop
        body = call_jaxpr(eqn)
        tagged = body.replace(jaxpr=tag_derived_as_gathered(body.jaxpr))
        return with_body(eqn, _with_own_policy(jaxpr_to_fun(tagged), keep_all_but_gathered, prevent_cse=False,
                                               on_host=list(map(is_on_host_atom, body.jaxpr.invars))))

    return jaxpr.replace(eqns=[
        checkpointed(eqn) if primitive_of(eqn) == SCAN and _reads_params(call_jaxpr(eqn).jaxpr) else eqn
        for eqn in jaxpr.eqns])


def keep_all_but_gathered(prim: Any, *avals: Any, **params: Any) -> bool:
    """A checkpoint policy: everything may be saved for the backward pass except gathered parameters.

    The name alone is not enough: the call that it stands in is itself an equation whose output could be saved. Complex
    and 8-bit arrays are computed again: JAX passes what is saved through `reduce_precision`, which refuses the one kind
    and makes infinities of the other's largest values (a float8_e4m3fn of 448, say).
    """
    may_change = prim.name in ("complex", "fft") or any(map(_changes_when_saved, policy_dtypes(avals, params)))
    return not may_change and prim.name not in NEVER_SAVED and GATHERED not in policy_names(prim, params)


def _changes_when_saved(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating) or (
        jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1)


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


def _tagged(eqn: JaxprEqn) -> JaxprEqn:
    """`eqn`, whose operands are all gathered, as a call whose results `keep_all_but_gathered` refuses."""

    def fun(*args: Any) -> list[Any]:
        out = jaxpr_to_fun(call_jaxpr(eqn))(*args) if primitive_of(eqn) == JIT else bind_eqn(eqn, args)
        return [checkpoint_name(value, GATHERED) for value in out]

    call = jax.custom_vjp(fun)
    # Forward calls `call` and not `fun`: an equation outside of a call could be saved before it gets its name.
    call.defvjp(lambda *args: (call(*args), args), lambda args, cotangents: jax.vjp(fun, *args)[1](cotangents))
    return eqn_of(call, eqn.invars, eqn.outvars)


def _reads_params(jaxpr: Jaxpr) -> bool:
    """Whether `jaxpr` reads a parameter outside of what has a derivative of its own."""
    return any(_is_gathered_call(eqn) or primitive_of(eqn) == JIT and _reads_params(call_jaxpr(eqn).jaxpr)
               for eqn in jaxpr.eqns)


def _is_gathered_call(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a call that gathers or reads a parameter (`gather.ParamUse`), or one that `_tagged` made."""
    return primitive_of(eqn) != NAME and GATHERED in checkpoint_names(eqn)


def _is_among(atom: Any, known: Collection[Any]) -> bool:
    return not is_literal(atom) and atom in known
