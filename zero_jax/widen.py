"""Gradients computed in the dtype that they are reduced in.

A cast before the reduction does not do it: the partitioner reduces a partial sum where it arises, in the dtype of
the product that makes it. `widen_reductions` edits the backward pass so that this product comes out wide.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from zero_jax.gather import REDUCED

_MOVES = ("transpose", "reshape", "squeeze", "expand_dims", "rev", "copy", "name", "sharding_constraint")
_CONTRACTS = ("dot_general", "conv_general_dilated")
_SUMS = ("add_any", "add", "reduce_sum", "concatenate")


def widen_reductions(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """An edit for `rewrite.rewritten`: what is cast right before a reduction is computed in the wide dtype."""
    if not any(_is_mark(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    makers: dict[Any, Any] = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if _is_mark(eqn):
            out: Any = eqn.outvars[0]
            eqn = eqn.replace(invars=[_widened(eqn.invars[0], out.aval.dtype, makers, eqns)])
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _is_mark(eqn: core.JaxprEqn) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == REDUCED


def _widened(atom: Any, dtype: Any, makers: dict[Any, Any], eqns: list[core.JaxprEqn]) -> Any:
    """`atom` in `dtype`, computed in it as far back as sums and products go; appends what that takes to `eqns`."""
    maker = None if _is_literal(atom) else makers.get(atom)
    if atom.aval.dtype == dtype:
        if maker is not None and maker.primitive.name == "convert_element_type" and jnp.finfo(
                maker.invars[0].aval.dtype).bits < jnp.finfo(dtype).bits:
            return _widened(maker.invars[0], dtype, makers, eqns)
        return atom
    name = "" if maker is None else maker.primitive.name
    wide = core.Var(atom.aval.update(dtype=jnp.dtype(dtype), weak_type=False))
    if maker is not None and name == "convert_element_type" and maker.invars[0].aval.dtype == dtype:
        return maker.invars[0]
    if maker is not None and name in _CONTRACTS:
        new = maker.replace(outvars=[wide], params={**maker.params, "preferred_element_type": jnp.dtype(dtype)})
    elif maker is not None and name in _MOVES + _SUMS:
        new = maker.replace(outvars=[wide], invars=[
            _widened(v, dtype, makers, eqns) if v.aval.dtype == atom.aval.dtype else v for v in maker.invars])
    elif maker is not None and maker.primitive is primitives.scatter_add_p:
        new = _scatter_add(maker, [
            _widened(v, dtype, makers, eqns) if v.aval.dtype == atom.aval.dtype else v for v in maker.invars], wide)
    else:
        (new,) = jax.make_jaxpr(lambda x: x.astype(dtype))(
            jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)).jaxpr.eqns
        new = new.replace(invars=[atom], outvars=[wide])
    eqns.append(new)
    return wide


def _scatter_add(old: core.JaxprEqn, invars: list[Any], wide: core.Var) -> core.JaxprEqn:
    """A scatter-add as `old`; made anew, since it carries its addition as a jaxpr of its dtype."""
    params = {name: old.params[name] for name in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]
    (new,) = jax.make_jaxpr(lambda *args: jax.lax.scatter_add(*args, **params))(*shapes).jaxpr.eqns
    return new.replace(invars=invars, outvars=[wide])


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)
