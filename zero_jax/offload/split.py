"""The trace of an update, split into units: what is computed together on arrays outside of device memory.

A *unit* is usually one parameter: its moments, its gradient and the parameter itself. If all of it is elementwise on
arrays of one shape and sharding, it may be run on any block of them. Where an equation needs more of an array than one
element at a time (a norm, a product), there are two ways. Of arrays in host memory, which a program may read at any
time, the array is made whole in device memory first, and what follows is a later *level*. Arrays in files are read
once: all that depends on each other through them is one unit (`apart`), on whole arrays.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    JaxprEqn,
    is_literal,
    primitive_of,
    producers,
    run_eqns,
    shape_of,
    trace_flat,
    value_of,
    variables,
)
from zero_jax.jaxpr.passes import without_calls
from zero_jax.jaxpr.primitives import BROADCAST, ELEMENTWISE, IOTA, SUM
from zero_jax.tree import leaf_bytes


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of the update.

    Attributes:
        level: it runs after all of lower levels.
        shape, spec: of each of its arrays; of one that needs arrays whole () and the spec of its first result.
        eqns: in order.
        stored: numbers of the carried arrays that are read from host memory or files.
        arrays: variables that are read from device memory.
        scalars: variables without dims, which every block reads.
        writes: (variable, number of the result, or None where it is none), in device memory where it replaces no
            stored array.
        sums: equations that sum all of an array, whose results are those of the sums of its blocks, added.
    """

    level: int
    shape: tuple[int, ...]
    spec: P
    eqns: tuple[JaxprEqn, ...]
    stored: tuple[int, ...]
    arrays: tuple[Any, ...]
    scalars: tuple[Any, ...]
    writes: tuple[tuple[Any, int | None], ...]
    sums: tuple[JaxprEqn, ...] = ()

    @property
    def in_blocks(self) -> bool:
        """Whether it may be computed block by block."""
        return self.shape != ()

    @property
    def results(self) -> list[int]:
        """Numbers of the results that it writes."""
        return [number for _, number in self.writes if number is not None]

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of a device's shard of its arrays."""
        return NamedSharding(mesh, self.spec).shard_shape(self.shape)

    def read_bytes(self, mesh: Mesh, carried: Sequence[Any]) -> int:
        """Bytes of a device's shards of what it reads of the stored arrays among `carried`."""
        return sum(leaf_bytes(self.local_shape(mesh), carried[number].dtype) for number in self.stored)

    def compute(self, env: dict[Any, Any], bind: Callable[[JaxprEqn, list[Any]], Sequence[Any]]) -> list[Any]:
        """The values of `writes`, by equations that `bind` computes; env: of what it reads, is added to."""
        written = {var for var, _ in self.writes if not is_literal(var)}

        def barred(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
            results = bind(eqn, values)
            # A result is computed once, and what follows reads it. XLA would compute it again in each fusion, from
            # arrays that are overwritten by then, which it copies whole; and with other roundings: a multiply-add is
            # fused at one place and not at another.
            return jax.lax.optimization_barrier(results) if eqn.outvars[0] in written else results

        run_eqns(self.eqns, env, barred)
        return [value_of(var, env) for var, _ in self.writes]


@dataclasses.dataclass(frozen=True)
class Split:
    """An update as units, and what runs on whole arrays between them.

    Attributes:
        units: in the order of their levels.
        levels: of every variable of the trace.
        streamed: variables that only exist in blocks, but for those that a unit writes.
        sums: variables that a unit sums up.
        whole: numbers of the stored arrays that are read whole.
    """

    units: tuple[Unit, ...]
    levels: dict[Any, int]
    streamed: frozenset[Any]
    sums: frozenset[Any]
    whole: frozenset[int]


def traced_update(update: Any, leaves: Sequence[Any], treedef: Any) -> tuple[ClosedJaxpr, Any]:
    """(The trace of an update without calls, the structure of its results)."""
    abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
                for leaf in leaves]
    closed, out_treedef = trace_flat(update, abstract, treedef)
    return without_calls(closed), out_treedef


def split_update(closed: ClosedJaxpr, specs: Sequence[P], stored: Sequence[bool], *, sums_in_blocks: bool = False,
                 apart: bool = False) -> Split:
    """Splits a trace without calls, whose first operands are the carried arrays, and whose first results replace them.

    Args:
      closed: the trace.
      specs: how each carried array is sharded; with `apart` each result, those that replace carried arrays first.
      stored: whether each carried array is in host memory or in files.
      sums_in_blocks: whether sums of whole arrays are added up block by block; else such an array is made whole.
      apart: no unit reads what another computes from stored arrays, and each stored array is read and replaced by one
        unit, also if it stays as it is.
    """
    unstreamed: set[int] = set()
    while True:
        flow = _Flow(closed, specs, stored, unstreamed, sums_in_blocks=sums_in_blocks, apart=apart)
        if not (again := flow.read_too_late()):
            return Split(tuple(flow.units()), flow.levels, frozenset(flow.component), frozenset(flow.sums),
                         frozenset(flow.whole_inputs()))
        unstreamed |= again


