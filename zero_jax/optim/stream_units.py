"""What of an update can be streamed: its trace, split into parts that are elementwise on arrays in host memory.

Such a part, a *unit*, works on arrays of one shape and sharding, so that it may be run on any block of them: the
moments of a parameter, its gradient and the parameter itself. Where an equation needs more of an array than one
element at a time (a norm, a product), the array is made whole in device memory first, and what follows is a later
*level*.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    JaxprEqn,
    is_literal,
    primitive_of,
    producers,
    shape_of,
    variables,
)
from zero_jax.jaxpr.primitives import BROADCAST, ELEMENTWISE, IOTA, SUM


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of the update that is run block by block.

    Attributes:
        level: it runs after all of lower levels.
        shape, spec: of each of its arrays.
        eqns: in order.
        host: numbers of the carried arrays that are read from host memory.
        arrays: variables of this shape that are read from device memory.
        scalars: variables that every block reads.
        writes: (variable, number of the carried array that it replaces, or None), in device memory where it replaces
            none that is in host memory.
        sums: equations that sum all of an array, whose results are those of the sums of its blocks, added.
    """

    level: int
    shape: tuple[int, ...]
    spec: P
    eqns: tuple[JaxprEqn, ...]
    host: tuple[int, ...]
    arrays: tuple[Any, ...]
    scalars: tuple[Any, ...]
    writes: tuple[tuple[Any, int | None], ...]
    sums: tuple[JaxprEqn, ...] = ()


@dataclasses.dataclass(frozen=True)
class Split:
    """An update as units, and what runs on whole arrays between them.

    Attributes:
        units: in the order of their levels.
        levels: of every variable of the trace.
        streamed: variables that only exist in blocks, but for those that a unit writes.
        sums: variables that a unit sums up.
        whole: numbers of the carried arrays in host memory that are read whole.
    """

    units: tuple[Unit, ...]
    levels: dict[Any, int]
    streamed: frozenset[Any]
    sums: frozenset[Any]
    whole: frozenset[int]


def split_update(closed: ClosedJaxpr, specs: Sequence[P], host: Sequence[bool], *, in_blocks: bool = False) -> Split:
    """Splits a trace without calls, whose first operands are the carried arrays, and whose first results replace them.

    specs, host: of each carried array, how it is sharded and whether it is in host memory. in_blocks: whether sums of
    whole arrays are added up block by block; else such an array is made whole.
    """
    unstreamed: set[int] = set()
    while True:
        flow = _Flow(closed, specs, host, unstreamed, in_blocks=in_blocks)
        if not (again := flow.read_too_late()):
            return Split(tuple(flow.units()), flow.levels, frozenset(flow.component), frozenset(flow.sums),
                         frozenset(flow.whole_inputs()))
        unstreamed |= again


