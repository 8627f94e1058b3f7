"""A pass on the backward program: gradients are computed in the dtype in which they are reduced."""

from typing import Any

import jax.numpy as jnp

from zero_jax.jaxpr.equations import Jaxpr, JaxprEqn, eqn_of, is_literal, primitive_of, producers, variable_like
from zero_jax.jaxpr.primitives import (
    CONSTRAINT,
    CONV,
    CONVERT,
    DOT,
    NAME,
    SCATTER_ADD,
    checkpoint_names,
    scatter_add_like,
    with_product_dtype,
)
from zero_jax.sharding.gather import REDUCED

_MOVES = ("transpose", "reshape", "squeeze", "rev", "copy", NAME, CONSTRAINT)
_SUMS = ("add_any", "add", "reduce_sum", "concatenate")


def compute_grads_in_reduce_dtype(jaxpr: Jaxpr) -> Jaxpr:
    """Computes in the wide dtype what is cast to it right before a gradient is reduced.

    Why: a cast before the reduction does not do it. The partitioner reduces a partial sum where it arises, in the dtype
    of the product that makes it, and casts afterwards.
    Cost without: as many bytes, 7.00 per parameter, but of whole sums in bf16, all-reduced, and not of fp32 ones,
    scattered; 6546 instead of 6285 MiB of temporaries (the 124M program with reduce=fp32).
    Order: after `inline_calls`, which uncovers the product; before `scatter_partial_gradients`, which copies the
    equations that make a gradient as it finds them.
    """
    if not any(is_reduced_mark(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    makers = producers(jaxpr)
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if is_reduced_mark(eqn):
            out: Any = eqn.outvars[0]
            eqn = eqn.replace(invars=[_widened(eqn.invars[0], out.aval.dtype, makers, eqns)])
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _is_narrower(dtype: Any, other: Any) -> bool:
    floating = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(other, jnp.floating)
    return floating and jnp.finfo(dtype).bits < jnp.finfo(other).bits


def is_reduced_mark(eqn: JaxprEqn) -> bool:
    """Whether `eqn` marks a gradient that is to be reduced, here or after the last microbatch."""
    return primitive_of(eqn) == NAME and REDUCED in checkpoint_names(eqn)


def _widened(atom: Any, dtype: Any, makers: dict[Any, JaxprEqn], eqns: list[JaxprEqn]) -> Any:
    """`atom` in `dtype`, computed in it as far back as sums and products go; appends what that takes to `eqns`."""
    if is_literal(atom) or atom not in makers:
        return atom if atom.aval.dtype == dtype else _cast(atom, dtype, eqns)
    maker: Any = makers[atom]
    primitive = primitive_of(maker)
    if atom.aval.dtype == dtype:
        narrow = primitive == CONVERT and _is_narrower(maker.invars[0].aval.dtype, dtype)
        return _widened(maker.invars[0], dtype, makers, eqns) if narrow else atom
    if primitive == CONVERT and maker.invars[0].aval.dtype == dtype:
        return maker.invars[0]
    wide = variable_like(atom, dtype)

    def operands() -> list[Any]:
        return [_widened(operand, dtype, makers, eqns) if operand.aval.dtype == atom.aval.dtype else operand
                for operand in maker.invars]

    if primitive in (DOT, CONV):
        new = with_product_dtype(maker, dtype, wide)
    elif primitive in _MOVES + _SUMS:
        new = maker.replace(outvars=[wide], invars=operands())
    elif primitive == SCATTER_ADD:
        new = scatter_add_like(maker, operands(), wide)
    else:
        return _cast(atom, dtype, eqns)
    eqns.append(new)
    return wide


def _cast(atom: Any, dtype: Any, eqns: list[JaxprEqn]) -> Any:
    wide = variable_like(atom, dtype)
    eqns.append(eqn_of(lambda value: value.astype(dtype), [atom], [wide]))
    return wide
