"""The compiled programs of an update whose arrays are in files: each computes one block of some units.

Where many parameters are alike, their blocks are computed by one compiled program.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError, few
from zero_jax.jaxpr.equations import ClosedJaxpr, JaxprEqn, bind_in_scope, structure_of
from zero_jax.offload.blocks import bind_on_block, cut_in_loops
from zero_jax.offload.split import Unit, split_update


@dataclasses.dataclass(frozen=True)
class Group:
    """Units that are computed together, block by block; or one unit on whole arrays.

    Attributes:
        units: what is computed.
        shapes: of a device's shard of each unit; empty for whole arrays.
        places: (start, sizes) in a device's shard, by block and unit; of whole arrays one block without places.
    """

    units: tuple[Unit, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    places: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...] = ((),)


def group_units(closed: ClosedJaxpr, specs: Sequence[P], on_disk: Sequence[bool], names: Sequence[str],
                carried: Sequence[Any], mesh: Mesh, buffer_bytes: int) -> list[Group]:
    """The units of a trace (`split_update`), in groups whose blocks take at most about `buffer_bytes` on each device.

    specs: of all results; on_disk, names, carried: of each carried array, whether it is in files, its name, and itself,
    abstract.

    Raises UsageError where one number follows from the arrays of several parameters, as the norm of all updates: to
    learn it, all files would have to be read before the first is updated.
    """
    units = split_update(closed, specs, on_disk, apart=True).units
    for unit in units:
        params = [names[number] for number in unit.results if number < len(names)
                  and names[number].startswith("params/")]
        if not unit.in_blocks and len(params) > 1:
            raise UsageError(
                f"disk: this optimizer computes one number from the states of {len(params):,} parameters "
                f"({few(params, 3)}), as the norm of all updates: all files would have to be read twice. Clip "
                "gradients before the optimizer instead, or keep its states in host memory: offload=\"optimizer\".")
    shapes = {at: unit.local_shape(mesh) for at, unit in enumerate(units) if unit.in_blocks}
    sizes = {at: units[at].read_bytes(mesh, carried) for at in shapes}
    loops = [Group(tuple(units[at] for at in loop), tuple(blocks.shape for blocks in loop.values()),
                   tuple(zip(*(blocks.places() for blocks in loop.values()), strict=True)))
             for loop in cut_in_loops(shapes, sizes, buffer_bytes)]
    return loops + [Group((unit,)) for unit in units if not unit.in_blocks]


class BlockPrograms:
    """The compiled programs of groups of units, of one trace."""

    def __init__(self, closed: ClosedJaxpr, specs: Sequence[P], on_disk: Sequence[bool], mesh: Mesh):
        """specs: of all results of the trace, those that replace a carried array first; on_disk: of these."""
        self.jaxpr, self.specs, self.mesh = closed.jaxpr, specs, mesh
        self.on_disk, self.count = on_disk, len(on_disk)
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def replaced_of(self, unit: Unit) -> list[int]:
        """Numbers of the carried arrays in files that `unit` replaces."""
        return [number for number in unit.results if number < self.count and self.on_disk[number]]

    def buffers_of(self, unit: Unit) -> list[int]:
        """Numbers of the results of `unit` that stay in device memory, as a whole array that its blocks fill."""
        return [number for number in unit.results if number >= self.count or not self.on_disk[number]]

    def run(self, group: Group, index: int, stored: Sequence[Sequence[Any]], buffers: Sequence[Sequence[Any]],
            values: dict[Any, Any]) -> tuple[list[list[Any]], list[list[Any]], list[list[Any]]]:
        """Computes block `index`: (blocks that replace those in files, whole buffers, their blocks), each by unit.

        stored: by unit, a block of each array in `unit.stored`, which is donated. buffers: by unit, the arrays of
        `buffers_of`, donated and updated in place; values: of variables that were computed before.
        """
        arrays = [[values[var] for var in self._arrays(unit)] for unit in group.units]
        scalars = [[values[var] for var in unit.scalars] for unit in group.units]
        start = [[jnp.int32(first) for first in start] for start, _ in group.places[index]]
        sizes = [sizes for _, sizes in group.places[index]]
        key = (tuple(map(self._key, group.units)), tuple(sizes))
        if key not in self._compiled:
            program = self._on_blocks(group, sizes) if group.shapes else self._on_whole(*group.units)
            self._compiled[key] = jax.jit(program, donate_argnums=(0, 1))
        new, whole, blocks, _ = self._compiled[key](stored, buffers, arrays, scalars, start)
        return new, whole, blocks

    def _arrays(self, unit: Unit) -> list[Any]:
        """What is read of device memory, but for what is in a buffer."""
        replaced = {self.jaxpr.invars[number] for number in self.buffers_of(unit) if number < self.count}
        return [var for var in unit.arrays if var not in replaced]

    def _inputs(self, unit: Unit) -> list[Any]:
        """Variables that a unit reads: of stored arrays, of arrays, scalars and buffers."""
        buffers = (self.jaxpr.invars[number] for number in self.buffers_of(unit) if number < self.count)
        return [*(self.jaxpr.invars[number] for number in unit.stored), *self._arrays(unit), *unit.scalars, *buffers]

    def _key(self, unit: Unit) -> Hashable:
        results = tuple((self.specs[number], number >= self.count or not self.on_disk[number])
                        for number in unit.results)
        outs = [var for var, _ in unit.writes]
        return structure_of(unit.eqns, self._inputs(unit), outs), results, len(unit.stored), len(unit.scalars)

    def _compute(self, unit: Unit, stored: Any, buffers: Any, arrays: Any, scalars: Any,
                 bind: Callable[[JaxprEqn, list[Any]], Sequence[Any]]) -> tuple[list[Any], list[Any]]:
        """(New stored values, values of buffers)."""
        old = [value for number, value in zip(self.buffers_of(unit), buffers, strict=True) if number < self.count]
        env = dict(zip(self._inputs(unit), (*stored, *arrays, *scalars, *old), strict=True))
        values = dict(zip(unit.results, unit.compute(env, bind), strict=True))
        return [values[number] for number in self.replaced_of(unit)], [
            values[number] for number in self.buffers_of(unit)]

    def _on_whole(self, unit: Unit) -> Callable[..., Any]:
        def sharded(numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
            return [jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, self.specs[number]))
                    for number, value in zip(numbers, values, strict=True)]

        def program(stored: Any, buffers: Any, arrays: Any, scalars: Any, start: Any) -> Any:
            new, resident = self._compute(unit, stored[0], buffers[0], arrays[0], scalars[0], bind_in_scope)
            resident = sharded(self.buffers_of(unit), resident)
            return [sharded(self.replaced_of(unit), new)], [resident], [resident], scalars

        return program

    def _on_blocks(self, group: Group, sizes: Sequence[tuple[int, ...]]) -> Callable[..., Any]:
        def one(at: int, unit: Unit, stored: Any, buffers: Any, arrays: Any, scalars: Any, start: Any) -> Any:
            def block(arrays: Sequence[Any]) -> list[Any]:
                return [jax.lax.dynamic_slice(array, start, sizes[at]) for array in arrays]

            def bind(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
                return bind_on_block(eqn, values, spec=unit.spec, shape=group.shapes[at], start=start, sizes=sizes[at])

            new, values = self._compute(unit, stored, block(buffers), block(arrays), scalars, bind)
            whole = [jax.lax.dynamic_update_slice(buffer, value, start)
                     for buffer, value in zip(buffers, values, strict=True)]
            return new, whole, values

        def program(stored: Any, buffers: Any, arrays: Any, scalars: Any, starts: Any) -> Any:
            def local(stored: Any, buffers: Any, arrays: Any, scalars: Any, starts: Any) -> Any:
                results = [one(at, unit, stored[at], buffers[at], arrays[at], scalars[at], starts[at])
                           for at, unit in enumerate(group.units)]
                # XLA turns the division by a scalar that is used once into a product with its inverse, as it does not
                # in a step in memory, where the bias correction of Adam is used for all parameters: the last bit of
                # every parameter would be another. As a result it is used twice.
                return *([each[part] for each in results] for part in range(3)), scalars

            def specs(tree: Any) -> Any:
                return [[unit.spec] * len(each) for unit, each in zip(group.units, tree, strict=True)]

            out_buffers = specs(buffers)
            replaced = specs([self.replaced_of(unit) for unit in group.units])
            return jax.shard_map(
                local, mesh=self.mesh, in_specs=(specs(stored), out_buffers, specs(arrays), P(), P()),
                out_specs=(replaced, out_buffers, out_buffers, P()), check_vma=False)(
                    stored, buffers, arrays, scalars, starts)

        return program
