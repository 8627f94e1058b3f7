"""A step's state in files: opened, read whole and written whole. `step` has the step itself."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint as constrain

from zero_jax.arguments import shown
from zero_jax.disk.streamed_scratch import StreamedScratch
from zero_jax.distributed.agreement import all_or_none
from zero_jax.errors import UsageError
from zero_jax.sharding.compute_params import gather_copy
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.memory.disk_leaves import in_arrays, resident
from zero_jax.state import ZeroState
from zero_jax.step.call_checks import check_is_state, check_state
from zero_jax.step.disk.committed_state import CommittedState
from zero_jax.step.disk.layer_files import LayerFiles
from zero_jax.step.disk.layer_gradients import LayerGradients
from zero_jax.step.disk.plan import UpdatePlan, without
from zero_jax.step.disk.restored_state import PiecesToRead, RestoredState
from zero_jax.step.disk.states import DiskStates
from zero_jax.step.pieces.program import PiecewiseProgram
from zero_jax.step.step import ZeroTrainStep
from zero_jax.step.update import update_function
from zero_jax.tree import map_named, merge, named_leaves, split_named
from zero_jax.typing import Batch, Params

LOG = logging.getLogger("zero_jax")


class StepWithFiles(ZeroTrainStep):
    """What a step whose state is in files does with the whole of it."""

    _states: DiskStates | None = None
    _layers: LayerFiles | None = None
    _note: Any = None

    @property
    def note(self) -> Any:
        """What each commit from now on says beside the state: plain JSON, as the position in the data.

        Set it before a step to what holds after that step. `stored_state` sets it to what was said of the state that
        it returns, so that a run goes on with the right batch; a step that the guard skips commits nothing.
        """
        return self._note

    @note.setter
    def note(self, note: Any) -> None:
        try:
            self._note = json.loads(json.dumps(note))
        except (TypeError, ValueError) as error:
            raise UsageError(f"note={shown(note)} is not plain JSON ({error}): give numbers, text, lists and "
                             "dictionaries.") from error

    def stored_state(self, batch: Batch) -> ZeroState:
        """The state after the last step that was committed, from the files alone; `batch` may be abstract.

        Every byte is verified. Raises CheckpointError where there is none, DamagedCheckpointError where it is not as
        it was written, and ValueError where the files are of another model or another run uses them.
        """
        states = self._prepared(batch)
        if states.is_open:
            self._close_files()
            states = self._prepared(batch)
        scratch = self._scratch(states, batch)
        commit, layout = states.resume(), self.layout(batch)
        self._open_scratch(scratch, states)
        self._note = commit.note
        copied = {name for name, _ in named_leaves(layout.state.weights) if f"weights/{name}" not in layout.disk}
        names = [name for name in states.leaves if not name.startswith("weights/") and (
            name not in layout.disk or name.startswith("params/") and name.partition("/")[2] in copied)]
        arrays = states.read_leaves(names)
        token = {"disk": self._token(commit.token)}
        params = map_named(lambda name, _: arrays.get(f"params/{name}"), layout.state.params)
        leaves = {**arrays, **token, **self._weights(params, layout)}
        return map_named(lambda name, _: leaves[name], self._resident_like(layout))

    def abstract_state(self, batch: Batch) -> ZeroState:
        """As `ZeroTrainStep`; with an `OnDisk` for each leaf in files."""
        return self._resident_like(self.layout(batch))

    def in_memory(self, state: ZeroState) -> tuple[ZeroState, Layout]:
        """(`state` with the leaves that are in files read into arrays, the layout of that).

        It takes as much memory as the whole state; `in_pieces` does not.
        """
        states, layout = self._current(state), self.layout()
        arrays = {**dict(named_leaves(state)), **states.read_leaves(layout.disk)}
        memory = in_arrays(layout)
        return map_named(lambda name, _: arrays[name], memory.state), memory

    def in_pieces(self, state: ZeroState) -> CommittedState:
        """What of `state` is in files, to be read leaf by leaf, and of stacks layer by layer."""
        return CommittedState(self._current(state))

    def from_pieces(self, source: PiecesToRead) -> ZeroState:
        """The state that `source` reads, each leaf or layer where it is written.

        What the files had before, of this model, is replaced by the next commits, of which this is the first.
        """
        was_open = self._states is not None and self._states.is_open
        states, layout = self._opened(None, DiskStates.replace), self.layout()
        try:
            restored = RestoredState(states, source, lambda params: self._weights(params, layout))
            commit = states.write_all(restored.whole, int(restored.resident["step"]), self._note, restored.layer,
                                      source.check)
        except BaseException:
            if not was_open:
                self._close_files()
            raise
        return self._kept(layout, restored.resident, commit.token)

    def close(self) -> None:
        """Gives the folder back, for another step or run; the state in it stays."""
        if self._jitted is not None and isinstance(self._jitted[0], PiecewiseProgram):
            self._jitted[0].close()
        self._close_files()

    def params(self, state: ZeroState) -> Params:
        """As `ZeroTrainStep`; what of the parameters is in files is read."""
        check_is_state(state)
        self._warn_of_variables(state)
        layout, arrays = self.layout(), dict(named_leaves(state))
        names = [name for name in layout.disk if name.startswith(("params/", "frozen/"))]
        arrays |= self._current(state).read_leaves(names) if names else {}
        of_params = map_named(lambda name, leaf: arrays.get(name), {
            "params": layout.state.params, "frozen": layout.state.frozen})
        shapes = layout.stored_shapes
        loaded = jax.tree.map(layout.load_leaf, {"params": shapes.params, "frozen": shapes.frozen},
                              {"params": layout.state.params, "frozen": layout.state.frozen}, of_params)
        return merge(loaded["params"], loaded["frozen"])

    def _readable(self, state: ZeroState, *, ema: bool) -> tuple[ZeroState, Any]:
        layout = self.layout()
        fields = ("ema", "frozen") if ema else ("weights" if layout.state.weights is not None else "params", "frozen")
        known = dict(named_leaves(state))
        names = [name for name in layout.disk if name.partition("/")[0] in fields and name not in known]
        if names:
            known |= self._current(state).read_leaves(names)
        others = dataclasses.replace(layout, disk=layout.disk.difference(known))
        return (resident(others, map_named(lambda name, like: known.get(name, like), layout.state)),
                resident(others, layout.shardings))

    # How the files are opened.

    def _plan(self, layout: Layout, given: Any) -> UpdatePlan:
        assert self.options.offload is not None
        update = update_function(layout, self._optimizer, stochastic=self._stochastic, ema=self.options.ema,
                                 streamed=True)
        return UpdatePlan(update, layout, given, self.options.offload.block_bytes(layout.axes.built_for),
                          layout.disk_gradients)

    def _prepared(self, batch: Batch | None) -> DiskStates:
        """The files' layout, which may not exist yet."""
        layout = self.layout() if batch is None else self.layout(batch)
        if self._states is None:
            params = layout.state.params
            grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32) if self._stochastic else leaf.dtype), params)
            given = {"grads": without(grads, layout.disk_gradients),
                     "written": {}, "loss": jax.ShapeDtypeStruct((), jnp.float32), "is_good": None,
                     "scale": None,
                     "key": jax.eval_shape(lambda: jax.random.key(0)) if self._stochastic else None}
            plan = self._plan(layout, given)
            assert self.options.offload is not None
            self._states = DiskStates(layout, plan, self.options.offload.disk)
        return self._states

    def _close_files(self) -> None:
        if self._layers is not None:
            self._layers.close()
            self._layers = None
        if self._states is not None:
            self._states.close()
            self._states = None

    def _layer_files(self, states: DiskStates) -> LayerFiles:
        """What a step reads and writes layer by layer of open files."""
        if self._layers is None:
            likes, plan = self.layout().disk_gradients, states.plan
            self._layers = LayerFiles(states, LayerGradients(states.pieces, plan.names, likes) if likes else None)
        return self._layers

    def _opened(self, batch: Batch | None, open_files: Callable[[DiskStates], str]) -> DiskStates:
        states = self._prepared(batch)
        scratch = [] if batch is None else self._scratch(states, batch)
        if message := open_files(states):
            LOG.warning(message)
        self._open_scratch(scratch, states)
        return states

    def _open_scratch(self, scratch: list[StreamedScratch], states: DiskStates) -> None:
        for file in scratch:
            all_or_none(functools.partial(file.open, states.generations.path))

    def _scratch(self, states: DiskStates, batch: Batch) -> list[StreamedScratch]:
        """The files that a step needs beside the states, whose space is looked for with that of these.

        How large they are is known of the compiled programs.
        """
        if not self.options.in_pieces:
            return []
        files = [self._jit(batch)[0].compiled(self.abstract_state(batch), self.abstract_batch(batch)).saved.file]
        if (gradients := self._layer_files(states).gradients) is not None:
            files.append(gradients.file)
        states.generations.scratch_bytes = sum(file.num_bytes for file in files)
        return files

    def _current(self, state: ZeroState) -> DiskStates:
        """The files, of whose generation `state` must be; raises ValueError where it is not."""
        check_state(state, self.layout())
        states = self._states
        token = tuple(int(word) for word in np.asarray(state.disk))
        if states is None or not states.is_open:
            raise UsageError("disk: this step has no files open: take the state of step.init, step.stored_state(batch) "
                             "or Checkpoints.restore of this step.")
        if states.token != token:
            session, generation = states.token or (0, 0)
            raise UsageError(
                f"disk: this state is of generation {token[1]} (of session {token[0]:08x}), and the files in "
                f"{states.generations.path.parent} have generation {generation} (of session {session:08x}): go on from "
                "the state that the last call returned, as in state, metrics = step(state, batch), or from "
                "step.stored_state(batch).")
        return states

    def _weights(self, params: Params, layout: Layout) -> dict[str, Any]:
        """The copies that the model reads, by name, of those parameters that are in memory."""
        if layout.state.weights is None:
            return {}
        there = {name for name, _ in named_leaves(params)}

        def some(tree: Any) -> Any:
            return split_named(tree, lambda name, _: name in there)[0]

        shards, likes = some(layout.gradients), some(layout.state.weights)
        copy = self._jit_once(("copy", frozenset(there)), lambda params: gather_copy(
            jax.tree.map(constrain, params, shards), shards, likes, some(layout.stored_shapes.params), layout),
            (some(layout.shardings.params),), some(layout.shardings.weights))
        return {f"weights/{name}": leaf for name, leaf in named_leaves(copy(some(params)))}

    def _kept(self, layout: Layout, values: Mapping[str, Any], token: tuple[int, int]) -> ZeroState:
        leaves = {**values, "disk": self._token(token)}
        return map_named(lambda name, _: leaves[name], self._resident_like(layout))

    def _resident_like(self, layout: Layout) -> Any:
        return resident(layout, layout.state)

    def _token(self, token: tuple[int, int]) -> jax.Array:
        return jax.device_put(np.array(token, np.uint32), self._replicated)
