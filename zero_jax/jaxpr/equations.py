"""Tracing functions, and building, evaluating and nesting equations, whatever their primitives are."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, get_opaque_trace_state


def trace(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """The jaxpr of `fun(*args)`; `args` are pytrees of arrays or of `jax.ShapeDtypeStruct`s."""
    return jax.make_jaxpr(fun)(*args)


def trace_with_shape(fun: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """As `trace`, and what `fun` returns as a pytree of `jax.ShapeDtypeStruct`s."""
    return jax.make_jaxpr(fun, return_shape=True)(*args)


def trace_flat(fun: Callable[..., Any], leaves: Sequence[Any], treedef: Any) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of `fun` on the flattened arguments `leaves`, and the treedef of what it returns."""
    closed, out_shape = trace_with_shape(lambda *flat: fun(*jax.tree.unflatten(treedef, flat)), *leaves)
    return closed, jax.tree.structure(out_shape)


def jaxpr_to_fun(jaxpr: Any) -> Callable[..., list[Any]]:
    """A jaxpr, closed or without constants, as a function of flat arguments."""
    return core.jaxpr_as_fun(closed_jaxpr(jaxpr))


def current_trace() -> Any:
    """The trace in which this is called: equal to another result if and only if values may pass between the two."""
    return get_opaque_trace_state(convention="flax")


def is_literal(atom: Any) -> bool:
    """Whether an operand is a constant that is written into the equation."""
    return isinstance(atom, Literal)


def variables(atoms: Iterable[Any]) -> list[Var]:
    """Those of `atoms` that are variables."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def value_of(atom: Any, env: Mapping[Any, Any]) -> Any:
    """The value of an operand: a literal's own, a variable's from `env`."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def variable_like(atom: Any, dtype: Any = None) -> Any:
    """A new variable of the type of `atom`, or of that with another (strong) dtype."""
    return Var(atom.aval if dtype is None else atom.aval.update(dtype=jax.numpy.dtype(dtype), weak_type=False))


def variable_on_host(atom: Any) -> Any:
    """A new variable of the type of `atom`, in host memory."""
    return Var(atom.aval.update(memory_space=jax.memory.Space.Host))


