"""The loops of a streamed update: blocks are read from host memory, computed on the device, and written back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from zero_jax.jaxpr.equations import JaxprEqn, run_eqns, shape_of
from zero_jax.jaxpr.primitives import bind_unsharded
from zero_jax.optim.stream_blocks import Blocks, bind_on_block
from zero_jax.optim.stream_units import Unit
from zero_jax.sharding.gather import names_of
from zero_jax.sharding.memory.host_arrays import fetch, is_on_host, put_on_host
from zero_jax.tree import leaf_bytes
from zero_jax.xla.platform import Platform


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
        for var in (*(carried_vars[number] for number in unit.host), *unit.arrays):
            at = replaced.get(known.get(var, -1))
            self.reads[var] = ("buffer", at) if at is not None else ("array", var)
        self.to_host = [number is not None and host[number] for _, number in unit.writes]
        read = {place for kind, place in self.reads.values() if kind == "buffer"}
        self.only_written = {at for at, is_to_host in enumerate(self.to_host) if is_to_host and at not in read
                             and blocks.rows > 1 and platform.has_copy_engines}

    def args(self, env: Mapping[Any, Any], carried: Sequence[Any], new: Mapping[int, Any]) -> dict[str, Any]:
        """What the shard_map takes beside scalars: buffers of results, and arrays."""
        def value(var: Any) -> Any:
            streamed = [carried[number] for number in self.unit.host if self.carried_vars[number] is var]
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
        written = {var for var, _ in self.unit.writes}
        for at, (var, source) in enumerate(zip(self.reads, self._sources(args, buffers), strict=True)):
            env[var] = read[at] if at in read else block(source)

        def bind(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
            results = bind_on_block(eqn, values, spec=self.unit.spec, shape=self.blocks.shape, start=start, sizes=sizes)
            # A result is computed once, and what follows reads it. XLA would compute it again in each fusion, from
            # arrays that are overwritten by then, which it copies whole; and with other roundings: a multiply-add is
            # fused at one place and not at another.
            return jax.lax.optimization_barrier(results) if eqn.outvars[0] in written else results

        run_eqns(self.unit.eqns, env, bind)
        sums = [bind_unsharded(eqn, [env[eqn.invars[0]]])[0] for eqn in self.unit.sums]
        return [env[var] for var, _ in self.unit.writes], sums

    def _sources(self, args: dict[str, Any], buffers: Sequence[Any]) -> list[Any]:
        return [buffers[place] if kind == "buffer" else args["arrays"][at]
                for at, (kind, place) in enumerate(self.reads.values())]

    @property
    def bytes_of_round(self) -> int:
        """What it reads from host memory in a round."""
        return sum(leaf_bytes(self.blocks.sizes, shape_of(self.carried_vars[number]).dtype)
                   for number in self.unit.host)

    def no_sums(self) -> list[Any]:
        """What sums are before the first block."""
        return [jnp.zeros((), shape_of(eqn.outvars[0]).dtype) for eqn in self.unit.sums]

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

    rounds = runs[0].blocks.rounds
    ahead, others = _in_halves(runs if both_ways and rounds > 1 else [], len(runs))
    carry = [(buffer, run.no_sums()) for run, buffer in zip(runs, buffers, strict=True)]
    carry = _in_rounds(_Half(runs, args, ahead), _Half(runs, args, others), carry, rounds)
    for at, (run, arg) in enumerate(zip(runs, args, strict=True)):
        if rest := run.blocks.rest:
            start = (rounds * run.blocks.rows, *[0] * (len(rest.shape) - 1))
            carry[at] = _step(run, arg, carry[at], None, start, rest.shape)
    return [(values, run.over_devices(sums)) for run, (values, sums) in zip(runs, carry, strict=True)
            ], jnp.zeros((), jnp.int32)


def _in_halves(runs: Sequence[UnitRun], count: int) -> tuple[list[int], list[int]]:
    """The numbers of those of `count` of which a block is read ahead, and of the others; runs: to choose of."""
    sizes = [run.bytes_of_round for run in runs]
    ahead: list[int] = []
    for number in sorted(range(len(runs)), key=lambda number: -sizes[number]):
        if 2 * (sum(sizes[each] for each in ahead) + sizes[number]) <= sum(sizes):
            ahead.append(number)
    return sorted(ahead), [number for number in range(count) if number not in ahead]


def _in_rounds(ahead: "_Half", others: "_Half", carry: _Results, rounds: int) -> _Results:
    """All equal blocks. While a block of one half is written, one of the other is read, which no array is in twice.

    Else the link to host memory, which carries as much in each direction, would be used in one at a time.
    """
    def one_round(index: Any, carry: _Results, blocks: list[Any]) -> _Results:
        carry = ahead.update(index, carry, blocks)
        return others.update(index, carry, others.read(index, carry))

    def body(index: Any, both: tuple[_Results, list[Any]]) -> tuple[_Results, list[Any]]:
        carry = one_round(index, *both)
        return carry, ahead.read(index + 1, carry)

    if not ahead.units:
        return jax.lax.fori_loop(0, rounds, lambda index, carry: one_round(index, carry, []), carry)
    both = jax.lax.fori_loop(0, rounds - 1, body, (carry, ahead.read(0, carry)))
    return one_round(rounds - 1, *both)


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

    A write to an array that the loop does not read XLA:GPU moves to the round behind, and copies by the number of the
    round in the place of an index that is a multiple of it: other rows (jax 0.11.2 and 0.12.0.1). By an index that
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
