"""What backward needs of gathered parameters it gathers again, and never saves: in loops, and in the whole loss.

It holds for any model, since it looks at what a program does with its parameters, not at how it is written.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.gather.gather import GATHERED, KEPT, differentiated_last, use_of_read
from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    bind_in_scope,
    eqn_of,
    in_scope_of,
    inner_jaxprs,
    is_literal,
    is_on_host_atom,
    jaxpr_to_fun,
    needed_eqns,
    primitive_of,
    run_eqns,
    scope_of,
    trace_flat,
    value_of,
    variable_like,
    variables,
)
from zero_jax.jaxpr.primitives import (
    BARRIER,
    CALLS,
    COND,
    JIT,
    NAME,
    SCAN,
    branches,
    call_jaxpr,
    checkpoint_names,
    with_body,
)

NEVER_SAVED = ("reshape", "squeeze", "broadcast_in_dim", "stop_gradient")
"""Primitives whose results cost nothing to compute again, whatever they are of."""

BACKWARD_SCOPE = "zero_backward"
"""In the op_name of the optimization barrier between forward and backward, and of what is computed again behind it."""


def value_and_grad(fun: Callable[..., Any], *, argnums: Sequence[int], barrier: bool) -> Callable[..., Any]:
    """As `jax.value_and_grad(fun, argnums, has_aux=True)`.

    barrier: with an optimization barrier that all passes which backward uses of forward.
    """
    if not barrier:
        return jax.value_and_grad(fun, argnums, has_aux=True)

    def wrapped(*args: Any) -> Any:
        def of_these(*these: Any) -> Any:
            given = dict(zip(argnums, these, strict=True))
            return fun(*(given.get(number, arg) for number, arg in enumerate(args)))

        value, pullback, aux = jax.vjp(of_these, *(args[number] for number in argnums), has_aux=True)
        residuals, treedef = jax.tree.flatten(pullback)
        with jax.named_scope(BACKWARD_SCOPE):
            residuals = jax.lax.optimization_barrier(residuals)
        return (value, aux), jax.tree.unflatten(treedef, residuals)(jnp.ones_like(value))

    return wrapped


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
            if not is_literal(atom) and atom in reads:
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


def gather_again_in_loops(jaxpr: Jaxpr) -> Jaxpr:
    """Makes the body of each loop that reads parameters one that gathers them again in backward.

    Why: a loop stacks what its iterations save, which would be the gathered weights of all layers, or copies of them (a
    cast, a transpose). No iteration needs a barrier: forward is another loop.
    Cost without: 6860 instead of 6673 MiB of temporaries: all layers' weights at once (the 124M program).
    Order: after `isolate_inner_remat`, so that a body that checkpoints itself is left alone.
    """
    def again(eqn: JaxprEqn) -> JaxprEqn:
        body = call_jaxpr(eqn)
        return with_body(eqn, _gathering_again(jaxpr_to_fun(body), list(map(is_on_host_atom, body.jaxpr.invars))))

    return jaxpr.replace(eqns=[
        again(eqn) if primitive_of(eqn) == SCAN and _reads_params(call_jaxpr(eqn).jaxpr) else eqn
        for eqn in jaxpr.eqns])


def _reads_params(jaxpr: Jaxpr) -> bool:
    """Whether `jaxpr` reads a parameter outside of what has a derivative of its own."""
    return any(GATHERED in checkpoint_names(eqn) and primitive_of(eqn) != NAME
               or primitive_of(eqn) == JIT and _reads_params(call_jaxpr(eqn).jaxpr) for eqn in jaxpr.eqns)


def _gathering_again(fun: Callable[..., Any], on_host: Sequence[bool]) -> Callable[..., Any]:
    """`fun` as a `jax.custom_vjp` that saves nothing which is computed from gathered parameters alone."""
    def forward(*args: Any) -> tuple[Any, Any]:
        leaves, treedef = jax.tree.flatten(args)
        closed, results = trace_flat(functools.partial(jax.vjp, fun), leaves, treedef)
        out, pullback = results.children()
        jaxpr, first = closed.jaxpr, out.num_leaves
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *leaves), strict=True))
        run_eqns(jaxpr.eqns, env, bind_in_scope)
        residuals = jaxpr.outvars[first:]
        again, saved = _again(jaxpr.eqns, residuals)

        def remade(*values: Any) -> Any:
            env: dict[Any, Any] = dict(zip(saved, values, strict=True))
            run_eqns(again, env, bind_in_scope)
            return jax.tree.unflatten(pullback, [value_of(atom, env) for atom in residuals])

        return (jax.tree.unflatten(out, [value_of(atom, env) for atom in jaxpr.outvars[:first]]),
                jax.tree_util.Partial(remade, *(env[var] for var in saved)))

    return with_pullback(fun, forward, lambda remade: remade(), on_host)


def with_pullback(fun: Callable[..., Any], forward: Callable[..., tuple[Any, Any]], restore: Callable[[Any], Any],
                  on_host: Sequence[bool]) -> Callable[..., Any]:
    """`fun` as a `jax.custom_vjp`: `forward` gives its results and what backward keeps; `restore` the pullback of that.

    on_host: of each argument, whether it is in host memory. Such parameters have no derivative (`gather.Encoded`), and
    JAX makes zeros of it in device memory.
    """
    def backward(kept: Any, cotangents: Any) -> Any:
        return tuple(None if host else each for host, each in zip(on_host, restore(kept)(cotangents), strict=True))

    call = jax.custom_vjp(fun)
    call.defvjp(forward, backward)
    return call


def gather_again(jaxpr: Jaxpr, *, host_in_barriers: bool = True) -> Jaxpr:
    """Moves behind the barrier of `value_and_grad` what is computed from gathered parameters alone.

    Why: such a residual is a whole weight, or a copy of one (a cast, a transpose, a norm), and it would stay alive from
    forward to backward. Only what is stored, and activations, may pass the barrier, which XLA cannot move a gather
    across, so that the two gathers do not become one.
    Cost without: 4093 instead of 4025 MiB of temporaries (the 124M program with 6 layers, not scanned).
    Order: first of the passes on the differentiated loss, of which the others see both parts.

    host_in_barriers: as in `remat.isolate_inner_remat`.
    """
    at = next((i for i, eqn in enumerate(jaxpr.eqns) if is_backward_barrier(eqn)), None)
    if at is None:
        return jaxpr
    forward, barrier, backward = jaxpr.eqns[:at], jaxpr.eqns[at], jaxpr.eqns[at + 1:]

    # First, what is computed again. Second, the barrier of what it is computed from, and of all other residuals.
    again, saved = _again(forward, barrier.invars)
    behind = {var: variable_like(var) for var in saved if host_in_barriers or not is_on_host_atom(var)}
    eqns = [*forward, barrier.replace(invars=list(behind), outvars=list(behind.values()))]

    def rename(atom: Any) -> Any:
        return atom if is_literal(atom) else behind.get(atom, atom)

    for eqn in again:
        behind.update((var, variable_like(var)) for var in eqn.outvars)
        eqn = eqn.replace(invars=list(map(rename, eqn.invars)), outvars=list(map(rename, eqn.outvars)))
        eqns.append(in_scope_of(eqn, barrier))

    # Third, backward with these in the place of what passed the barrier.
    behind.update(zip(barrier.outvars, map(rename, barrier.invars), strict=True))
    eqns += [eqn.replace(invars=list(map(rename, eqn.invars))) for eqn in backward]
    return jaxpr.replace(eqns=eqns, outvars=list(map(rename, jaxpr.outvars)))


def _again(eqns: Sequence[JaxprEqn], residuals: Sequence[Any]) -> tuple[list[JaxprEqn], list[Any]]:
    """(What of `eqns` backward computes again for `residuals`, the variables that are saved for it and them)."""
    is_again = _made_again(eqns)
    needed, again = set(variables(residuals)), list[JaxprEqn]()
    for eqn in reversed(eqns):  # since an equation comes before those that need it
        if outs := [var for var in eqn.outvars if var in needed and var in is_again]:
            again.insert(0, eqn if len(outs) == len(eqn.outvars) else _part(eqn, outs))
            needed.update(variables(again[0].invars))
    read = [*variables(residuals), *(atom for eqn in again for atom in variables(eqn.invars))]
    return again, [var for var in dict.fromkeys(read) if var not in is_again]


def _made_again(eqns: Sequence[JaxprEqn], gathered: Iterable[Any] = ()) -> set[Any]:
    """The results of `eqns` that are never saved; gathered: those of their inputs that are gathered parameters."""
    known, free, kept = set(gathered), set[Any](), set[Any]()
    for eqn in eqns:
        operands = variables(eqn.invars)
        if GATHERED in checkpoint_names(eqn):
            known.update(eqn.outvars)
            kept.update(eqn.outvars if KEPT in checkpoint_names(eqn) else ())
        elif eqn.effects:
            continue
        elif operands and all(atom in known for atom in operands) and (
                primitive_of(eqn) in CALLS or not inner_jaxprs(eqn)):
            known.update(eqn.outvars)
        elif primitive_of(eqn) in NEVER_SAVED:
            free.update(eqn.outvars)
        elif primitive_of(eqn) in (JIT, COND):
            known.update(_made_inside(eqn, known))
    return (known | free) - kept


def _made_inside(eqn: JaxprEqn, gathered: Collection[Any]) -> Iterator[Any]:
    """The results of a call or branch that are computed from gathered parameters alone, whichever branch is taken."""
    operands, bodies = _operands_and_bodies(eqn)
    gives: list[list[bool | None]] = []
    for body in bodies:
        inputs = [var for var, atom in zip(body.jaxpr.invars, operands, strict=True)
                  if not is_literal(atom) and atom in gathered]
        made = {*inputs, *_made_again(body.jaxpr.eqns, inputs)}
        constants = _constants(body.jaxpr.eqns)
        gives.append([None if is_literal(atom) or atom in constants else atom in made for atom in body.jaxpr.outvars])
    for var, of_branches in zip(eqn.outvars, zip(*gives, strict=True), strict=True):
        if any(of_branches) and False not in of_branches:
            yield var


def _constants(eqns: Sequence[JaxprEqn]) -> set[Any]:
    """The results of `eqns` that depend on nothing: zeros in the place of another branch's residuals."""
    known = set[Any]()
    for eqn in eqns:
        if not eqn.effects and all(atom in known for atom in variables(eqn.invars)):
            known.update(eqn.outvars)
    return known


