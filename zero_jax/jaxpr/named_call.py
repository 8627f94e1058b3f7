"""Primitives of our own: one equation that a pass or a checkpoint policy knows by its names, and that traces once.

A `jax.custom_vjp` would do, but it is traced again wherever the program that holds it is evaluated: to be
differentiated, to be edited, to be lowered.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from zero_jax.jaxpr.equations import ClosedJaxpr, JaxprEqn, trace, type_of


def named_call(name: str, fun: Callable[..., Any], *, add_dim: Callable[[Any], Any] = lambda use: use
               ) -> core.Primitive:
    """A primitive `bind(*arrays, use=, names=)` that computes `fun(*arrays, use)`, an array.

    use: hashable. names: its checkpoint names (`primitives.policy_names`). Its derivative is zero, unless `set_read`
    gives another. add_dim: from a `use` to that of arrays with one more leading dim, over which `jax.vmap` maps.
    """
    primitive: Any = core.Primitive(name)

    def run(*arrays: Any, use: Any, names: tuple[str, ...]) -> Any:
        return fun(*arrays, use)

    def result(*avals: Any, use: Any, names: tuple[str, ...]) -> Any:
        return _result(fun, avals, use, jax.sharding.get_abstract_mesh())

    def batched(axis: Any, arrays: Any, dims: Any, *, use: Any, names: tuple[str, ...]) -> tuple[Any, int | None]:
        if all(dim is None for dim in dims):
            return primitive.bind(*arrays, use=use, names=names), None
        arrays = [jnp.broadcast_to(array, (axis.size, *array.shape)) if dim is None else jnp.moveaxis(array, dim, 0)
                  for array, dim in zip(arrays, dims, strict=True)]
        return primitive.bind(*arrays, use=add_dim(use), names=names), 0

    def derivative(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        out = primitive.bind(*primals, **params)
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())

    primitive.def_impl(run)
    primitive.def_abstract_eval(result)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    batching.fancy_primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = derivative
    return primitive


def set_read(primitive: Any, tangent: Any, transpose: Callable[..., Any], *, last: bool) -> None:
    """Makes `primitive`, which returns its second operand, a function of its first.

    tangent: a `named_call` that is linear; transpose: `transpose(cotangent, use)`, its transpose. last: whether it is
    differentiated for the last time; else what is left of it is a read still (a loss that itself differentiates).
    """
    def derivative(primals: Any, tangents: Any, *, use: Any, names: tuple[str, ...]) -> tuple[Any, Any]:
        out = primals[1] if last else primitive.bind(*primals, use=use, names=names)
        if isinstance(tangents[0], ad.Zero):
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, tangent.bind(tangents[0], use=use, names=())

    ad.primitive_jvps[primitive] = derivative
    ad.deflinear2(tangent, lambda cotangent, _, *, use, names: [transpose(cotangent, use)])


def watched_identity(name: str) -> core.Primitive:
    """A primitive `bind(array, on_derivative=)`: its operand, which calls `on_derivative()` when it is differentiated.

    In the bodies of loops and calls, too. It is for programs that are traced and not run.
    """
    primitive: Any = core.Primitive(name)

    def derivative(primals: Any, tangents: Any, *, on_derivative: Callable[[], None]) -> tuple[Any, Any]:
        if not isinstance(tangents[0], ad.Zero):
            on_derivative()
        return primitive.bind(*primals, on_derivative=on_derivative), tangents[0]

    def batched(arrays: Any, dims: Any, *, on_derivative: Callable[[], None]) -> tuple[Any, Any]:
        return primitive.bind(*arrays, on_derivative=on_derivative), dims[0]

    primitive.def_abstract_eval(lambda aval, *, on_derivative: aval)
    batching.primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = derivative
    return primitive


def computed_by(eqn: JaxprEqn) -> ClosedJaxpr:
    """What an equation of a primitive that `named_call` made computes."""
    return trace(functools.partial(eqn.primitive.impl, **eqn.params), *map(type_of, eqn.invars))


@functools.lru_cache(maxsize=4096)
def _result(fun: Callable[..., Any], avals: tuple[Any, ...], use: Any, mesh: Any) -> Any:
    """The type of `fun(*arrays, use)` under the abstract mesh `mesh`."""
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    return trace(lambda *arrays: fun(*arrays, use), *structs).out_avals[0]
