"""An update whose arrays are in files, as independent tasks: what depends on each other through them, and no more.

A task is usually one parameter: its moments, its master copy, its gradient. If all of it is elementwise, it is computed
on blocks of any size, else on whole arrays. What depends on no array in a file (a clipping factor, a bias correction, a
schedule) is computed once, before.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError, few
from zero_jax.jaxpr.equations import ClosedJaxpr, JaxprEqn, is_literal, producers, shape_of, variables
from zero_jax.optim.stream_units import is_elementwise


@dataclasses.dataclass(frozen=True)
class Task:
    """A part of an update, whose results no other part reads.

    Attributes:
        eqns: in order.
        stored: numbers of the carried arrays in files that it reads.
        arrays, scalars: variables that are computed before; those among `scalars` have no dims.
        writes: numbers of the update's results.
        shape, spec: of each of its arrays, where it is elementwise; None where it needs arrays whole.
    """

    eqns: tuple[JaxprEqn, ...]
    stored: tuple[int, ...]
    arrays: tuple[Any, ...]
    scalars: tuple[Any, ...]
    writes: tuple[int, ...]
    shape: tuple[int, ...] | None
    spec: P | None

    def replaced(self, on_disk: Sequence[bool]) -> list[int]:
        """Numbers of the carried arrays in files that it replaces."""
        return [number for number in self.writes if number < len(on_disk) and on_disk[number]]

    @property
    def is_elementwise(self) -> bool:
        """Whether it may be computed block by block."""
        return self.shape is not None


def split_tasks(closed: ClosedJaxpr, specs: Sequence[P], on_disk: Sequence[bool], names: Sequence[str]) -> list[Task]:
    """The tasks of a trace without calls, whose first operands are the carried arrays, and first results replace them.

    specs: how each result is sharded, those that replace a carried array first, as this one; on_disk: whether a carried
    array is in files; names: of each.

    Raises UsageError where one number follows from the arrays of several parameters, as the norm of all updates: to
    learn it, all files would have to be read before the first is updated.
    """
    jaxpr, count = closed.jaxpr, len(on_disk)
    carried = jaxpr.invars[:count]
    parent: dict[Any, Any] = {var: var for var, is_one in zip(carried, on_disk, strict=True) if is_one}

    def find(var: Any) -> Any:
        while parent[var] is not var:
            var = parent[var]
        return var

    for eqn in jaxpr.eqns:
        roots = list(dict.fromkeys(find(var) for var in variables(eqn.invars) if var in parent))
        if roots:
            parent.update(dict.fromkeys([*roots, *eqn.outvars], roots[0]))
    writes: dict[Any, list[int]] = {}
    for number, out in enumerate(jaxpr.outvars):
        if number < count and on_disk[number] and not is_literal(out) and out in parent:
            parent[find(out)] = find(carried[number])
    for number, out in enumerate(jaxpr.outvars):
        if number < count and on_disk[number]:
            writes.setdefault(find(carried[number]), []).append(number)
        elif not is_literal(out) and out in parent:
            writes.setdefault(find(out), []).append(number)
    makers = producers(jaxpr)
    tasks = [_task(closed, numbers, specs, on_disk, parent, makers) for numbers in writes.values()]
    for task in tasks:
        params = [names[number] for number in task.writes if number < count and names[number].startswith("params/")]
        if not task.is_elementwise and len(params) > 1:
            raise UsageError(
                f"disk: this optimizer computes one number from the states of {len(params):,} parameters "
                f"({few(params, 3)}), as the norm of all updates: all files would have to be read twice. Clip "
                "gradients before the optimizer instead, or keep its states in host memory: offload=\"optimizer\".")
    return tasks


def _task(closed: ClosedJaxpr, writes: list[int], specs: Sequence[P], on_disk: Sequence[bool], parent: dict[Any, Any],
          makers: dict[Any, JaxprEqn]) -> Task:
    jaxpr, count = closed.jaxpr, len(on_disk)
    inputs = {var: number for number, var in enumerate(jaxpr.invars[:count]) if on_disk[number]}
    outs = [jaxpr.outvars[number] for number in writes]
    eqns: dict[int, JaxprEqn] = {}
    stored, arrays, scalars = dict[int, None](), {}, {}
    todo, seen = variables(outs), set(variables(outs))
    while todo:
        var = todo.pop()
        eqn = makers.get(var)
        if var in inputs:
            stored[inputs[var]] = None
        elif eqn is not None and (var in parent or is_elementwise(eqn)):
            eqns[id(eqn)] = eqn
            new = [each for each in dict.fromkeys(variables(eqn.invars)) if each not in seen]
            seen.update(new)
            todo += new
        else:
            (arrays if shape_of(var).shape else scalars)[var] = None
    ordered = tuple(eqn for eqn in jaxpr.eqns if id(eqn) in eqns)
    shapes = {shape_of(var).shape for var in [*outs, *arrays, *(jaxpr.invars[number] for number in stored)]}
    used = {specs[number] for number in (*writes, *stored)}
    blockwise = all(map(is_elementwise, ordered)) and len(shapes) == len(used) == 1 and () not in shapes
    return Task(ordered, tuple(sorted(stored)), tuple(arrays), tuple(scalars), tuple(writes),
                tuple(shapes.pop()) if blockwise else None, used.pop() if blockwise else None)