def _operands_and_bodies(eqn: JaxprEqn) -> tuple[list[Any], list[ClosedJaxpr]]:
    """What a call or branch gives to what it evaluates, and that."""
    return (eqn.invars[1:], list(branches(eqn))) if primitive_of(eqn) == COND else (eqn.invars, [call_jaxpr(eqn)])


def _part(eqn: JaxprEqn, outs: Sequence[Any]) -> JaxprEqn:
    """A call or branch for its results `outs` alone, of those operands that they need."""
    operands, bodies = _operands_and_bodies(eqn)
    kept = [i for i, var in enumerate(eqn.outvars) if var in outs]
    parts = []
    for body in bodies:
        results = [body.jaxpr.outvars[i] for i in kept]
        eqns = needed_eqns(body, results)
        used = {atom for inner in eqns for atom in variables(inner.invars)} | set(variables(results))
        parts.append((body, eqns, results, [var in used for var in body.jaxpr.invars]))
    needed = [i for i, uses in enumerate(zip(*(uses for *_, uses in parts), strict=True)) if any(uses)]

    def run(body: ClosedJaxpr, eqns: Sequence[JaxprEqn], results: Sequence[Any], _: Any, *args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        env.update(zip((body.jaxpr.invars[i] for i in needed), args, strict=True))
        run_eqns(eqns, env)
        return [value_of(atom, env) for atom in results]

    runs = [functools.partial(run, *part) for part in parts]
    invars = [operands[i] for i in needed]
    if primitive_of(eqn) == COND:
        return eqn_of(jax.jit(lambda index, *args: jax.lax.switch(index, runs, *args)), [eqn.invars[0], *invars], outs)
    return eqn_of(jax.jit(runs[0]), invars, outs)


def is_backward_barrier(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is the barrier that `value_and_grad` makes."""
    return primitive_of(eqn) == BARRIER and scope_of(eqn).endswith(BACKWARD_SCOPE)
