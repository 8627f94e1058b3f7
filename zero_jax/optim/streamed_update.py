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
    JaxprEqn,
    bind_in_scope,
    is_literal,
    run_eqns,
    shape_of,
    trace_flat,
    value_of,
)
from zero_jax.jaxpr.passes import without_calls
from zero_jax.jaxpr.primitives import bind_unsharded
from zero_jax.optim.block_equations import bind_on_block
from zero_jax.optim.stream_blocks import Blocks, cut_in_loops
from zero_jax.optim.stream_units import Split, Unit, split_update
from zero_jax.sharding.gather import names_of
from zero_jax.sharding.memory.host_arrays import fetch, put_on_host
from zero_jax.sharding.mesh import is_tpu
from zero_jax.tree import leaf_bytes

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
        sums_in_blocks: whether the sum of an array, as of a norm, is that of its blocks, added: with other roundings
            than of a whole array, which is made in device memory otherwise.
    """

    mesh: Mesh
    specs: tuple[P, ...]
    host: tuple[bool, ...]
    buffer_bytes: int
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
                                      tiled=is_tpu(self.streams.mesh)):
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
        runs = [_UnitRun(unit, blocks, self.streams, self.carried_vars) for unit, blocks in group]
        args = [run.args(self.env, self.carried, self.new) for run in runs]
        scalar_vars = list(dict.fromkeys(var for unit, _ in group for var in unit.scalars))
        scalars = [self.env[var] for var in scalar_vars]
        if after:
            args = jax.lax.optimization_barrier((args, list(after)))[0]

        def local(args: Any, scalars: Any) -> Any:
            shared = dict(zip(scalar_vars, scalars, strict=True))
            return _run_blocks(runs, [{**arg, "scalars": shared} for arg in args])

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


class _UnitRun:
    """A unit on its blocks, inside of a shard_map: every array is a device's shard."""

    def __init__(self, unit: Unit, blocks: Blocks, streams: Streams, carried_vars: Sequence[Any]):
        self.unit, self.blocks, self.streams = unit, blocks, streams
        self.carried_vars = carried_vars
        replaced = {number: at for at, (_, number) in enumerate(unit.writes) if number is not None}
        known = {var: number for number, var in enumerate(carried_vars)}
        # Where an array is read that this unit replaces, it is read from what the loop carries.
        self.reads: dict[Any, tuple[str, Any]] = {}
        for var in (*(carried_vars[number] for number in unit.host), *unit.arrays):
            at = replaced.get(known.get(var, -1))
            self.reads[var] = ("buffer", at) if at is not None else ("array", var)
        self.to_host = [number is not None and streams.host[number] for _, number in unit.writes]

    def args(self, env: Mapping[Any, Any], carried: Sequence[Any], new: Mapping[int, Any]) -> dict[str, Any]:
        """What the shard_map takes beside scalars: buffers of results, and arrays."""
        def value(var: Any) -> Any:
            streamed = [carried[number] for number in self.unit.host if self.carried_vars[number] is var]
            return streamed[0] if streamed else env[var]

        def buffer(var: Any, number: int | None) -> Any:
            if number is not None:
                return new.get(number, carried[number])
            sharding = NamedSharding(self.streams.mesh, self.unit.spec)
            return jax.lax.with_sharding_constraint(jnp.zeros(var.aval.shape, var.aval.dtype), sharding)

        arrays = {at: value(var) for at, (var, (kind, _)) in enumerate(self.reads.items()) if kind == "array"}
        return {"buffers": [buffer(*write) for write in self.unit.writes], "arrays": arrays}

    def compute(self, block: Callable[[Any], Any], args: dict[str, Any], buffers: Sequence[Any], start: Sequence[Any],
                sizes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
        """The results and sums for the block of `sizes` at `start`; block: takes it from an array."""
        env = dict(args["scalars"])
        written = {var for var, _ in self.unit.writes}
        for at, (var, (kind, place)) in enumerate(self.reads.items()):
            env[var] = fetch(block(buffers[place] if kind == "buffer" else args["arrays"][at]))

        def bind(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
            results = bind_on_block(eqn, values, spec=self.unit.spec, shape=self.blocks.shape, start=start, sizes=sizes)
            # A result is computed once, and what follows reads it. XLA would compute it again in each fusion, from
            # arrays that are overwritten by then, which it copies whole; and with other roundings: a multiply-add is
            # fused at one place and not at another.
            return jax.lax.optimization_barrier(results) if eqn.outvars[0] in written else results

        run_eqns(self.unit.eqns, env, bind)
        sums = [bind_unsharded(eqn, [env[eqn.invars[0]]])[0] for eqn in self.unit.sums]
        return [env[var] for var, _ in self.unit.writes], sums

    def no_sums(self) -> list[Any]:
        """What sums are before the first block."""
        return [jnp.zeros((), shape_of(eqn.outvars[0]).dtype) for eqn in self.unit.sums]

    def over_devices(self, sums: Sequence[Any]) -> list[Any]:
        """Sums over the shards, from those of each."""
        return [jax.lax.psum(value, names) for value in sums] if (names := names_of(self.unit.spec)) else list(sums)


_Results = list[tuple[list[Any], list[Any]]]
"""Of each unit: what it writes, and its sums."""


def _run_blocks(runs: Sequence[_UnitRun], args: Sequence[dict[str, Any]]) -> tuple[_Results, jax.Array]:
    """(The results of each unit, a scalar that depends on all of them), every array a device's shard."""
    buffers = [list(arg["buffers"]) for arg in args]
    whole = all(run.blocks.is_whole for run in runs)
    if whole:
        results = [run.compute(lambda array: array, arg, buffer, [0] * len(run.blocks.shape), run.blocks.shape)
                   for run, arg, buffer in zip(runs, args, buffers, strict=True)]
        token = _token([value for values, sums in results for value in (*values, *sums)])
        return [([put_on_host(value) if host else value for value, host in zip(values, run.to_host, strict=True)],
                 run.over_devices(sums)) for run, (values, sums) in zip(runs, results, strict=True)], token

    def step(run: _UnitRun, arg: dict[str, Any], carry: tuple[list[Any], list[Any]], start: Sequence[Any],
             sizes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
        buffers, sums = carry
        values, more = run.compute(lambda array: jax.lax.dynamic_slice(array, start, sizes), arg, buffers, start, sizes)
        buffers = [jax.lax.dynamic_update_slice(buffer, put_on_host(value) if host else value, start)
                   for buffer, value, host in zip(buffers, values, run.to_host, strict=True)]
        return buffers, [total + each for total, each in zip(sums, more, strict=True)]

    def body(index: Any, carry: _Results) -> _Results:
        return [step(run, arg, each, run.blocks.start(index), run.blocks.sizes)
                for run, arg, each in zip(runs, args, carry, strict=True)]

    carry = [(buffer, run.no_sums()) for run, buffer in zip(runs, buffers, strict=True)]
    carry = jax.lax.fori_loop(0, runs[0].blocks.rounds, body, carry)
    for at, (run, arg) in enumerate(zip(runs, args, strict=True)):
        if rest := run.blocks.rest:
            start = (run.blocks.rounds * run.blocks.rows, *[0] * (len(rest.shape) - 1))
            carry[at] = step(run, arg, carry[at], start, rest.shape)
    return [(values, run.over_devices(sums)) for run, (values, sums) in zip(runs, carry, strict=True)
            ], jnp.zeros((), jnp.int32)


def _token(values: Sequence[Any]) -> jax.Array:
    """A scalar that exists once all `values`, in device memory, are computed."""
    firsts = [value[(slice(0, 1),) * value.ndim].reshape(()) for value in values]
    return sum((jnp.isfinite(first).astype(jnp.int32) if jnp.issubdtype(first.dtype, jnp.inexact)
                else first.astype(jnp.int32) for first in firsts), jnp.zeros((), jnp.int32))