class _Flow:
    """Which variables depend on stored arrays, in which component and at which level; with `apart` at level 0."""

    def __init__(self, closed: ClosedJaxpr, specs: Sequence[P], stored: Sequence[bool], unstreamed: Iterable[int], *,
                 sums_in_blocks: bool, apart: bool):
        self.jaxpr, self.specs, self.stored = closed.jaxpr, specs, stored
        self.sums_in_blocks, self.apart = sums_in_blocks, apart
        self.carried = self.jaxpr.invars[:len(stored)]
        self.inputs = {var: i for i, var in enumerate(self.carried) if stored[i] and i not in unstreamed}
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
        for eqn in self.jaxpr.eqns if not apart else ():
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
        if self.apart:
            level = 0
        if streamed and (self.apart or is_elementwise(eqn) and len({self._spec(root) for root in roots}) == 1):
            self.component.update(dict.fromkeys([*roots, *eqn.outvars], roots[0]))
        elif streamed and self.sums_in_blocks and _sums_all(eqn):
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
        """Stored arrays that are read whole, since not all that is done with them is elementwise."""
        return {i for i, var in enumerate(self.carried)
                if self.stored[i] and (var not in self.inputs or var in self.made_whole)}

    def read_too_late(self) -> set[int]:
        """Stored arrays that a block is read of after the level that replaces them."""
        return {self.inputs[var] for eqn in self.jaxpr.eqns for var in variables(eqn.invars)
                if var in self.inputs and eqn.outvars[0] in self.component
                and self.levels[eqn.outvars[0]] > self.written[self.inputs[var]]}

    def units(self) -> list[Unit]:
        """One for each component and level that has results."""
        if self.apart:
            return self._units_apart()
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

    def _units_apart(self) -> list[Unit]:
        """One for each component of stored arrays and what replaces them."""
        outs, is_stored = self.jaxpr.outvars, dict(enumerate(self.stored))
        for number, var in enumerate(outs):
            if is_stored.get(number) and not is_literal(var) and var in self.component:
                self.component[self._root(var)] = self._root(self.carried[number])
        writes: dict[Any, list[tuple[Any, int]]] = {}
        for number, var in enumerate(outs):
            if is_stored.get(number):
                writes.setdefault(self._root(self.carried[number]), []).append((var, number))
            elif not is_literal(var) and var in self.component:
                writes.setdefault(self._root(var), []).append((var, number))
        return [self._whole_or_in_blocks(self._unit(0, root, tuple(each))) for root, each in writes.items()]

    def _whole_or_in_blocks(self, unit: Unit) -> Unit:
        atoms = [*(var for var, _ in unit.writes), *unit.arrays, *(self.carried[number] for number in unit.stored)]
        shapes = {shape_of(atom).shape for atom in atoms}
        specs = {self.specs[number] for number in (*unit.results, *unit.stored)}
        in_blocks = all(map(is_elementwise, unit.eqns)) and len(shapes) == len(specs) == 1
        return unit if in_blocks else dataclasses.replace(unit, shape=())

    def _unit(self, level: int, root: Any, writes: tuple[tuple[Any, int | None], ...], sums: tuple[JaxprEqn, ...] = ()
              ) -> Unit:
        eqns: dict[int, JaxprEqn] = {}
        stored, arrays, scalars = {}, {}, {}
        todo = list(dict.fromkeys(variables([*(var for var, _ in writes), *(eqn.invars[0] for eqn in sums)])))
        shape = tuple(shape_of(writes[0][0] if writes else todo[0]).shape)
        seen = set(todo)
        while todo:
            var = todo.pop()
            eqn = self.producer.get(var)
            if var in self.inputs:
                stored[self.inputs[var]] = None
            elif eqn is not None and (is_elementwise(eqn) if var not in self.component else
                                      self.levels[var] == level or self.until[var] >= level):
                eqns[id(eqn)] = eqn
                new = [each for each in variables(eqn.invars) if each not in seen]
                seen.update(new)
                todo += new
            else:
                (arrays if shape_of(var).shape else scalars)[var] = None
        ordered = tuple(eqn for eqn in self.jaxpr.eqns if id(eqn) in eqns)
        return Unit(level, shape, self._spec(root), ordered, tuple(sorted(stored)), tuple(arrays), tuple(scalars),
                    writes, sums)


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
