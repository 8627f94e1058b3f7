"""A pass on the backward program: a round of a loop gathers, within a product, what the next round begins with."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import dynamic_index_in_dim, optimization_barrier

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    bind_in_scope,
    in_scope_of,
    is_literal,
    is_on_host_atom,
    live_eqns,
    primitive_of,
    producers,
    replace_eqn,
    scope_of,
    shape_of,
    value_of,
    variables,
)
from zero_jax.jaxpr.primitives import DOT, REMAT, SCAN, Scan, call_jaxpr
from zero_jax.sharding.gather import GATHER_SCOPE
from zero_jax.transforms.loop_rounds import call_operands
from zero_jax.transforms.scatter_calls import inlined

MAX_WASTE = 1 / 32
"""Of the elements that a loop gathers, how many its last round may gather that nobody reads."""


def gather_ahead(jaxpr: Jaxpr) -> Jaxpr:
    """Loops carry the weight of a round's first product, which the round before has gathered.

    Why: XLA for TPU v5e sends a gather within the product before it. The first of a round has none, and the scheduler
    moves nothing from one round to another. In its own round the gather goes to the last gather of the round: within
    the product that takes it, beside which nothing else is gathered. Barriers say so: what a loop carries may be sent
    from the beginning of a round to its end, and meanwhile XLA sends nothing else within products.
    Cost without: 81.6 instead of 97.1 % of the bytes are sent within products, and more within elementwise work, which
    hides less (GPT-2 of 12 layers of width 2048 at stage 3, 4 x 1024 tokens on each device of `v5e:2x4`); with it
    1.02 times the temporaries.
    Order: last of the passes on the differentiated loss, of which none need know loops that carry weights.

    Loops of other shapes stay as they are: the first weight is to be gathered from what is scanned over, another one
    behind it, and the gather of the last round, which nobody reads, is to be at most `MAX_WASTE` of what is gathered.
    """
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        loop = _Loop.of(eqn)
        eqns += [eqn] if loop is None else [in_scope_of(each, eqn) for each in inlined(replace_eqn(eqn, loop.run))]
    return jaxpr.replace(eqns=eqns)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop and the equations in its rounds that the pass is about.

    Attributes:
        eqn: the scan.
        number: of its operand that holds the shards of the first weight, of all rounds.
        gather: what gathers the first weight.
        moves: what a shard passes before it.
        product: beside which the next round's is gathered.
        before: the product that precedes it, if it does not follow from that one.
        behind: the product that the gather is to be done for.
    """

    eqn: JaxprEqn
    number: int
    gather: JaxprEqn
    moves: tuple[JaxprEqn, ...]
    product: JaxprEqn
    before: JaxprEqn | None
    behind: JaxprEqn | None

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "_Loop | None":
        """None if `eqn` is no such loop."""
        if primitive_of(eqn) != SCAN:
            return None
        scan, closed = Scan.of(eqn), call_jaxpr(eqn)
        block, body = _block(closed.jaxpr)
        eqns = live_eqns(body.eqns, body.outvars)
        gathers = [each for each in eqns if primitive_of(each) == GATHER_SCOPE and shape_of(each.outvars[0]).ndim > 1]
        products = _products(eqns, gathers)
        order = list({id(weight): weight for _, weight in products}.values())  # in which weights are first taken
        if len(order) < 2 or len((gather := order[0]).invars) > 1 or (
                _size(gather) > MAX_WASTE * scan.length * sum(map(_size, gathers))):
            return None
        at = next(i for i, (_, weight) in enumerate(products) if weight is order[-1])
        shard, moves = _moves(body, gather)
        if block is not None and shard in body.invars:
            shard = block.invars[body.invars.index(shard)]
        if shard not in closed.jaxpr.invars[scan.num_consts + scan.num_carry:]:
            return None
        number = closed.jaxpr.invars.index(shard)
        if is_on_host_atom(eqn.invars[number]):
            return None
        product, before = products[at][0], products[at - 1][0] if at else None
        if before is not None and any(each is before for each in live_eqns(eqns, product.invars)):
            before = None
        behind = next((each for each, weight in products[at + 1:] if weight is not order[-1]), None)
        return cls(eqn, number, gather, moves, product, before, behind)

    def run(self, *args: Any) -> list[Any]:
        """The results of the scan."""
        scan, closed = Scan.of(self.eqn), call_jaxpr(self.eqn)
        begin, end = scan.num_consts, scan.num_consts + scan.num_carry
        shards, step = args[self.number], -1 if scan.reverse else 1
        following = jnp.clip(jnp.arange(scan.length) + step, 0, scan.length - 1)

        def one_round(carry: Any, xs: Any) -> Any:
            (own, weight), (own_xs, number) = carry, xs
            shard = dynamic_index_in_dim(shards, number, keepdims=False)
            outs, weight = _Round(self, weight, shard).run(closed, [*args[:begin], *own, *own_xs])
            return (outs[:scan.num_carry], weight), outs[scan.num_carry:]

        first = self.gathered(shards[-1 if scan.reverse else 0])
        (own, _), ys = jax.lax.scan(one_round, (list(args[begin:end]), first), (list(args[end:]), following),
                                    scan.length, scan.reverse, scan.unroll)
        return [*own, *ys]

    def gathered(self, shard: jax.Array) -> jax.Array:
        """The weight, from its shard of one round."""
        for eqn in (*self.moves, self.gather):
            (shard,) = bind_in_scope(eqn, [shard])
        return shard


