"""An update whose arrays are in host memory, computed on the device block by block, through a bounded buffer.

The update's own trace is run: what is elementwise in blocks, everything else (a global norm, a schedule) once on whole
arrays, so that the numbers are those of an update without offload. Each block is read, computed and written back in a
loop whose carry is the arrays in host memory, updated in place: XLA keeps one block of each in device memory (29 MiB
where `device_put` of whole arrays takes 2519; a `scan` over them doubles host memory).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    bind_in_scope,
    is_literal,
    run_eqns,
    shape_of,
    value_of,
)
from zero_jax.jaxpr.primitives import bind_unsharded
from zero_jax.offload.blocks import Blocks, bind_on_block, cut_in_loops
from zero_jax.offload.split import Split, Unit, split_update, traced_update
from zero_jax.sharding.host_arrays import fetch, is_on_host, put_on_host
from zero_jax.sharding.partition import names_of
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
    closed, out_treedef = traced_update(update, leaves, treedef)
    split = split_update(closed, streams.specs, streams.host, sums_in_blocks=streams.sums_in_blocks)
    outs = _Run(closed, split, streams, leaves).run()
    return jax.tree.unflatten(out_treedef, outs)


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
            shapes = {i: unit.local_shape(self.streams.mesh) for i, unit in units.items()}
            sizes = {i: unit.read_bytes(self.streams.mesh, self.carried) for i, unit in units.items()}
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


class UnitRun:
    """A unit on its blocks, inside of a shard_map: every array is a device's shard."""

    def __init__(self, unit: Unit, blocks: Blocks, mesh: Mesh, platform: Platform, host: Sequence[bool],
                 carried_vars: Sequence[Any]):
        """host: whether each of the carried arrays is in host memory."""
        self.unit, self.blocks, self.mesh = unit, blocks, mesh
        self.carried_vars = carried_vars
        replaced = {number: at for at, (_, number) in enumerate(unit.writes) if number is not None}
        known = {var: number for number, var in enumerate(carried_vars)}
        # Where an array is read that this unit replaces, it is read from what the loop carries.
        self.reads: dict[Any, tuple[str, Any]] = {}
        for var in (*(carried_vars[number] for number in unit.stored), *unit.arrays):
            at = replaced.get(known.get(var, -1))
            self.reads[var] = ("buffer", at) if at is not None else ("array", var)
        self.to_host = [number is not None and host[number] for _, number in unit.writes]
        read = {place for kind, place in self.reads.values() if kind == "buffer"}
        self.only_written = {at for at, is_to_host in enumerate(self.to_host) if is_to_host and at not in read
                             and blocks.rows > 1 and platform.has_copy_engines}

    def args(self, env: Mapping[Any, Any], carried: Sequence[Any], new: Mapping[int, Any]) -> dict[str, Any]:
        """What the shard_map takes beside scalars: buffers of results, and arrays."""
        def value(var: Any) -> Any:
            streamed = [carried[number] for number in self.unit.stored if self.carried_vars[number] is var]
            return streamed[0] if streamed else env[var]

        def buffer(var: Any, number: int | None) -> Any:
            if number is not None:
                return new.get(number, carried[number])
            sharding = NamedSharding(self.mesh, self.unit.spec)
            return jax.lax.with_sharding_constraint(jnp.zeros(var.aval.shape, var.aval.dtype), sharding)

        arrays = {at: value(var) for at, (var, (kind, _)) in enumerate(self.reads.items()) if kind == "array"}
        return {"buffers": [buffer(*write) for write in self.unit.writes], "arrays": arrays}

    def read(self, block: Callable[[Any], Any], args: dict[str, Any], buffers: Sequence[Any]) -> dict[int, Any]:
        """What it reads from host memory, by its place in `reads`; block: takes it from an array."""
        return {at: fetch(block(source)) for at, source in enumerate(self._sources(args, buffers))
                if is_on_host(source)}

    def compute(self, read: Mapping[int, Any], block: Callable[[Any], Any], args: dict[str, Any],
                buffers: Sequence[Any], start: Sequence[Any], sizes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
        """The results and sums for the block of `sizes` at `start`; read: what `read` has found there."""
        env = dict(args["scalars"])
        for at, (var, source) in enumerate(zip(self.reads, self._sources(args, buffers), strict=True)):
            env[var] = read[at] if at in read else block(source)

        values = self.unit.compute(env, lambda eqn, values: bind_on_block(
            eqn, values, spec=self.unit.spec, shape=self.blocks.shape, start=start, sizes=sizes))
        sums = [bind_unsharded(eqn, [env[eqn.invars[0]]])[0] for eqn in self.unit.sums]
        return values, sums

    def _sources(self, args: dict[str, Any], buffers: Sequence[Any]) -> list[Any]:
        return [buffers[place] if kind == "buffer" else args["arrays"][at]
                for at, (kind, place) in enumerate(self.reads.values())]

    @property
    def block_bytes(self) -> int:
        """What it reads from host memory for a block."""
        return sum(leaf_bytes(self.blocks.sizes, shape_of(self.carried_vars[number]).dtype)
                   for number in self.unit.stored)

    def over_devices(self, sums: Sequence[Any]) -> list[Any]:
        """Sums over the shards, from those of each."""
        return [jax.lax.psum(value, names) for value in sums] if (names := names_of(self.unit.spec)) else list(sums)


_Results = list[tuple[list[Any], list[Any]]]
"""Of each unit: what it writes, and its sums."""


def run_blocks(runs: Sequence[UnitRun], args: Sequence[dict[str, Any]], *, both_ways: bool
               ) -> tuple[_Results, jax.Array]:
    """(The results of each unit, a scalar that depends on all of them), every array a device's shard."""
    buffers = [list(arg["buffers"]) for arg in args]
    whole = all(run.blocks.is_whole for run in runs)
    if whole:
        results = [run.compute(run.read(_whole, arg, buffer), _whole, arg, buffer, [0] * len(run.blocks.shape),
                               run.blocks.shape) for run, arg, buffer in zip(runs, args, buffers, strict=True)]
        token = _token([value for values, sums in results for value in (*values, *sums)])
        return [([put_on_host(value) if host else value for value, host in zip(values, run.to_host, strict=True)],
                 run.over_devices(sums)) for run, (values, sums) in zip(runs, results, strict=True)], token

    count = runs[0].blocks.count
    ahead, others = _in_halves(runs if both_ways and count > 1 else [], len(runs))
    carry = [(buffer, [jnp.zeros((), shape_of(eqn.outvars[0]).dtype) for eqn in run.unit.sums])
             for run, buffer in zip(runs, buffers, strict=True)]
    carry = _in_iterations(_Half(runs, args, ahead), _Half(runs, args, others), carry, count)
    for at, (run, arg) in enumerate(zip(runs, args, strict=True)):
        if rest := run.blocks.rest:
            start = (count * run.blocks.rows, *[0] * (len(rest.shape) - 1))
            carry[at] = _step(run, arg, carry[at], None, start, rest.shape)
    return [(values, run.over_devices(sums)) for run, (values, sums) in zip(runs, carry, strict=True)
            ], jnp.zeros((), jnp.int32)


def _in_halves(runs: Sequence[UnitRun], count: int) -> tuple[list[int], list[int]]:
    """The numbers of those of `count` of which a block is read ahead, and of the others; runs: to choose of."""
    sizes = [run.block_bytes for run in runs]
    ahead: list[int] = []
    for number in sorted(range(len(runs)), key=lambda number: -sizes[number]):
        if 2 * (sum(sizes[each] for each in ahead) + sizes[number]) <= sum(sizes):
            ahead.append(number)
    return sorted(ahead), [number for number in range(count) if number not in ahead]


def _in_iterations(ahead: "_Half", others: "_Half", carry: _Results, count: int) -> _Results:
    """All equal blocks. While a block of one half is written, one of the other is read, which no array is in twice.

    Else the link to host memory, which carries as much in each direction, would be used in one at a time.
    """
    def iteration(index: Any, carry: _Results, blocks: list[Any]) -> _Results:
        carry = ahead.update(index, carry, blocks)
        return others.update(index, carry, others.read(index, carry))

    def body(index: Any, both: tuple[_Results, list[Any]]) -> tuple[_Results, list[Any]]:
        carry = iteration(index, *both)
        return carry, ahead.read(index + 1, carry)

    if not ahead.units:
        return jax.lax.fori_loop(0, count, lambda index, carry: iteration(index, carry, []), carry)
    both = jax.lax.fori_loop(0, count - 1, body, (carry, ahead.read(0, carry)))
    return iteration(count - 1, *both)


class _Half:
    """Those of the units of a loop with these `numbers`."""

    def __init__(self, runs: Sequence[UnitRun], args: Sequence[dict[str, Any]], numbers: Sequence[int]):
        self.units = [(number, runs[number], args[number]) for number in numbers]

    def read(self, index: Any, carry: _Results) -> list[Any]:
        """Block `index` of what each reads from host memory."""
        return [run.read(_block_of(run.blocks.start(index), run.blocks.sizes), arg, carry[number][0])
                for number, run, arg in self.units]

    def update(self, index: Any, carry: _Results, blocks: Sequence[Any]) -> _Results:
        """`carry` with the results of block `index`, from what was read of it."""
        new = {number: _step(run, arg, carry[number], read, run.blocks.start(index), run.blocks.sizes)
               for (number, run, arg), read in zip(self.units, blocks, strict=True)}
        return [new.get(number, each) for number, each in enumerate(carry)]


def _step(run: UnitRun, arg: dict[str, Any], carry: tuple[list[Any], list[Any]], read: Mapping[int, Any] | None,
          start: Sequence[Any], sizes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """(Buffers with the results of a block, sums with its own); read: what it has from host memory, if it was read."""
    (buffers, sums), block = carry, _block_of(start, sizes)
    read = run.read(block, arg, buffers) if read is None else read
    values, more = run.compute(read, block, arg, buffers, start, sizes)
    starts = [_from_data(start, value) if at in run.only_written else start for at, value in enumerate(values)]
    buffers = [jax.lax.dynamic_update_slice(buffer, put_on_host(value) if host else value, start)
               for buffer, value, host, start in zip(buffers, values, run.to_host, starts, strict=True)]
    return buffers, [total + each for total, each in zip(sums, more, strict=True)]


def _from_data(start: Sequence[Any], value: jax.Array) -> list[Any]:
    """`start` as an index that depends on a number of `value`, for all that a compiler knows.

    A write to an array that the loop does not read XLA:GPU moves to the next iteration, and copies by the number of the
    iteration in the place of an index that is a multiple of it: other rows (jax 0.11.2 and 0.12.0.1). By an index that
    depends on data a kernel writes, which takes it as it is.
    """
    bits = jax.lax.bitcast_convert_type(value[(slice(0, 1),) * value.ndim].reshape(()), f"uint{8 * value.itemsize}")
    return [start[0] + ((bits | 1) == 0).astype(jnp.int32), *start[1:]]


def _whole(array: Any) -> Any:
    return array


def _block_of(start: Sequence[Any], sizes: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda array: jax.lax.dynamic_slice(array, start, sizes)


def _token(values: Sequence[Any]) -> jax.Array:
    """A scalar that exists once all `values`, in device memory, are computed."""
    firsts = [value[(slice(0, 1),) * value.ndim].reshape(()) for value in values]
    return sum((jnp.isfinite(first).astype(jnp.int32) if jnp.issubdtype(first.dtype, jnp.inexact)
                else first.astype(jnp.int32) for first in firsts), jnp.zeros((), jnp.int32))
