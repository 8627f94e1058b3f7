"""The one matrix product that uses a parameter, found from where it is read: for passes that replace it."""

import dataclasses
from typing import Any

import jax

from zero_jax.jaxpr.equations import Jaxpr, JaxprEqn, bind_eqn, primitive_of, shape_of, variables
from zero_jax.jaxpr.primitives import CONVERT, DOT, JIT, NAME, call_jaxpr, dot_dims, inlined_eqns, permutation

_MOVES = (CONVERT, NAME, "transpose", "copy")
"""Primitives of one operand through which a weight is followed to its product."""


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """moves: what the model does with a weight before the product `dot`, whose operand `side` it is."""

    moves: tuple[JaxprEqn, ...]
    dot: JaxprEqn
    side: int

    def multiply(self, weight: jax.Array, other: jax.Array, **params: Any) -> jax.Array:
        """The product with `weight` as it is read, or a part of it, and `other`; params: of `dot`, changed."""
        for move in self.moves:
            (weight,) = bind_eqn(move, [weight])
        (result,) = bind_eqn(self.dot, [weight, other] if self.side == 0 else [other, weight], **params)
        return result

    def operand_dim(self, dim: int) -> int:
        """The dim of the product's operand that is the dim `dim` of the weight."""
        order = list(range(shape_of(self.dot.invars[self.side]).ndim))
        for move in self.moves:
            if primitive_of(move) == "transpose":
                order = [order[before] for before in permutation(move)]
        return order.index(dim)

    def dims_beside(self, dim: int) -> tuple[int | None, int | None]:
        """The dims of the other operand and of the result that belong to the weight's dim; None: it has none there."""
        side, (contracted, batched) = self.side, dot_dims(self.dot)
        at = self.operand_dim(dim)
        if at in contracted[side]:
            return contracted[1 - side][contracted[side].index(at)], None
        if at in batched[side]:
            return batched[1 - side][batched[side].index(at)], batched[side].index(at)
        kept = [[own for own in range(shape_of(atom).ndim) if own not in (*summed, *shared)]
                for atom, summed, shared in zip(self.dot.invars, contracted, batched, strict=True)]
        return None, len(batched[0]) + (len(kept[0]) if side else 0) + kept[side].index(at)


def weight_product(jaxpr: Jaxpr, read: JaxprEqn) -> tuple[Jaxpr, WeightProduct] | str:
    """The product of what `read` returns, in `jaxpr` with the calls on the way to it inlined; or why there is none."""
    moves: list[JaxprEqn] = []
    atom = read.outvars[0]
    while True:
        users = [eqn for eqn in jaxpr.eqns if atom in variables(eqn.invars)]
        if len(users) != 1 or atom in variables(jaxpr.outvars):
            return f"{len(users) + (atom in variables(jaxpr.outvars))} operations use it where it is read"
        (user,) = users
        if primitive_of(user) == JIT and not call_jaxpr(user).consts:
            jaxpr = jaxpr.replace(eqns=[inner for eqn in jaxpr.eqns
                                        for inner in (inlined_eqns(eqn) if eqn is user else [eqn])])
        elif primitive_of(user) in _MOVES:
            moves.append(user)
            atom = user.outvars[0]
        elif primitive_of(user) == DOT and sum(operand is atom for operand in user.invars) == 1:
            return jaxpr, WeightProduct(tuple(moves), user, next(
                side for side, operand in enumerate(user.invars) if operand is atom))
        else:
            return f"{primitive_of(user)} uses it, which is no product"


def replaced(jaxpr: Jaxpr, read: JaxprEqn, product: WeightProduct, eqns: list[JaxprEqn]) -> Jaxpr:
    """`jaxpr` with `eqns` in the place of the product, and without the read and what follows it."""
    gone = {id(eqn) for eqn in (read, *product.moves)}
    return jaxpr.replace(eqns=[new for eqn in jaxpr.eqns if id(eqn) not in gone
                               for new in (eqns if eqn is product.dot else [eqn])])
