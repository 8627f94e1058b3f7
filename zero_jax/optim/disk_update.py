"""The compiled pieces of an update whose arrays are in files: each computes one block of some tasks.

Where many parameters are alike, their pieces are one compiled program.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import ClosedJaxpr, JaxprEqn, bind_in_scope, is_literal, run_eqns, structure_of, value_of
from zero_jax.optim.stream_blocks import Blocks, bind_on_block, cut_in_loops
from zero_jax.optim.update_tasks import Task
from zero_jax.tree import leaf_bytes


@dataclasses.dataclass(frozen=True)
class Group:
    """Tasks that are computed together, block by block; or one task on whole arrays.

    Attributes:
        tasks: what is computed.
        blocks: how each cuts a device's shard; empty for whole arrays.
    """

    tasks: tuple[Task, ...]
    blocks: tuple[Blocks, ...]

    def pieces(self) -> list[tuple[int, bool]]:
        """(index, whether it is the rest) of each block."""
        if not self.blocks:
            return [(0, False)]
        rounds = [(index, False) for index in range(self.blocks[0].rounds)]
        return rounds + [(0, True)] * (self.blocks[0].rest is not None)

    def place(self, at: int, index: int, rest: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(start, sizes) of a block of task `at` in a device's shard."""
        blocks = self.blocks[at]
        if not rest:
            return tuple(blocks.start(index)), blocks.sizes
        assert blocks.rest is not None
        start = (blocks.rounds * blocks.rows, *[0] * (len(blocks.shape) - 1))
        return start, blocks.rest.shape


def group_tasks(tasks: Sequence[Task], carried: Sequence[Any], mesh: Mesh, buffer_bytes: int) -> list[Group]:
    """The tasks in groups whose blocks take at most about `buffer_bytes` on each device; `carried` are abstract."""
    elementwise = {at: task for at, task in enumerate(tasks) if task.is_elementwise}
    shapes = {at: NamedSharding(mesh, task.spec or P()).shard_shape(task.shape or ())
              for at, task in elementwise.items()}
    sizes = {at: sum(leaf_bytes(shapes[at], carried[number].dtype) for number in task.stored)
             for at, task in elementwise.items()}
    loops = [Group(tuple(tasks[at] for at in group), tuple(group.values()))
             for group in cut_in_loops(shapes, sizes, buffer_bytes)]
    return loops + [Group((task,), ()) for task in tasks if not task.is_elementwise]


