"""Random keys: which inputs of a traced program they are, though their dtype does not say so, and bits by place."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.random import threefry2x32_p

from zero_jax.jaxpr.equations import ClosedJaxpr, Jaxpr, inner_jaxprs, is_literal, primitive_of
from zero_jax.jaxpr.primitives import RANDOM_WRAP


def raw_keys(closed: ClosedJaxpr) -> set[int]:
    """The numbers of those inputs whose bits are made a key, as `jax.random` does with what `PRNGKey` returns.

    Counters from which a key is seeded, or with which one is folded, are not among them.
    """
    found = set[int]()
    _results(closed.jaxpr, [{number} for number in range(len(closed.jaxpr.invars))], found)
    return found


def bits_at(key: jax.Array, position: jax.Array) -> jax.Array:
    """uint32 of the shape of `position`: what a Threefry `key` draws at these places of an array of up to 2**32.

    position: uint32, row-major. With `jax_threefry_partitionable` bits depend on the place alone.
    """
    first, second = (jax.numpy.broadcast_to(word, position.shape) for word in jax.random.key_data(key))
    high, low = threefry2x32_p.bind(first, second, jax.numpy.zeros(position.shape, position.dtype), position)
    return high ^ low


def _results(jaxpr: Jaxpr, origins: Sequence[set[int]], found: set[int]) -> list[set[int]]:
    """For each result the inputs of the program whose bits it may have; origins: that of each operand."""
    bits = dict[Any, set[int]](zip(jaxpr.invars, origins, strict=True))
    for eqn in jaxpr.eqns:
        operands = [set[int]() if is_literal(atom) else bits.get(atom, set()) for atom in eqn.invars]
        if primitive_of(eqn) == RANDOM_WRAP:
            found.update(*operands)
        if primitive_of(eqn).startswith("random_"):
            continue
        within = [_results(inner, operands[-len(inner.invars):] if inner.invars else [], found)
                  for inner in inner_jaxprs(eqn) if len(inner.invars) <= len(operands)]  # the last operands are its own
        within = [each for each in within if len(each) == len(eqn.outvars)] or [
            [set().union(*operands)] * len(eqn.outvars)]
        bits.update((var, set().union(*each)) for var, *each in zip(eqn.outvars, *within, strict=True))
    return [set() if is_literal(atom) else bits.get(atom, set()) for atom in jaxpr.outvars]