def shape_of(atom: Any) -> jax.ShapeDtypeStruct:
    """A variable or literal as an abstract array."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, weak_type=atom.aval.weak_type)


def is_on_host_atom(atom: Any) -> bool:
    """Whether an operand is an array in host memory."""
    return getattr(atom.aval, "memory_space", None) == jax.memory.Space.Host


def type_of(atom: Any) -> Any:
    """As `shape_of`, but in host memory where the operand is."""
    return atom.aval if is_on_host_atom(atom) else shape_of(atom)


def primitive_of(eqn: JaxprEqn) -> str:
    """The name of the primitive of an equation, as "dot_general"."""
    return eqn.primitive.name


def scope_of(eqn: JaxprEqn) -> str:
    """The `jax.named_scope`s in which an equation was traced, joined by slashes."""
    return str(eqn.source_info.name_stack)


def in_scope_of(eqn: JaxprEqn, other: JaxprEqn) -> JaxprEqn:
    """`eqn` with its own scopes inside of those of `other`."""
    source = eqn.source_info
    return eqn.replace(source_info=source.replace(name_stack=other.source_info.name_stack + source.name_stack))


def producers(jaxpr: Jaxpr) -> dict[Any, JaxprEqn]:
    """Variable -> the equation of `jaxpr` that computes it."""
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def all_eqns(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of `jaxpr` and of every jaxpr within, in program order."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_eqns(inner)


def bind_eqn(eqn: JaxprEqn, args: Sequence[Any], **params: Any) -> Sequence[Any]:
    """The results of `eqn` on the values `args`."""
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params({**eqn.params, **params}))
    return out if eqn.primitive.multiple_results else [out]


def bind_in_scope(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    """As `bind_eqn`, in the scopes in which `eqn` was traced."""
    with jax.named_scope(scope_of(eqn)):
        return bind_eqn(eqn, args)


def run_eqns(eqns: Iterable[JaxprEqn], env: dict[Any, Any],
             bind: Callable[[JaxprEqn, list[Any]], Sequence[Any]] = bind_eqn) -> None:
    """Evaluates `eqns` with `bind`, reading operands from `env` (variable -> value) and writing results into it."""
    for eqn in eqns:
        env.update(zip(eqn.outvars, bind(eqn, [value_of(atom, env) for atom in eqn.invars]), strict=True))


def run_jaxpr(closed: ClosedJaxpr, args: Sequence[Any],
              bind: Callable[[JaxprEqn, list[Any]], Sequence[Any]] = bind_eqn) -> list[Any]:
    """The results of `closed` on `args`, each equation evaluated with `bind`."""
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
    run_eqns(jaxpr.eqns, env, bind)
    return [value_of(atom, env) for atom in jaxpr.outvars]


def eqn_of(fun: Callable[..., Any], invars: Sequence[Any], outvars: Sequence[Any]) -> JaxprEqn:
    """The equation `outvars = fun(*invars)`; `fun` must trace to exactly one."""
    (eqn,) = trace(fun, *map(type_of, invars)).jaxpr.eqns
    return eqn.replace(invars=list(invars), outvars=list(outvars))


def call_of(closed: ClosedJaxpr, args: Sequence[Any], name: str) -> Sequence[Any]:
    """The results of `closed` on the values `args`, as one jitted call of that name: nothing in it is traced again."""
    if closed.consts:  # which may belong to the trace around this
        return jaxpr_to_fun(closed)(*args)
    call = trace(jax.jit(lambda *_: [0.0] * len(closed.jaxpr.outvars)), *map(
        shape_of, closed.jaxpr.invars)).jaxpr.eqns[0]
    return bind_eqn(call, args, jaxpr=closed, name=name)


def replace_eqn(eqn: JaxprEqn, fun: Callable[..., Any]) -> JaxprEqn:
    """A jitted call of `fun`, which computes what `eqn` does, in the place of `eqn`."""
    return eqn_of(jax.jit(fun), eqn.invars, eqn.outvars)


def needed_eqns(closed: ClosedJaxpr, wanted: Iterable[Any]) -> list[JaxprEqn]:
    """The equations, in order, that the variables among `wanted` follow from."""
    found, needed = set(variables(wanted)), []
    for eqn in reversed(closed.jaxpr.eqns):
        if not found.isdisjoint(eqn.outvars):
            found.update(variables(eqn.invars))
            needed.append(eqn)
    return needed[::-1]


def structure_of(eqns: Iterable[JaxprEqn], invars: Sequence[Any], outvars: Sequence[Any]) -> tuple[Any, ...]:
    """A hashable that is the same of equations that compute the same from operands of the same types."""
    numbers: dict[Any, int] = {}

    def atom_key(atom: Any) -> Any:
        if isinstance(atom, Literal):
            value = numpy.asarray(atom.val)
            return str(atom.aval), value.dtype.str, value.tobytes()
        return numbers.setdefault(atom, len(numbers)), str(atom.aval)

    inputs = [atom_key(var) for var in invars]
    steps = [(eqn.primitive.name, str(sorted(eqn.params.items(), key=lambda item: item[0])),
              *map(atom_key, eqn.invars), *map(atom_key, eqn.outvars)) for eqn in eqns]
    return tuple(inputs), tuple(steps), tuple(map(atom_key, outvars))


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs in the parameters of `eqn`: bodies, branches, what a call evaluates."""
    return list(core.jaxprs_in_params(eqn.params))


def closed_jaxpr(jaxpr: Any) -> ClosedJaxpr:
    """`jaxpr` if it is closed, else with no constants."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())