class _Round:
    """One round. weight: its first; shard: of the next round's first."""

    def __init__(self, loop: _Loop, weight: jax.Array, shard: jax.Array):
        self.loop, self.weight, self.shard = loop, weight, shard
        self.following: jax.Array | None = None

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> tuple[list[Any], jax.Array]:
        """(The results of the body `closed`, the next round's first weight)."""
        outs = self._run(closed, args)
        assert self.following is not None
        return outs, self.following

    def _run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        jaxpr, loop = closed.jaxpr, self.loop
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            values = [value_of(atom, env) for atom in eqn.invars]
            if eqn is loop.gather:
                outs: Sequence[Any] = [self.weight]
            elif eqn is loop.product:
                before = [] if loop.before is None else loop.before.outvars
                shard, *values = optimization_barrier((self.shard, *values, *(env[var] for var in before)))
                env.update(zip(before, values[len(eqn.invars):], strict=True))
                self.following = loop.gathered(shard)
                outs = bind_in_scope(eqn, values[:len(eqn.invars)])
            elif eqn is loop.behind:
                self.following, *values = optimization_barrier((self.following, *values))
                outs = bind_in_scope(eqn, values)
            elif primitive_of(eqn) == REMAT and any(each is loop.product for each in call_jaxpr(eqn).jaxpr.eqns):
                with jax.named_scope(scope_of(eqn)):
                    outs = self._run(call_jaxpr(eqn), call_operands(eqn, values))
            else:
                outs = bind_in_scope(eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value_of(atom, env) for atom in jaxpr.outvars]


def _block(body: Jaxpr) -> tuple[JaxprEqn | None, Jaxpr]:
    """The checkpoint in a round, if it has one, and the program of the layer: that checkpoint's, or the round's."""
    block = next((eqn for eqn in body.eqns if primitive_of(eqn) == REMAT), None)
    return block, body if block is None else call_jaxpr(block).jaxpr


def _products(eqns: Sequence[JaxprEqn], gathers: Sequence[JaxprEqn]) -> list[tuple[JaxprEqn, JaxprEqn]]:
    """(Product, the gather of the weight that it takes), in order. Moves, casts and reads of a weight are followed."""
    weights = {eqn.outvars[0]: eqn for eqn in gathers}
    products = []
    for eqn in eqns:
        gather = next((weights[atom] for atom in variables(eqn.invars) if atom in weights), None)
        if gather is None or any(eqn is each for each in gathers):
            continue
        if primitive_of(eqn) == DOT:
            products.append((eqn, gather))
        elif len(eqn.outvars) == 1 and _size(eqn) == _size(gather):
            weights[eqn.outvars[0]] = gather
    return products


def _moves(body: Jaxpr, gather: JaxprEqn) -> tuple[Any, tuple[JaxprEqn, ...]]:
    """(What of `body` a gather's operand comes from, the equations of one operand and one result that it passes)."""
    makers, moves, atom = producers(body), [], gather.invars[0]
    while not is_literal(atom) and (eqn := makers.get(atom)) is not None and len(eqn.invars) == len(eqn.outvars) == 1:
        moves.insert(0, eqn)
        atom = eqn.invars[0]
    return atom, tuple(moves)


def _size(eqn: JaxprEqn) -> int:
    return math.prod(shape_of(eqn.outvars[0]).shape)
