"""A pass on the differentiated loss: what backward needs of gathered parameters it gathers again, and never saves."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.gather.gather import GATHERED
from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    eqn_of,
    in_scope_of,
    inner_jaxprs,
    is_literal,
    is_on_host_atom,
    live_eqns,
    primitive_of,
    run_eqns,
    scope_of,
    value_of,
    variable_like,
    variables,
)
from zero_jax.jaxpr.primitives import BARRIER, CALLS, COND, JIT, branches, call_jaxpr, checkpoint_names
from zero_jax.transforms.gather_remat import NEVER_SAVED

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


def gather_again(jaxpr: Jaxpr, *, host_in_barriers: bool = True) -> Jaxpr:
    """Moves behind the barrier of `value_and_grad` what is computed from gathered parameters alone.

    Why: such a residual is a whole weight, or a copy of one (a cast, a transpose, a norm), and it would stay alive from
    forward to backward. Only what is stored, and activations, may pass the barrier, which XLA cannot move a gather
    across, so that the two gathers do not become one.
    Cost without: 4093 instead of 4025 MiB of temporaries (the 124M program with 6 layers, not scanned).
    Order: first of the passes on the differentiated loss, of which the others see both parts.

    host_in_barriers: as in `gather_remat.isolate_inner_remat`.
    """
    at = next((i for i, eqn in enumerate(jaxpr.eqns) if is_backward_barrier(eqn)), None)
    if at is None:
        return jaxpr
    forward, barrier, backward = jaxpr.eqns[:at], jaxpr.eqns[at], jaxpr.eqns[at + 1:]

    # First, what is computed again: in reverse, since an equation comes before those that need it.
    is_again = _made_again(forward)
    needed, again = set(variables(barrier.invars)), list[JaxprEqn]()
    for eqn in reversed(forward):
        if outs := [var for var in eqn.outvars if var in needed and var in is_again]:
            again.insert(0, eqn if len(outs) == len(eqn.outvars) else _part(eqn, outs))
            needed.update(variables(again[0].invars))

    # Second, the barrier of what it is computed from, and of all other residuals.
    behind = {var: variable_like(var) for var in dict.fromkeys(
        atom for eqn in (barrier, *again) for atom in variables(eqn.invars))
        if var not in is_again and (host_in_barriers or not is_on_host_atom(var))}
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


def _made_again(eqns: Sequence[JaxprEqn], gathered: Iterable[Any] = ()) -> set[Any]:
    """The results of `eqns` that are never saved; gathered: those of their inputs that are gathered parameters."""
    known, free = set(gathered), set[Any]()
    for eqn in eqns:
        operands = variables(eqn.invars)
        if GATHERED in checkpoint_names(eqn):
            known.update(eqn.outvars)
        elif eqn.effects:
            continue
        elif operands and all(atom in known for atom in operands) and (
                primitive_of(eqn) in CALLS or not inner_jaxprs(eqn)):
            known.update(eqn.outvars)
        elif primitive_of(eqn) in NEVER_SAVED:
            free.update(eqn.outvars)
        elif primitive_of(eqn) in (JIT, COND):
            known.update(_made_inside(eqn, known))
    return known | free


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
        eqns = live_eqns(body.jaxpr.eqns, results)
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
