"""The pieces of a program that is cut at its loops over layers, each compiled by itself.

A piece is given what it reads, and no more. What is in files is given to a round in the place of the whole stack, under
its name in the state, which `verify` reads in the compiled program.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import bind_in_scope, is_literal, jaxpr_to_fun, run_eqns, scope_of, value_of
from zero_jax.jaxpr.primitives import call_jaxpr
from zero_jax.jaxpr.rounds import CutProgram, Rounds, Straight
from zero_jax.step.disk.leaf import layer_of
from zero_jax.tree import leaf_bytes, map_named, named_leaves
from zero_jax.xla.devices import compiled_for


@dataclasses.dataclass(frozen=True)
class CompiledPiece:
    """A piece, compiled.

    Attributes:
        piece: what it computes.
        run: of a `Straight` (state, values) -> outputs; of `Rounds` (state, values, fetched, carry, number) ->
            (carry, what is saved, parts of stacks, the number).
        in_state: by name, what it reads of the state.
        layers: by name, of which leaves of the state it reads a layer.
        values: what else it reads, but for what is carried.
        other_bytes: of arrays on each device, while it runs, that it does not read.
        stack: of `Rounds`, what makes stacks of the parts of the first round, and what puts those of another there.
        carried: of `Rounds`, the shardings of what is carried.
    """

    piece: Straight | Rounds
    run: jax.stages.Compiled
    in_state: dict[str, Any]
    layers: dict[str, Any]
    values: tuple[Any, ...]
    other_bytes: int
    stack: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    carried: tuple[Any, ...] = ()


class PieceCompiler:
    """Compiles the pieces of one program in order, each for the shardings that those before it give.

    Attributes:
        pieces: compiled so far.
        parts: for each stack that rounds save or fetch, what one has of it, abstract.
    """

    def __init__(self, cut: CutProgram, state: Any, batch: Any, layers: Mapping[Any, str],
                 gradients: Mapping[Any, jax.ShapeDtypeStruct], mesh: Mesh, options: dict[str, Any]):
        """state, batch: of abstract arrays. layers: names of the leaves that rounds fetch, by variable.

        gradients: the stacks that rounds make of each of these results, and that are in files.
        """
        self._mesh, self._options, self._like = mesh, options, state
        self._replicated = NamedSharding(mesh, P())
        self._layers, self._gradients = layers, gradients
        jaxpr, leaves = cut.closed.jaxpr, jax.tree.leaves((state, batch))
        self._state_names = dict(zip(jaxpr.invars, (name for name, _ in named_leaves(state)), strict=False))
        self._consts = dict(zip(jaxpr.constvars, cut.closed.consts, strict=True))
        inputs = dict(zip(jaxpr.invars, leaves, strict=True))
        self.parts: dict[Any, jax.ShapeDtypeStruct] = {var: layer_of(inputs[var]) for var in layers}
        env = {var: _abstract(leaf, leaf.sharding) for var, leaf in inputs.items() if var not in layers}
        self.pieces: list[CompiledPiece] = []
        for piece, last in zip(cut.pieces, cut.last_reads(), strict=True):
            self.pieces.append(self._straight(piece, env) if isinstance(piece, Straight) else self._rounds(piece, env))
            for var in last.difference(jaxpr.invars):
                env.pop(var, None)

    def of_state(self, leaves: dict[str, Any]) -> Any:
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

        run = self._compile(straight, self.of_state({name: env[var] for name, var in in_state.items()}),
                            [env[var] for var in values])
        other = _device_bytes(env, {*in_state.values(), *values})
        env.update({var: _abstract(var.aval, sharding) for var, sharding in zip(
            piece.outputs, run.output_shardings, strict=True)})
        return CompiledPiece(piece, run, in_state, {}, values, other)

    def _rounds(self, piece: Rounds, env: dict[Any, Any]) -> CompiledPiece:
        body, scan, scope = call_jaxpr(piece.eqn), piece.scan, scope_of(piece.eqn)
        in_state, values = self._reads(piece.reads)
        layers = {self._layers[stack]: stack for stack in piece.fetches if stack in self._layers}

        def one_round(state: Any, given: list[Any], fetched: list[Any], carry: list[Any], number: Any) -> Any:
            inner = self._env({**in_state, **layers}, values, state, given)
            run_eqns(piece.before, inner, bind_in_scope)
            parts = (jax.lax.dynamic_index_in_dim(value_of(stack, inner), number, keepdims=False)
                     for stack in piece.stacks)
            others = iter(fetched)
            of_files = [inner[stack] if stack in self._layers else next(others) for stack in piece.fetches]
            with jax.named_scope(scope):
                outs = jaxpr_to_fun(body)(*(value_of(atom, inner) for atom in piece.consts), *carry,
                                          *piece.in_order(parts, of_files))
            made = outs[scan.num_carry:]
            saved = [made[at] if stack not in self._gradients else jax.lax.with_sharding_constraint(
                made[at], layer_of(self._gradients[stack]).sharding)
                for at, stack in zip(piece.saved, piece.saves, strict=True)]
            return outs[:scan.num_carry], saved, piece.without_saved(made), number

        def settled(state: Any, given: list[Any], fetched: list[Any], carry: list[Any], number: Any) -> Any:
            carry, *made = one_round(state, given, fetched, carry, number)
            return [jax.lax.with_sharding_constraint(*each) for each in zip(carry, shardings, strict=True)], *made

        of_layers = {name: self.parts[stack] for name, stack in layers.items()}
        of_state = self.of_state({**{name: env[var] for name, var in in_state.items()}, **of_layers})
        given, number = [env[var] for var in values], jax.ShapeDtypeStruct((), jnp.int32, sharding=self._replicated)
        fetched = [self.parts[stack] for stack in piece.fetches if stack not in self._layers]
        carry = [_abstract(atom.aval, self._replicated if is_literal(atom) else env[atom].sharding)
                 for atom in piece.carry]
        run = self._compile(one_round, of_state, given, fetched, carry, number, donate=(3,))
        # What is carried keeps the sharding that a round gives it: zeros, say, come as the partitioner likes.
        if any(not like.sharding.is_equivalent_to(sharding, like.ndim) for like, sharding in zip(
                carry, run.output_shardings[0], strict=True)):
            shardings = run.output_shardings[0]
            carry = [_abstract(like, sharding) for like, sharding in zip(carry, shardings, strict=True)]
            run = self._compile(settled, of_state, given, fetched, carry, number, donate=(3,))
        of_carry, of_saved, of_parts, _ = run.output_shardings
        made = [var.aval for var in body.jaxpr.outvars[scan.num_carry:]]
        self.parts.update({stack: _abstract(made[at], sharding) for stack, at, sharding in zip(
            piece.saves, piece.saved, of_saved, strict=True)})
        other = _device_bytes(env, {*in_state.values(), *values, *piece.inputs})
        stacked = [_stacked(sharding, self._mesh) for sharding in of_parts]
        env.update({var: _abstract(var.aval, sharding) for var, sharding in zip(
            piece.outputs, [*of_carry, *stacked], strict=True)})
        other += _device_bytes({var: env[var] for var in piece.stacked}, set())
        # Beside a round are the layer of the next one, and the gradients of the one before until they are written.
        other += _device_bytes({**of_layers, **{
            stack: self.parts[stack] for stack in piece.saves if stack in self._gradients}}, set())

        def first(parts: list[Any]) -> list[Any]:
            return [jnp.broadcast_to(part[None], (scan.length, *part.shape)) for part in parts]

        def put(stacks: list[Any], parts: list[Any], number: Any) -> list[Any]:
            return [jax.lax.dynamic_update_index_in_dim(stack, part, number, 0)
                    for stack, part in zip(stacks, parts, strict=True)]

        return CompiledPiece(
            piece, run, in_state, layers, values, other, carried=tuple(of_carry),
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