class Pieces:
    """The compiled programs of groups of tasks, of one trace."""

    def __init__(self, closed: ClosedJaxpr, specs: Sequence[P], on_disk: Sequence[bool], mesh: Mesh):
        """specs: of all results of the trace, those that replace a carried array first; on_disk: of these."""
        self.jaxpr, self.specs, self.mesh = closed.jaxpr, specs, mesh
        self.on_disk, self.count = on_disk, len(on_disk)
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def buffers_of(self, task: Task) -> list[int]:
        """Numbers of the results of `task` that stay in device memory, as a whole array that its blocks fill."""
        return [number for number in task.writes if number >= self.count or not self.on_disk[number]]

    def run(self, group: Group, index: int, rest: bool, stored: Sequence[Sequence[Any]],
            buffers: Sequence[Sequence[Any]], values: dict[Any, Any]
            ) -> tuple[list[list[Any]], list[list[Any]], list[list[Any]]]:
        """Computes a block: (blocks that replace those in files, whole buffers, their blocks), each by task.

        stored: by task, a block of each array in `task.stored`, which is donated. buffers: by task, the arrays of
        `buffers_of`, donated and updated in place; values: of variables that were computed before.
        """
        arrays = [[values[var] for var in self._arrays(task)] for task in group.tasks]
        scalars = [[values[var] for var in task.scalars] for task in group.tasks]
        starts = [group.place(at, index, rest)[0] for at in range(len(group.blocks))]
        start = [[jnp.int32(first) for first in each] for each in starts]
        sizes = [group.place(at, index, rest)[1] for at in range(len(group.blocks))]
        key = (tuple(map(self._key, group.tasks)), tuple(sizes))
        if key not in self._compiled:
            make = self._blockwise if group.blocks else self._whole
            self._compiled[key] = jax.jit(make(group, sizes), donate_argnums=(0, 1))
        new, whole, blocks, _ = self._compiled[key](stored, buffers, arrays, scalars, start)
        return new, whole, blocks

    def _arrays(self, task: Task) -> list[Any]:
        """What is read of device memory, but for what is in a buffer."""
        replaced = {self.jaxpr.invars[number] for number in self.buffers_of(task) if number < self.count}
        return [var for var in task.arrays if var not in replaced]

    def _key(self, task: Task) -> Hashable:
        inputs = [*(self.jaxpr.invars[number] for number in task.stored), *self._arrays(task), *task.scalars]
        replaced = [self.jaxpr.invars[number] for number in self.buffers_of(task) if number < self.count]
        kinds = tuple((self.specs[number], number >= self.count or not self.on_disk[number]) for number in task.writes)
        outs = [self.jaxpr.outvars[number] for number in task.writes]
        return structure_of(task.eqns, [*inputs, *replaced], outs), kinds, len(task.stored), len(task.scalars)

    def _env(self, task: Task, stored: Any, buffers: Any, arrays: Any, scalars: Any) -> dict[Any, Any]:
        env = dict(zip((self.jaxpr.invars[number] for number in task.stored), stored, strict=True))
        env.update(zip(self._arrays(task), arrays, strict=True))
        env.update(zip(task.scalars, scalars, strict=True))
        replaced = dict(zip(self.buffers_of(task), buffers, strict=True))
        return env | {self.jaxpr.invars[number]: value for number, value in replaced.items() if number < self.count}

    def _compute(self, task: Task, env: dict[Any, Any], bind: Callable[[JaxprEqn, list[Any]], Any]
                 ) -> tuple[list[Any], list[Any]]:
        """(New stored values, values of buffers)."""
        written = {out for number in task.writes if not is_literal(out := self.jaxpr.outvars[number])}

        def barred(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
            results = bind(eqn, values)
            # A result is computed once, and what follows reads it, as in `streamed_update`.
            return jax.lax.optimization_barrier(results) if eqn.outvars[0] in written else results

        run_eqns(task.eqns, env, barred)
        values = {number: value_of(self.jaxpr.outvars[number], env) for number in task.writes}
        buffers = self.buffers_of(task)
        return [values[number] for number in task.replaced(self.on_disk)], [values[number] for number in buffers]

    def _whole(self, group: Group, _: Any) -> Callable[..., Any]:
        (task,) = group.tasks

        def at(number: int, value: Any) -> Any:
            return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, self.specs[number]))

        def piece(stored: Any, buffers: Any, arrays: Any, scalars: Any, start: Any) -> Any:
            env = self._env(task, stored[0], buffers[0], arrays[0], scalars[0])
            new, resident = self._compute(task, env, bind_in_scope)
            new = [at(number, value) for number, value in zip(task.replaced(self.on_disk), new, strict=True)]
            resident = [at(number, value) for number, value in zip(self.buffers_of(task), resident, strict=True)]
            return [new], [resident], [resident], scalars

        return piece

    def _blockwise(self, group: Group, sizes: Sequence[tuple[int, ...]]) -> Callable[..., Any]:
        def one(at: int, task: Task, stored: Any, buffers: Any, arrays: Any, scalars: Any, start: Any) -> Any:
            def block(array: Any) -> Any:
                return jax.lax.dynamic_slice(array, start, sizes[at])

            def bind(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
                return bind_on_block(eqn, values, spec=task.spec or P(), shape=group.blocks[at].shape, start=start,
                                     sizes=sizes[at])

            env = self._env(task, stored, [block(each) for each in buffers], [block(each) for each in arrays], scalars)
            new, values = self._compute(task, env, bind)
            # What a computation broadcasts from nothing has no dims yet.
            whole = [jax.lax.dynamic_update_slice(buffer, value, start)
                     for buffer, value in zip(buffers, values, strict=True)]
            return new, whole, values

        def piece(stored: Any, buffers: Any, arrays: Any, scalars: Any, starts: Any) -> Any:
            def local(stored: Any, buffers: Any, arrays: Any, scalars: Any, starts: Any) -> Any:
                results = [one(at, task, stored[at], buffers[at], arrays[at], scalars[at], starts[at])
                           for at, task in enumerate(group.tasks)]
                # XLA turns the division by a scalar that is used once into a product with its inverse, as it does not
                # in a step in memory, where the bias correction of Adam is used for all parameters: the last bit of
                # every parameter would be another. As a result it is used twice.
                return *([each[part] for each in results] for part in range(3)), scalars

            def specs(tree: Any) -> Any:
                return [[task.spec] * len(each) for task, each in zip(group.tasks, tree, strict=True)]

            out_buffers = specs(buffers)
            replaced = specs([task.replaced(self.on_disk) for task in group.tasks])
            return jax.shard_map(
                local, mesh=self.mesh, in_specs=(specs(stored), out_buffers, specs(arrays), P(), P()),
                out_specs=(replaced, out_buffers, out_buffers, P()), check_vma=False)(
                    stored, buffers, arrays, scalars, starts)

        return piece
