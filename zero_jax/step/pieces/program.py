"""A step's program run in pieces: a round of a loop over layers at a time, between which files are read and written.

A compiled program cannot read a file in its middle. So the loops whose rounds leave something for backward, or read
parameters that are in files, are run from here, round by round: while one computes, what the rounds before left is
written, and what the next ones need is read.
"""

import collections
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError, few
from zero_jax.jaxpr.cut import cut_at_loops
from zero_jax.jaxpr.equations import is_literal, trace_flat, value_of
from zero_jax.jaxpr.rounds import CutProgram, Rounds, Straight
from zero_jax.step.disk.leaf import resharded
from zero_jax.step.pieces.compile import CompiledPiece, PieceCompiler
from zero_jax.step.pieces.saved_rounds import SavedRounds
from zero_jax.tree import named_leaves

IN_FLIGHT = 2
"""Rounds that devices have at once, of which one computes: each has a layer of the parameters that are in files."""


class LayerFiles(Protocol):
    """Where parameters and gradients of layers are: `step.disk.layer_files`."""

    def opened(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        """In it, layers can be read and written; at its end all that was written is in the file."""
        ...

    def read(self, names: Sequence[str], order: Sequence[int]
             ) -> contextlib.AbstractContextManager[Callable[[], dict[str, jax.Array]]]:
        """In it, the parts of the leaves `names` of the layers `order`, one layer at each call."""
        ...

    def write(self, parts: Mapping[str, jax.Array], index: int) -> None:
        """Writes the gradients of layer `index`, by the name of the parameter."""

    def close(self) -> None:
        """Gives the space of what is written back."""


class PiecewiseProgram:
    """`fun(state, batch) -> (result, gradients by name)`, cut at its loops; compiled for each batch's shapes."""

    def __init__(self, fun: Callable[..., Any], folder: Path, is_saved: Callable[[Any], Callable[[Any], bool]],
                 mesh: Mesh, of_batch: Any, options: dict[str, Any], expand: Callable[[Any], Any],
                 layers: Collection[str], gradients: Mapping[str, jax.ShapeDtypeStruct]):
        """folder: of the file. is_saved: of a batch, whether an array that a round of forward leaves is to be in it.

        of_batch: shardings. options: XLA's. expand: from a state to one with an abstract array for each of the leaves
        `layers`, names, of which rounds read a layer. gradients: what `fun` returns beside its result, of which each
        round's part is written.
        """
        self._fun, self._folder, self._is_saved, self._mesh, self._options = fun, folder, is_saved, mesh, options
        self._expand, self._layers, self._gradients = expand, layers, gradients
        self._placed = jax.jit(lambda batch: batch, in_shardings=(of_batch,), out_shardings=of_batch)
        self._compiled: dict[Any, Pieces] = {}

    def __call__(self, state: Any, batch: Any, files: LayerFiles) -> Any:
        """The result of `fun`. `state` has no leaf for each of `layers`; it is not donated, and kept by an error."""
        batch = self._placed(batch)
        return self.compiled(state, batch).run(self._folder, state, batch, files)

    def compiled(self, state: Any, batch: Any) -> "Pieces":
        """The pieces, compiled for arrays or abstract arrays with shardings; kept.

        Raises UsageError where no loop leaves anything for backward, or reads and makes what is in files.
        """
        key = jax.tree.structure((state, batch)), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(
            (state, batch)))
        if key not in self._compiled:
            self._compiled[key] = self._pieces(self._expand(state), batch)
        return self._compiled[key]

    def _pieces(self, state: Any, batch: Any) -> "Pieces":
        leaves, treedef = jax.tree.flatten((state, batch))
        closed, out_treedef = trace_flat(self._fun, [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
            for leaf in leaves], treedef)
        names, count = [name for name, _ in named_leaves(state)], len(closed.jaxpr.outvars)
        kept = range(count - len(self._gradients), count)
        cut = cut_at_loops(closed, self._is_saved(batch), given=[
            number for number, name in enumerate(names) if name in self._layers], kept=kept)
        layers = {closed.jaxpr.invars[number]: name for number, name in enumerate(names) if name in self._layers}
        gradients: dict[Any, str] = {cut.outvars[number]: name for number, name in zip(
            kept, sorted(self._gradients), strict=True)}
        self._check(cut, layers, gradients)
        return Pieces(cut, state, batch, out_treedef, self._mesh, self._options, layers, gradients, self._gradients)

    def _check(self, cut: CutProgram, layers: Mapping[Any, str], gradients: Mapping[Any, str]) -> None:
        whole = [name.partition("/")[2] for var, name in layers.items() if not cut.pieces or var in cut.in_memory]
        if not cut.pieces and not whole:
            raise UsageError(
                "partition_activations=\"disk\": no loop of this model leaves a checkpoint for the backward pass: "
                "stack its layers with nn.scan or nnx.scan and give remat=\"full\", or leave it out.")
        if whole:
            raise UsageError(
                f"Offload(parameters=\"disk\"): {few(whole, 3)} is read otherwise than by loops over layers, layer by "
                "layer: read each stacked parameter in nn.scan or nnx.scan alone, or leave parameters out.")
        saved = {stack for piece in cut.pieces if isinstance(piece, Rounds) for stack in piece.saves}
        if whole := [name for var, name in gradients.items() if var not in saved]:
            raise UsageError(
                f"Offload(parameters=\"disk\"): the gradient of {few(whole, 3)} is no stack that one loop over layers "
                "makes, or more than sums are made of it before the update (adaptive clipping, say): give "
                "gradients=\"device\", or leave parameters out.")

    def close(self) -> None:
        """Gives the space of the files back."""
        for program in self._compiled.values():
            program.saved.file.close()


