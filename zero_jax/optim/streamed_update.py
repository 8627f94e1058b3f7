"""An update whose arrays are in host memory, computed on the device block by block, through a bounded buffer.

The update's own trace is run: what is elementwise in blocks, everything else (a global norm, a schedule) once on whole
arrays, so that the numbers are those of an update without offload. Each block is read, computed and written back in a
loop whose carry is the arrays in host memory, updated in place: XLA keeps one block of each in device memory (29 MiB
where `device_put` of whole arrays takes 2519; a `scan` over them doubles host memory).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    bind_in_scope,
    is_literal,
    run_eqns,
    trace_flat,
    value_of,
)
from zero_jax.jaxpr.passes import without_calls
from zero_jax.optim.stream_blocks import Blocks, cut_in_loops
from zero_jax.optim.stream_loop import UnitRun, run_blocks
from zero_jax.optim.stream_units import Split, Unit, split_update
from zero_jax.sharding.memory.host_arrays import fetch, put_on_host
from zero_jax.tree import leaf_bytes
from zero_jax.xla.platform import Platform

STREAM_SCOPE = "zero_offload"
"""In the op_name of all that is read from host memory, computed in blocks, and written back."""


@dataclasses.dataclass(frozen=True)
class Streams:
    """How the carried arrays of a streamed update are stored, leaf by leaf, and through what buffer it moves them.

    Attributes:
        mesh: the devices.
        specs: how each is sharded.
        host: whether each is in host memory.
        buffer_bytes: that may be read at a time, per device.
        platform: which decides on tiles, and whether one block is read while another is written.
        sums_in_blocks: whether the sum of an array, as of a norm, is that of its blocks, added: with other roundings
            than of a whole array, which is made in device memory otherwise.
    """

    mesh: Mesh
    specs: tuple[P, ...]
    host: tuple[bool, ...]
    buffer_bytes: int
    platform: Platform
    sums_in_blocks: bool = False


def stream(update: Callable[[Any, Any], tuple[Any, Any]], carried: Any, others: Any, streams: Streams
           ) -> tuple[Any, Any]:
    """`update(carried, others)`, which is (new carried, results in device memory); traceable.

    carried: a pytree of arrays, some in host memory; others: a pytree of arrays in device memory, those of a carried
    leaf's shape sharded as it. New carried arrays are sharded and placed as the old ones, and replace them.
    """
    leaves, treedef = jax.tree.flatten((carried, others))
    closed, out_treedef = _traced(update, leaves, treedef)
    split = split_update(closed, streams.specs, streams.host, in_blocks=streams.sums_in_blocks)
    outs = _Run(closed, split, streams, leaves).run()
    return jax.tree.unflatten(out_treedef, outs)


def _traced(update: Any, leaves: Sequence[Any], treedef: Any) -> tuple[ClosedJaxpr, Any]:
    abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
                for leaf in leaves]
    closed, out_treedef = trace_flat(update, abstract, treedef)
    return without_calls(closed), out_treedef


class _Run:
    """One evaluation of a split update."""

    def __init__(self, closed: ClosedJaxpr, split: Split, streams: Streams, leaves: Sequence[Any]):
        self.jaxpr, self.split, self.streams = closed.jaxpr, split, streams
        self.carried = list(leaves[:len(streams.specs)])
        self.env: dict[Any, Any] = dict(zip((*self.jaxpr.constvars, *self.jaxpr.invars), (*closed.consts, *leaves),
                                            strict=True))
        self.carried_vars = self.jaxpr.invars[:len(self.carried)]
        for number in split.whole:
            self.env[self.carried_vars[number]] = fetch(self.carried[number])
        self.new: dict[int, Any] = {}

    def run(self) -> list[Any]:
        split = self.split
        for level in sorted({0, *split.levels.values()}):
            run_eqns([eqn for eqn in self.jaxpr.eqns if split.levels[eqn.outvars[0]] == level
                      and eqn.outvars[0] not in split.streamed | split.sums], self.env, bind_in_scope)
            units = {i: unit for i, unit in enumerate(split.units) if unit.level == level}
            shapes = {i: self._local_shape(unit) for i, unit in units.items()}
            sizes = {i: self._read_bytes(unit, shapes[i]) for i, unit in units.items()}
            tokens: list[Any] = []
            for group in cut_in_loops(shapes, sizes, self.streams.buffer_bytes,
                                      tiled=self.streams.platform.is_tpu):
                # At most two groups are in memory: the reads of one wait until the last but one is computed.
                tokens.append(self._run_group([(units[i], blocks) for i, blocks in group.items()], tokens[-2:-1]))
        return [self._result(number, var) for number, var in enumerate(self.jaxpr.outvars)]

    def _result(self, number: int, var: Any) -> Any:
        if number in self.new:
            return self.new[number]
        if number >= len(self.carried):
            return value_of(var, self.env)
        if not is_literal(var) and var in self.carried_vars and self.streams.host[number]:
            if (same := self.carried_vars.index(var)) == number:
                return self.carried[number]  # unchanged
            return put_on_host(fetch(self.carried[same]))
        value = value_of(var, self.env)
        if not self.streams.host[number]:
            return value
        sharding = NamedSharding(self.streams.mesh, self.streams.specs[number])
        return put_on_host(jax.lax.with_sharding_constraint(value, sharding))

    def _local_shape(self, unit: Unit) -> tuple[int, ...]:
        return NamedSharding(self.streams.mesh, unit.spec).shard_shape(unit.shape)

    def _read_bytes(self, unit: Unit, shape: tuple[int, ...]) -> int:
        return sum(leaf_bytes(shape, self.carried[number].dtype) for number in unit.host)

    def _run_group(self, group: Sequence[tuple[Unit, Blocks]], after: Sequence[Any]) -> Any:
        """Runs the units of one loop, and returns a scalar that exists once they are computed."""
        streams = self.streams
        runs = [UnitRun(unit, blocks, streams.mesh, streams.platform, streams.host, self.carried_vars)
                for unit, blocks in group]
        args = [run.args(self.env, self.carried, self.new) for run in runs]
        scalar_vars = list(dict.fromkeys(var for unit, _ in group for var in unit.scalars))
        scalars = [self.env[var] for var in scalar_vars]
        if after:
            args = jax.lax.optimization_barrier((args, list(after)))[0]

        def local(args: Any, scalars: Any) -> Any:
            shared = dict(zip(scalar_vars, scalars, strict=True))
            return run_blocks(runs, [{**arg, "scalars": shared} for arg in args],
                              both_ways=streams.platform.copies_both_ways)

        in_specs = [jax.tree.map(lambda _, run=run: run.unit.spec, arg)
                    for run, arg in zip(runs, args, strict=True)]
        out_specs = [([run.unit.spec] * len(run.unit.writes), [P()] * len(run.unit.sums)) for run in runs], P()
        run_local = jax.shard_map(local, mesh=self.streams.mesh, in_specs=(in_specs, P()), out_specs=out_specs,
                                  check_vma=False)
        with jax.named_scope(STREAM_SCOPE):
            results, token = run_local(args, scalars)
        for run, (values, sums) in zip(runs, results, strict=True):
            self.env.update(zip((eqn.outvars[0] for eqn in run.unit.sums), sums, strict=True))
            for (var, number), value in zip(run.unit.writes, values, strict=True):
                if number is None or number >= len(self.carried):
                    self.env[var] = value
                else:
                    self.new[number] = value
        return token