class _Flow:
    """Which variables depend on arrays in host memory, in which component and at which level."""

    def __init__(self, closed: ClosedJaxpr, specs: Sequence[P], host: Sequence[bool], unstreamed: Iterable[int], *,
                 in_blocks: bool):
        self.jaxpr, self.specs, self.on_host, self.in_blocks = closed.jaxpr, specs, host, in_blocks
        self.carried = self.jaxpr.invars[:len(specs)]
        self.inputs = {self.carried[i]: i for i in range(len(specs)) if host[i] and i not in unstreamed}
        self.producer = producers(self.jaxpr)
        self.levels: dict[Any, int] = dict.fromkeys((*self.jaxpr.constvars, *self.jaxpr.invars), 0)
        self.component: dict[Any, Any] = {var: var for var in self.inputs}
        self.made_whole: dict[Any, None] = {}
        self.sums: dict[Any, JaxprEqn] = {}
        for eqn in self.jaxpr.eqns:
            self._follow(eqn)
        self.written = self._written()
        # The level up to which a variable may be computed again, from blocks that nothing has replaced by then.
        self.until = {var: self.written[number] for var, number in self.inputs.items()}
        for eqn in self.jaxpr.eqns:
            if eqn.outvars[0] in self.component:
                self._read_at_its_level(eqn)

    def _root(self, var: Any) -> Any:
        while self.component[var] is not var:
            var = self.component[var]
        return var

    def _spec(self, var: Any) -> P:
        return self.specs[self.inputs[self._root(var)]]

    def _follow(self, eqn: JaxprEqn) -> None:
        operands = variables(eqn.invars)
        streamed = [var for var in operands if var in self.component]
        roots = list(dict.fromkeys(self._root(var) for var in streamed))
        level = max((self.levels[var] for var in operands), default=0)
        if streamed and is_elementwise(eqn) and len({self._spec(root) for root in roots}) == 1:
            for root in roots:
                self.component[root] = roots[0]
            self.component.update(dict.fromkeys(eqn.outvars, roots[0]))
        elif streamed and self.in_blocks and _sums_all(eqn):
            self.sums[eqn.outvars[0]] = eqn
            level = self.levels[streamed[0]] + 1
        else:
            self.made_whole.update(dict.fromkeys(streamed))
            level = max([level, *(self.levels[var] + (var not in self.inputs) for var in streamed)])
        self.levels.update(dict.fromkeys(eqn.outvars, level))

    def _read_at_its_level(self, eqn: JaxprEqn) -> None:
        """Of lower levels a block is computed again, or read from the array that was made whole."""
        streamed = [var for var in variables(eqn.invars) if var in self.component]
        level = self.levels[eqn.outvars[0]]
        self.until[eqn.outvars[0]] = min(self.until[var] for var in streamed)
        self.made_whole.update(dict.fromkeys(
            var for var in streamed if self.levels[var] < level > self.until[var] and var not in self.inputs))

    def _written(self) -> list[float]:
        """The level at which each carried array is replaced; of one that nothing replaces infinity."""
        outs = self.jaxpr.outvars[:len(self.carried)]
        return [math.inf if out is var else 0 if is_literal(out) else self.levels[out]
                for var, out in zip(self.carried, outs, strict=True)]

    def whole_inputs(self) -> set[int]:
        """Arrays in host memory that are read whole, since not all that is done with them is elementwise."""
        return {i for i, var in enumerate(self.carried)
                if self.on_host[i] and (var not in self.inputs or var in self.made_whole)}

    def read_too_late(self) -> set[int]:
        """Arrays in host memory that a block is read of after the level that replaces them."""
        return {self.inputs[var] for eqn in self.jaxpr.eqns for var in variables(eqn.invars)
                if var in self.inputs and eqn.outvars[0] in self.component
                and self.levels[eqn.outvars[0]] > self.written[self.inputs[var]]}

    def units(self) -> list[Unit]:
        """One for each component and level that has results."""
        writes: dict[tuple[int, Any], dict[tuple[Any, int | None], None]] = {}

        def write(var: Any, number: int | None) -> None:
            if not is_literal(var) and var in self.component and var not in self.inputs:
                writes.setdefault((self.levels[var], self._root(var)), {})[var, number] = None

        for number, var in enumerate(self.jaxpr.outvars):
            write(var, number if number < len(self.carried) else None)
        for var in self.made_whole:
            write(var, None)
        sums: dict[tuple[int, Any], list[JaxprEqn]] = {}
        for eqn in self.sums.values():
            sums.setdefault((self.levels[eqn.invars[0]], self._root(eqn.invars[0])), []).append(eqn)
        return [self._unit(*key, tuple(writes.get(key, ())), tuple(sums.get(key, ())))
                for key in sorted({**writes, **sums}, key=lambda key: key[0])]

    def _unit(self, level: int, root: Any, writes: tuple[tuple[Any, int | None], ...], sums: tuple[JaxprEqn, ...]
              ) -> Unit:
        eqns: dict[int, JaxprEqn] = {}
        host, arrays, scalars = {}, {}, {}
        todo: list[Any] = list(dict.fromkeys([*(var for var, _ in writes), *(eqn.invars[0] for eqn in sums)]))
        shape = tuple(shape_of(todo[0]).shape)
        seen = set(todo)
        while todo:
            var = todo.pop()
            eqn = self.producer.get(var)
            if var in self.inputs:
                host[self.inputs[var]] = None
            elif eqn is not None and is_elementwise(eqn) and (
                    var not in self.component or self.levels[var] == level or self.until[var] >= level):
                eqns[id(eqn)] = eqn
                new = [each for each in variables(eqn.invars) if each not in seen]
                seen.update(new)
                todo += new
            else:
                (arrays if var.aval.shape else scalars)[var] = None
        ordered = tuple(eqn for eqn in self.jaxpr.eqns if id(eqn) in eqns)
        return Unit(level, shape, self._spec(root), ordered, tuple(sorted(host)), tuple(arrays), tuple(scalars), writes,
                    sums)


def _sums_all(eqn: JaxprEqn) -> bool:
    return primitive_of(eqn) == SUM and not shape_of(eqn.outvars[0]).shape and bool(shape_of(eqn.invars[0]).shape)


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether each element of the result follows from the same element of each operand, from scalars and its place."""
    if len(eqn.outvars) != 1:
        return False
    out = shape_of(eqn.outvars[0])
    shape, shapes = out.shape, {getattr(atom.aval, "shape", ()) for atom in eqn.invars}
    if not shape or jax.dtypes.issubdtype(out.dtype, jax.dtypes.extended):
        return False
    primitive = primitive_of(eqn)
    if primitive == BROADCAST:
        return shapes == {()}
    return primitive == IOTA or primitive in ELEMENTWISE and shapes <= {(), shape}
