"""A pass on a program that is to be cut: sums of all of a stack are added up in the rounds of the loop that makes it.

Why: where each round's part goes to a file there is no stack to sum, and its norm is wanted before it is read again.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.jaxpr.equations import (
    JaxprEqn,
    eqn_of,
    is_literal,
    jaxpr_to_fun,
    primitive_of,
    run_eqns,
    scope_of,
    shape_of,
    trace,
    type_of,
    variables,
)
from zero_jax.jaxpr.primitives import (
    BROADCAST,
    ELEMENTWISE,
    SCAN,
    SUM,
    Scan,
    bind_unsharded,
    call_jaxpr,
    reduce_all,
)


def with_sums_in_rounds(eqns: Sequence[JaxprEqn], stacks: Collection[Any], results: Collection[Any]
                        ) -> list[JaxprEqn]:
    """`eqns`, where nothing reads those of the variables `stacks` any more of which only sums are made.

    results: variables that are wanted as they are.

    A stack is a result that a scan makes part by part. Of each of its sums the loop makes a sum for every round, and
    these are added after it: the same up to the order of additions. A stack of which something else is made (one row,
    say, or the sum over some dims) stays as it is, and so does one whose sums need what only follows from the loop.
    """
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    loops: dict[int, tuple[JaxprEqn, list[_Sums]]] = {}
    for stack in stacks:
        loop = made.get(stack)
        if loop is not None and primitive_of(loop) == SCAN and loop.outvars.index(stack) >= Scan.of(loop).num_carry:
            sums = _Sums.of(stack, eqns, made)
            if sums is not None and sums.totals and sums.made.isdisjoint(results) and not _follows_from(
                    sums.scalars, loop, made):
                loops.setdefault(id(loop), (loop, []))[1].append(sums)
    gone = {id(eqn) for _, each in loops.values() for sums in each for eqn in sums.chain}
    new: list[JaxprEqn] = []
    done: set[int] = set()
    for eqn in eqns:
        if id(eqn) in loops:
            _, each = loops[id(eqn)]
            before = _makers_of([atom for sums in each for atom in sums.scalars], made)
            ordered = [one for one in eqns if id(one) in before and id(one) not in done]
            done |= set(map(id, ordered))
            new += [*ordered, *_summed(eqn, each)]
        elif id(eqn) not in gone and id(eqn) not in done:
            new.append(eqn)
            done.add(id(eqn))
    return new


class _Sums:
    """What is made of one stack: elementwise operations, and sums of all of their results."""

    def __init__(self, stack: Any):
        self.stack = stack
        self.chain: list[JaxprEqn] = []
        self.totals: list[JaxprEqn] = []
        self.scalars: list[Any] = []
        self.made: set[Any] = set()

    @classmethod
    def of(cls, stack: Any, eqns: Iterable[JaxprEqn], made: Mapping[Any, JaxprEqn]) -> "_Sums | None":
        """Of `eqns`, in order; None where something else is made of it."""
        sums, known = cls(stack), {stack}
        follow = {stack}
        for eqn in eqns:
            operands = variables(eqn.invars)
            if not follow.intersection(operands):
                continue
            is_sum = primitive_of(eqn) == SUM and not shape_of(eqn.outvars[0]).shape
            if not is_sum and primitive_of(eqn) not in ELEMENTWISE or not all(
                    sums._fills(var, known, made) for var in operands):
                return None
            sums.chain.append(eqn)
            if is_sum:
                sums.totals.append(eqn)
            else:
                follow |= set(eqn.outvars)
                known |= set(eqn.outvars)
                sums.made |= set(eqn.outvars)
        return sums

    def _fills(self, var: Any, known: set[Any], made: Mapping[Any, JaxprEqn]) -> bool:
        """Whether `var` is known or follows from scalars, place by place; what makes it is then in the chain."""
        if var in known:
            return True
        if not shape_of(var).shape:
            self.scalars.append(var)
            known.add(var)
            return True
        maker = made.get(var)
        operands = [] if maker is None else variables(maker.invars)
        fits = maker is not None and (primitive_of(maker) in ELEMENTWISE or (
            primitive_of(maker) == BROADCAST and not any(shape_of(each).shape for each in operands)))
        if maker is None or not fits or not all(self._fills(each, known, made) for each in operands):
            return False
        self.chain.append(maker)
        known.add(var)
        return True

    def parts(self, part: Any, scalars: Mapping[Any, Any]) -> list[Any]:
        """The sums of one round's part."""
        env = {**scalars, self.stack: part}

        def bind(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
            with jax.named_scope(scope_of(eqn)):
                if primitive_of(eqn) == BROADCAST:
                    return [jnp.broadcast_to(values[0], part.shape)]
                return reduce_all(eqn, values[0]) if primitive_of(eqn) == SUM else bind_unsharded(eqn, values)

        run_eqns(self.chain, env, bind)
        return [env[eqn.outvars[0]] for eqn in self.totals]


def _makers_of(atoms: Iterable[Any], made: Mapping[Any, JaxprEqn]) -> set[int]:
    """The ids of all equations that `atoms` follow from."""
    needed: dict[int, JaxprEqn] = {}
    todo = variables(atoms)
    while todo:
        eqn = made.get(todo.pop())
        if eqn is not None and id(eqn) not in needed:
            needed[id(eqn)] = eqn
            todo += variables(eqn.invars)
    return set(needed)


def _follows_from(atoms: Iterable[Any], loop: JaxprEqn, made: Mapping[Any, JaxprEqn]) -> bool:
    return id(loop) in _makers_of(atoms, made)


def _summed(loop: JaxprEqn, each: Sequence[_Sums]) -> list[JaxprEqn]:
    """A call of `loop` with a sum for every round of each of `each`, and what adds these up."""
    scan, body = Scan.of(loop), jaxpr_to_fun(call_jaxpr(loop))
    scalars = list(dict.fromkeys(atom for sums in each for atom in sums.scalars if not is_literal(atom)))
    numbers = [loop.outvars.index(sums.stack) for sums in each]

    def run(*operands: Any) -> list[Any]:
        known = dict(zip(scalars, operands, strict=False))
        rest = operands[len(scalars):]
        consts, carry, xs = (rest[:scan.num_consts], rest[scan.num_consts:][:scan.num_carry],
                             rest[scan.num_consts + scan.num_carry:])

        def step(carry: Any, xs: Any) -> Any:
            results = body(*consts, *carry, *xs)
            added = [part for sums, number in zip(each, numbers, strict=True)
                     for part in sums.parts(results[number], known)]
            return results[:scan.num_carry], (results[scan.num_carry:], added)

        carry, (stacked, added) = jax.lax.scan(
            step, list(carry), xs, length=scan.length, reverse=scan.reverse, unroll=scan.unroll)
        return [*carry, *stacked, *added]

    totals = [total for sums in each for total in sums.totals]
    operands = [*scalars, *loop.invars]
    (call,) = trace(jax.jit(run), *map(type_of, operands)).jaxpr.eqns
    stacks = call.outvars[len(loop.outvars):]
    return [call.replace(invars=operands, outvars=[*loop.outvars, *stacks]),
            *(eqn_of(lambda parts, total=total: reduce_all(total, parts)[0], [stack], total.outvars)
              for stack, total in zip(stacks, totals, strict=True))]
