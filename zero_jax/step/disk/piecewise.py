"""A step's program run in pieces: a round of a loop over layers at a time, whose activations go to a file.

A compiled program cannot read a file in its middle. So the loops whose rounds leave something for backward are run
from here, round by round: while one computes, what the rounds before left is written, and backward reads ahead.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.jaxpr.cut import cut_at_loops
from zero_jax.jaxpr.equations import (
    bind_in_scope,
    is_literal,
    jaxpr_to_fun,
    run_eqns,
    scope_of,
    trace_flat,
    value_of,
)
from zero_jax.jaxpr.primitives import call_jaxpr
from zero_jax.jaxpr.rounds import CutProgram, Rounds, Straight
from zero_jax.step.disk.leaf import resharded
from zero_jax.step.disk.saved_rounds import SavedRounds
from zero_jax.tree import leaf_bytes, map_named, named_leaves
from zero_jax.xla.devices import compiled_for


@dataclasses.dataclass(frozen=True)
class CompiledPiece:
    """A piece, compiled.

    Attributes:
        piece: what it computes.
        run: of a `Straight` (state, values) -> outputs; of `Rounds` (state, values, fetched, carry, number) ->
            (carry, what is saved, parts of stacks).
        in_state: by name, what it reads of the state.
        values: what else it reads, but for what is carried.
        other_bytes: of arrays on each device, while it runs, that it does not read.
        stack: of `Rounds`, what makes stacks of the parts of the first round, and what puts those of another there.
        carried: of `Rounds`, the shardings of what is carried.
    """

    piece: Straight | Rounds
    run: jax.stages.Compiled
    in_state: dict[str, Any]
    values: tuple[Any, ...]
    other_bytes: int
    stack: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    carried: tuple[Any, ...] = ()


class PiecewiseProgram:
    """`fun(state, batch)`, cut at the loops that leave something for backward; compiled for each batch's shapes."""

    def __init__(self, fun: Callable[..., Any], folder: Path, is_saved: Callable[[Any], Callable[[Any], bool]],
                 mesh: Mesh, of_batch: Any, options: dict[str, Any]):
        """folder: of the file. is_saved: of a batch, whether an array that a round of forward leaves is to be in it.

        of_batch: shardings. options: XLA's.
        """
        self._fun, self._folder, self._is_saved, self._mesh, self._options = fun, folder, is_saved, mesh, options
        self._placed = jax.jit(lambda batch: batch, in_shardings=(of_batch,), out_shardings=of_batch)
        self._compiled: dict[Any, Pieces] = {}

    def __call__(self, state: Any, batch: Any) -> Any:
        """What `fun` returns. `state` is not donated, and as it was after an error."""
        batch = self._placed(batch)
        return self.compiled(state, batch).run(self._folder, state, batch)

    def compiled(self, state: Any, batch: Any) -> "Pieces":
        """The pieces, compiled for arrays or abstract arrays with shardings; kept.

        Raises UsageError where no loop leaves anything for backward.
        """
        leaves, treedef = jax.tree.flatten((state, batch))
        key = treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._compiled:
            closed, out_treedef = trace_flat(self._fun, [
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
                for leaf in leaves], treedef)
            cut = cut_at_loops(closed, self._is_saved(batch))
            if not cut.pieces:
                raise UsageError(
                    "partition_activations=\"disk\": no loop of this model leaves a checkpoint for the backward pass: "
                    "stack its layers with nn.scan or nnx.scan and give remat=\"full\", or leave it out.")
            self._compiled[key] = Pieces(cut, state, batch, out_treedef, self._mesh, self._options)
        return self._compiled[key]

    def close(self) -> None:
        """Gives the space of the files back."""
        for program in self._compiled.values():
            program.saved.close()


class Pieces:
    """The pieces of one trace."""

    def __init__(self, cut: CutProgram, state: Any, batch: Any, out_treedef: Any, mesh: Mesh, options: dict[str, Any]):
        """state, batch: abstract, or arrays."""
        self.cut, self._out_treedef, self._mesh, self._options = cut, out_treedef, mesh, options
        self._replicated, self._like = NamedSharding(mesh, P()), state
        names = [name for name, _ in named_leaves(state)]
        jaxpr = cut.closed.jaxpr
        self._state_names = dict(zip(jaxpr.invars, names, strict=False))
        self._consts = dict(zip(jaxpr.constvars, cut.closed.consts, strict=True))
        self._parts: dict[Any, Any] = {}
        env = {var: _abstract(leaf, leaf.sharding) for var, leaf in zip(
            jaxpr.invars, jax.tree.leaves((state, batch)), strict=True)}
        self.pieces: list[CompiledPiece] = []
        self._last = cut.last_reads()
        for piece, last in zip(cut.pieces, self._last, strict=True):
            self.pieces.append(self._straight(piece, env) if isinstance(piece, Straight) else self._rounds(piece, env))
            for var in last.difference(jaxpr.invars):
                env.pop(var, None)
        self.saved = SavedRounds([piece for piece in cut.pieces if isinstance(piece, Rounds)], self._parts)

    def run(self, folder: Path, state: Any, batch: Any) -> Any:
        """What the program returns, of arrays; the file is in `folder`."""
        env = dict(zip(self.cut.closed.jaxpr.invars, jax.tree.leaves((state, batch)), strict=True))
        with self.saved.opened(folder):
            for compiled, last in zip(self.pieces, self._last, strict=True):
                of_state = self._of_state({name: env[var] for name, var in compiled.in_state.items()})
                if isinstance(compiled.piece, Straight):
                    outs = compiled.run(of_state, [env[var] for var in compiled.values])
                else:
                    outs = self._run_rounds(compiled, of_state, env, last)
                env.update(zip(compiled.piece.outputs, outs, strict=True))
                del outs
                for var in last:
                    env.pop(var, None)
        env |= self._consts
        return jax.tree.unflatten(self._out_treedef, [
            jnp.asarray(value_of(atom, env)) for atom in self.cut.outvars])

    def _run_rounds(self, compiled: CompiledPiece, of_state: Any, env: dict[Any, Any], last: set[Any]) -> list[Any]:
        piece: Any = compiled.piece
        values = [env[var] for var in compiled.values]
        own = last.difference(compiled.values, self.cut.closed.jaxpr.invars)  # donated; of others, copies are
        carry = [resharded(env.pop(atom), sharding) if not is_literal(atom) and atom in own and piece.carry.count(
            atom) == 1 else jax.jit(jnp.copy, out_shardings=sharding)(value_of(atom, env | self._consts))
            for atom, sharding in zip(piece.carry, compiled.carried, strict=True)]
        stacks: list[Any] | None = None
        assert compiled.stack is not None
        first, put = compiled.stack
        with self.saved.read(piece) as fetched:
            for index in piece.order:
                number = jax.device_put(np.int32(index), self._replicated)
                carry, saved, parts = compiled.run(of_state, values, fetched(), carry, number)
                if saved:
                    self.saved.write(piece, index, saved)
                stacks = first(parts) if stacks is None else put(stacks, parts, number)
                del saved, parts
        return [*carry, *(stacks or [])]

    def _of_state(self, leaves: dict[str, Any]) -> Any:
        """The state with those leaves alone: their names are then in the program, for `verify`."""
        return map_named(lambda name, _: leaves.get(name), self._like)

    def _reads(self, atoms: Iterable[Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """(What of these is of the state, by name, and what else is no constant)."""
        given = dict.fromkeys(atom for atom in atoms if not is_literal(atom) and atom not in self._consts)
        in_state = {self._state_names[var]: var for var in given if var in self._state_names}
        return in_state, tuple(var for var in given if var not in self._state_names)

    def _env(self, in_state: dict[str, Any], values: Sequence[Any], of_state: Any, given: Sequence[Any]
             ) -> dict[Any, Any]:
        leaves = dict(named_leaves(of_state))
        return {**self._consts, **{var: leaves[name] for name, var in in_state.items()},
                **dict(zip(values, given, strict=True))}

    def _compile(self, fun: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> jax.stages.Compiled:
        lowered = jax.jit(fun, donate_argnums=donate).lower(*args)
        return compiled_for(lowered, self._mesh.devices.flat[0], self._options)

    def _straight(self, piece: Straight, env: dict[Any, Any]) -> CompiledPiece:
        in_state, values = self._reads(piece.inputs)

        def straight(state: Any, given: list[Any]) -> list[Any]:
            inner = self._env(in_state, values, state, given)
            run_eqns(piece.eqns, inner, bind_in_scope)
            return [inner[var] for var in piece.outputs]

        run = self._compile(straight, self._of_state({name: env[var] for name, var in in_state.items()}),
                            [env[var] for var in values])
        other = _device_bytes(env, {*in_state.values(), *values})
        env.update({var: _abstract(var.aval, sharding) for var, sharding in zip(
            piece.outputs, run.output_shardings, strict=True)})
        return CompiledPiece(piece, run, in_state, values, other)

    def _rounds(self, piece: Rounds, env: dict[Any, Any]) -> CompiledPiece:
        body, scan, scope = call_jaxpr(piece.eqn), piece.scan, scope_of(piece.eqn)
        in_state, values = self._reads(piece.reads)

        def one_round(state: Any, given: list[Any], fetched: list[Any], carry: list[Any], number: Any) -> Any:
            inner = self._env(in_state, values, state, given)
            run_eqns(piece.before, inner, bind_in_scope)
            parts = (jax.lax.dynamic_index_in_dim(value_of(stack, inner), number, keepdims=False)
                     for stack in piece.stacks)
            with jax.named_scope(scope):
                outs = jaxpr_to_fun(body)(*(value_of(atom, inner) for atom in piece.consts), *carry,
                                          *piece.in_order(parts, fetched))
            made = outs[scan.num_carry:]
            return outs[:scan.num_carry], [made[at] for at in piece.saved], piece.without_saved(made)

        def settled(state: Any, given: list[Any], fetched: list[Any], carry: list[Any], number: Any) -> Any:
            carry, *made = one_round(state, given, fetched, carry, number)
            return [jax.lax.with_sharding_constraint(*each) for each in zip(carry, shardings, strict=True)], *made

        of_state = self._of_state({name: env[var] for name, var in in_state.items()})
        given, number = [env[var] for var in values], jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated)
        fetched = [self._parts[stack] for stack in piece.fetches]

        carry = [_abstract(atom.aval, self._replicated if is_literal(atom) else env[atom].sharding)
                 for atom in piece.carry]
        run = self._compile(one_round, of_state, given, fetched, carry, number, donate=(3,))
        # What is carried keeps the sharding that a round gives it: zeros, say, come as the partitioner likes.
        if any(not like.sharding.is_equivalent_to(sharding, like.ndim) for like, sharding in zip(
                carry, run.output_shardings[0], strict=True)):
            shardings = run.output_shardings[0]
            carry = [_abstract(like, sharding) for like, sharding in zip(carry, shardings, strict=True)]
            run = self._compile(settled, of_state, given, fetched, carry, number, donate=(3,))
        of_carry, of_saved, of_parts = run.output_shardings
        made = [var.aval for var in body.jaxpr.outvars[scan.num_carry:]]
        self._parts.update({stack: _abstract(made[at], sharding) for stack, at, sharding in zip(
            piece.saves, piece.saved, of_saved, strict=True)})
        other = _device_bytes(env, {*in_state.values(), *values, *piece.inputs})
        stacked = [_stacked(sharding, self._mesh) for sharding in of_parts]
        env.update({var: _abstract(var.aval, sharding) for var, sharding in zip(
            piece.outputs, [*of_carry, *stacked], strict=True)})
        other += _device_bytes({var: env[var] for var in piece.stacked}, set())

        def first(parts: list[Any]) -> list[Any]:
            return [jnp.broadcast_to(part[None], (scan.length, *part.shape)) for part in parts]

        def put(stacks: list[Any], parts: list[Any], number: Any) -> list[Any]:
            return [jax.lax.dynamic_update_index_in_dim(stack, part, number, 0)
                    for stack, part in zip(stacks, parts, strict=True)]

        return CompiledPiece(
            piece, run, in_state, values, other, carried=tuple(of_carry),
            stack=(jax.jit(first, out_shardings=stacked), jax.jit(put, out_shardings=stacked, donate_argnums=0)))


def _abstract(like: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding, weak_type=getattr(like, "weak_type", False))


def _stacked(sharding: Any, mesh: Mesh) -> NamedSharding:
    """The sharding of a stack of arrays that are sharded so."""
    return NamedSharding(mesh, P(None, *sharding.spec))


def _device_bytes(env: dict[Any, Any], without: set[Any]) -> int:
    """Bytes on each device of the arrays of `env`, but for some."""
    return sum(leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for var, leaf in env.items()
               if var not in without)
