"""Parts of what a traced program returns, each computed by a program of what it follows from; equal ones are one."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    JaxprEqn,
    bind_in_scope,
    needed_eqns,
    run_eqns,
    structure_of,
    value_of,
    variables,
)


class PartProgram:
    """Results `outs` of a traced program without calls.

    Attributes:
        reads: numbers of the operands that it reads.
    """

    def __init__(self, closed: ClosedJaxpr, outs: Sequence[Any], shardings: Sequence[Any],
                 operands: Sequence[Any] | None, known: dict[Hashable, Any]):
        """shardings: of `outs`. operands: shardings of all operands; None: as they come. known: compiled ones."""
        jaxpr = closed.jaxpr
        eqns = needed_eqns(closed, outs)
        read = {*variables(outs), *(var for eqn in eqns for var in variables(eqn.invars))}
        self.reads = [number for number, var in enumerate(jaxpr.invars) if var in read]
        consts = [(var, value) for var, value in zip(jaxpr.constvars, closed.consts, strict=True) if var in read]
        self._consts = [value for _, value in consts]
        inputs = [*(var for var, _ in consts), *(jaxpr.invars[number] for number in self.reads)]
        given = [None] * len(self._consts) + [None if operands is None else operands[at] for at in self.reads]
        key = structure_of(eqns, inputs, outs), tuple(shardings), tuple(given)
        if key not in known:
            known[key] = _jitted(eqns, inputs, outs, shardings, given)
        self._run = known[key]

    def __call__(self, operand: Callable[[int], Any]) -> list[Any]:
        """The results; operand: the value of each operand that is read, by number."""
        return self._run([*self._consts, *(operand(number) for number in self.reads)])

    def lower(self, operand: Callable[[int], Any]) -> jax.stages.Lowered:
        """The program; operand: as in a call, or abstract."""
        return self._run.lower([*self._consts, *(operand(number) for number in self.reads)])


def _jitted(eqns: Sequence[JaxprEqn], inputs: Sequence[Any], outs: Sequence[Any], shardings: Sequence[Any],
            given: Sequence[Any]) -> Any:
    def run(values: list[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(inputs, values, strict=True))
        run_eqns(eqns, env, bind_in_scope)
        return [value_of(out, env) for out in outs]

    return jax.jit(run, in_shardings=(list(given),), out_shardings=list(shardings))