class Pieces:
    """The pieces of one trace."""

    def __init__(self, cut: CutProgram, state: Any, batch: Any, out_treedef: Any, mesh: Mesh, options: dict[str, Any],
                 layers: Mapping[Any, str], gradients: Mapping[Any, str], likes: Mapping[str, jax.ShapeDtypeStruct]):
        """state, batch: abstract, or arrays; abstract arrays alone for what is in files."""
        self.cut, self._out_treedef = cut, out_treedef
        self._replicated, self._gradients = NamedSharding(mesh, P()), gradients
        self._consts = dict(zip(cut.closed.jaxpr.constvars, cut.closed.consts, strict=True))
        self._inputs = [var for var in cut.closed.jaxpr.invars if var not in layers]
        self._last = cut.last_reads()
        self._compiler = PieceCompiler(cut, state, batch, layers, {
            var: likes[name] for var, name in gradients.items()}, mesh, options)
        self.pieces = self._compiler.pieces
        self.saved = SavedRounds([piece for piece in cut.pieces if isinstance(piece, Rounds)], {
            stack: part for stack, part in self._compiler.parts.items()
            if stack not in layers and stack not in gradients})

    def run(self, folder: Path, state: Any, batch: Any, files: LayerFiles) -> Any:
        """What the program returns, of arrays, but for gradients in files; the activations' file is in `folder`."""
        env = dict(zip(self._inputs, jax.tree.leaves((state, batch)), strict=True))
        with self.saved.file.opened(folder), files.opened(folder):
            for compiled, last in zip(self.pieces, self._last, strict=True):
                of_state = {name: env[var] for name, var in compiled.in_state.items()}
                if isinstance(compiled.piece, Straight):
                    outs = compiled.run(self._compiler.of_state(of_state), [env[var] for var in compiled.values])
                else:
                    outs = self._run_rounds(compiled, of_state, env, last, files)
                env.update(zip(compiled.piece.outputs, outs, strict=True))
                del outs, of_state
                for var in last:
                    env.pop(var, None)
        env |= self._consts | dict.fromkeys(self._gradients)
        outs = [value if value is None else jnp.asarray(value) for value in (
            value_of(atom, env) for atom in self.cut.outvars)]
        return jax.tree.unflatten(self._out_treedef, outs)[0]

    def _run_rounds(self, compiled: CompiledPiece, of_state: dict[str, Any], env: dict[Any, Any], last: set[Any],
                    files: LayerFiles) -> list[Any]:
        piece: Any = compiled.piece
        values = [env[var] for var in compiled.values]
        own = last.difference(compiled.values, self.cut.closed.jaxpr.invars)  # donated; of others, copies are
        carry = [resharded(env.pop(atom), sharding) if not is_literal(atom) and atom in own and piece.carry.count(
            atom) == 1 else jax.jit(jnp.copy, out_shardings=sharding)(value_of(atom, env | self._consts))
            for atom, sharding in zip(piece.carry, compiled.carried, strict=True)]
        stacks: list[Any] | None = None
        assert compiled.stack is not None
        first, put = compiled.stack
        in_flight = collections.deque[Any]()
        with self.saved.read(piece) as fetched, files.read(list(compiled.layers), piece.order) as layer:
            for index in piece.order:
                if len(in_flight) == IN_FLIGHT:
                    jax.block_until_ready(in_flight.popleft())
                number = jax.device_put(np.int32(index), self._replicated)
                carry, saved, parts, done = compiled.run(
                    self._compiler.of_state(of_state | layer()), values, fetched(), carry, number)
                self._write(piece, index, saved, files)
                in_flight.append(done)
                stacks = first(parts) if stacks is None else put(stacks, parts, number)
                del saved, parts, done
        return [*carry, *(stacks or [])]

    def _write(self, piece: Rounds, index: int, saved: Sequence[jax.Array], files: LayerFiles) -> None:
        """Writes what a round saved: activations and gradients."""
        gradients = {self._gradients[stack]: part for stack, part in zip(piece.saves, saved, strict=True)
                     if stack in self._gradients}
        others = [part for stack, part in zip(piece.saves, saved, strict=True) if stack not in self._gradients]
        if others:
            self.saved.write(piece, index, others)
        files.write(gradients, index)
