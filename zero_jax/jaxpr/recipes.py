"""What a piece of a program computes again, rather than be given it: masks and the like, large and made of little."""

from collections.abc import Iterable, Mapping
from typing import Any

from zero_jax.jaxpr.equations import ClosedJaxpr, JaxprEqn, primitive_of, variables
from zero_jax.jaxpr.primitives import BROADCAST, ELEMENTWISE, IOTA, JIT, call_jaxpr

_SHAPES = ("reshape", "squeeze", "expand_dims")
_LARGE = 2**10
"""Bytes from which on a value counts."""


def recipe(var: Any, makers: Mapping[Any, JaxprEqn]) -> list[JaxprEqn]:
    """The equations of broadcasts and elementwise operations that `var` follows from, in order; none where it is small.

    None, too, where what they begin with takes half of its bytes or more. XLA computes them within what reads `var`.

    makers: of each variable that may be computed again.
    """
    size = _bytes(var)
    if size < _LARGE:
        return []
    eqns: dict[int, JaxprEqn] = {}
    begins: set[Any] = set()

    def visit(each: Any) -> None:
        eqn = makers.get(each)
        if eqn is None or not _is_cheap(eqn):
            begins.add(each)
        elif id(eqn) not in eqns:
            for atom in variables(eqn.invars):
                visit(atom)
            eqns[id(eqn)] = eqn

    visit(var)
    return list(eqns.values()) if sum(map(_bytes, begins)) <= size / 2 else []


def _is_cheap(eqn: JaxprEqn) -> bool:
    if primitive_of(eqn) == JIT:
        closed: ClosedJaxpr = call_jaxpr(eqn)
        return not closed.consts and all(map(_is_cheap, closed.jaxpr.eqns))
    return primitive_of(eqn) in ELEMENTWISE or primitive_of(eqn) in (BROADCAST, IOTA, *_SHAPES)


def in_order(eqns: Iterable[JaxprEqn], wanted: Iterable[JaxprEqn]) -> tuple[JaxprEqn, ...]:
    """Those of `eqns` that are `wanted`, each once."""
    numbers = {id(eqn) for eqn in wanted}
    return tuple(eqn for eqn in eqns if id(eqn) in numbers)


def _bytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize
