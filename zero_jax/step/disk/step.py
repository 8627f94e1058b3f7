"""The step whose optimizer states, average and master weights are in files (`Offload(disk=...)`, ZeRO-Infinity).

Forward and backward are one compiled program, which returns sharded gradients. Then the update goes through the files:
the next block is read while this one is computed and the last one is written. A commit at its end makes the new
generation valid at once, and the state that the step returns names it: no other is taken.
"""

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
from zero_jax.errors import UsageError
from zero_jax.frontends.model_functions import as_given, stored_values
from zero_jax.layout.compute_params import gather_compute_params, gather_copy
from zero_jax.layout.layout import Layout
from zero_jax.offload.disk_leaves import expanded, in_arrays, resident
from zero_jax.state import FROM_PARAMS, ZeroState, state_key
from zero_jax.step.any_step import LeavesToRead
from zero_jax.step.call_checks import (
    check_is_state,
    check_same_batch,
    check_state,
    check_update,
    check_values,
    is_traced,
    loss_errors_explained,
)
from zero_jax.step.disk.records import chunks, resharded
from zero_jax.step.disk.states import DiskStates
from zero_jax.step.disk.update import InitialOptimizerState, UpdatePlan
from zero_jax.step.gradients import ForwardOutput
from zero_jax.step.replicas import Replicas
from zero_jax.step.start import with_values
from zero_jax.step.step import ZeroTrainStep
from zero_jax.step.update import Updated, given_values, judge, unscaled, update_function, update_metrics
from zero_jax.tree import map_named, merge, named_leaves, split_named
from zero_jax.typing import Batch, Gradients, Metrics, Params, PRNGKey, Pytree, Scalar, Variables

LOG = logging.getLogger("zero_jax")

_ONE_PROGRAM = ("with Offload(disk=...) a step reads and writes files between compiled programs, and cannot be part of "
                "one: {}, or give offload=\"optimizer\" (host memory).")


class DiskTrainStep(ZeroTrainStep):
    """A `ZeroTrainStep` with a part of its state in files.

    In a `ZeroState` an `OnDisk` is in the place of each leaf in files, and `disk` tells their generation. A state of
    another generation raises ValueError. After a kill, or an error while writing, `stored_state` is the state of the
    last step that returned. A process uses a folder until `close`, or its end. `note` is what each commit says beside.
    """

    _states: DiskStates | None = None
    _note: Any = None

    def __init__(self, *args: Any):
        """As `ZeroTrainStep`."""
        super().__init__(*args)
        self._first_programs: dict[Any, Any] = {}
        self._stochastic = self.functions.stochastic

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

    def __call__(self, state: ZeroState, batch: Batch) -> tuple[ZeroState, Metrics]:
        """As `ZeroTrainStep`; it returns when the new generation is on the disk. Not inside a `jit` or `scan`."""
        check_is_state(state)
        if is_traced(state, batch):
            raise UsageError(_ONE_PROGRAM.format("call it outside of jit and scan"))
        check_values(batch, self.loss, self.batches)
        return self._update_files(self._jit(batch), state, batch)

    def multi(self, state: ZeroState, batches: Batch) -> tuple[ZeroState, Metrics]:
        """Refused: several steps cannot be one program."""
        raise UsageError(_ONE_PROGRAM.format("call the step once for each batch in place of multi"))

    def check_replicas(self, state: ZeroState) -> Replicas:
        """Refused: what is in files is in the memory of no device."""
        raise UsageError("check_replicas with Offload(disk=...): what is in files cannot be compared on the devices: "
                         "the checksums of the files are verified at each read.")

    def apply_gradients(self, state: ZeroState, gradients: Gradients, *, loss: Scalar | None = None,
                        variables: Variables | None = None) -> tuple[ZeroState, Metrics]:
        """As `ZeroTrainStep`; it returns when the new generation is on the disk. Not inside a `jit` or `scan`."""
        check_is_state(state)
        if is_traced(state, gradients):
            raise UsageError(_ONE_PROGRAM.format("call apply_gradients outside of jit and scan"))
        check_update(gradients, loss, variables, layout := self.layout(), self.options.guard)
        program = self._first_program(
            ("apply", loss is None, variables is None), self._before_apply, layout.gradients, None,
            None if variables is None else layout.shardings.variables)
        return self._update_files(program, state, gradients, loss, variables)

    def from_train_state(self, rng: PRNGKey, batch: Batch, train_state: Any) -> ZeroState:
        """Refused: start from `params`, or restore a checkpoint of a step without files."""
        raise UsageError("from_train_state with Offload(disk=...): make the state with a step without disk, save it "
                         "with zero_jax.Checkpoints, and restore it with this one.")

    def to_train_state(self, state: ZeroState, train_state: Any) -> Any:
        """As `ZeroTrainStep`; the whole state is read into memory."""
        return super().to_train_state(self.in_memory(state)[0], train_state)

    # The first generation.

    def init(self, rng: PRNGKey, batch: Batch, *, params: Pytree | None = None) -> ZeroState:
        """As `ZeroTrainStep.init`, and the first generation is written.

        Raises ValueError where the folder has the state of a run, and CheckpointError where the disk is too small.
        """
        rng = state_key(rng)
        self._check_capacity(batch)
        self._prepared(batch)
        given = self._starting_values(params, batch)
        states = self._opened()
        if given is None:
            without = [field for field in FROM_PARAMS if field not in ("params", "frozen")]
            return self._begin(states, self._initial_state(rng, batch, without=[*without, "disk"]))
        return self._with_values(self._initial_state(rng, batch, without=[*FROM_PARAMS, "disk"]), given)

    def with_params(self, state: ZeroState, params: Pytree) -> ZeroState:
        """As `ZeroTrainStep`, and a generation of the new state is written."""
        check_is_state(state)
        self._current(state)
        return self._with_values(expanded(self.layout(), state), self._named(params))

    def _with_values(self, state: ZeroState, given: Mapping[str, Any]) -> ZeroState:
        def derive(state: ZeroState, params: Params, *, optimizer: Any, layout: Layout, **fields: Any) -> ZeroState:
            del optimizer, layout
            return self._begin(self._opened(), dataclasses.replace(state, params=params, **fields))

        return with_values(state, stored_values(self.functions.model, given, state.rng), layout=self.layout(),
                           optimizer=self.functions.optimizer, derive=derive)

    def _begin(self, states: DiskStates, state: ZeroState) -> ZeroState:
        """The state whose parameters, all in memory, are those of `state`: the rest follows, and is written."""
        layout = self.layout()
        make = InitialOptimizerState(layout, self.functions.optimizer, dict(named_leaves(state.params)).__getitem__)
        small = make([name for name in make.names if name not in layout.disk])
        others = {**dict(named_leaves(dataclasses.replace(state, opt_state=None, ema=None, weights=None, disk=None))),
                  **small, **self._weights(state.params)}

        def value_of(name: str) -> Any:
            return others[name] if name in others else make([name])[name]

        commit = states.write_all(value_of, int(state.step), self._note)
        for name in layout.disk:
            if name in others:
                others[name].delete()
        return self._kept(others, commit.token)

    # The whole state.

    def stored_state(self, batch: Batch) -> ZeroState:
        """The state after the last step that was committed, from the files alone; `batch` may be abstract.

        Every byte is verified. Raises CheckpointError where there is none, DamagedCheckpointError where it is not as
        it was written, and ValueError where the files are of another model or another run uses them.
        """
        if self._prepared(batch).is_open:
            self.close()
        states, layout = self._prepared(batch), self.layout(batch)
        commit = states.resume()
        self._note = commit.note
        begins = () if layout.state.weights is None else ("params/",)  # of which the copy in memory is made
        arrays = states.read_leaves([name for name in states.leaves if not name.startswith("weights/") and (
            name not in layout.disk or name.startswith(begins))])
        params = map_named(lambda name, _: arrays.get(f"params/{name}"), layout.state.params)
        return self._kept({**arrays, **self._weights(params)}, commit.token)

    def abstract_state(self, batch: Batch) -> ZeroState:
        """As `ZeroTrainStep`; with an `OnDisk` for each leaf in files."""
        layout = self.layout(batch)
        return resident(layout, layout.state)

    def in_memory(self, state: ZeroState) -> tuple[ZeroState, Layout]:
        """(`state` with the leaves that are in files read into arrays, the layout of that).

        It takes as much memory as the whole state; `in_files` does not.
        """
        states, layout = self._current(state), self.layout()
        arrays = {**dict(named_leaves(state)), **states.read_leaves(layout.disk)}
        memory = in_arrays(layout)
        return map_named(lambda name, _: arrays[name], memory.state), memory

    def in_files(self, state: ZeroState) -> DiskStates:
        """The files that have the rest of `state`, to be read leaf by leaf."""
        return self._current(state)

    def from_leaves(self, source: LeavesToRead) -> ZeroState:
        """The state that `source` reads, each leaf in files where it is written.

        What the files had before, of this model, is replaced by the next commits, of which this is the first.
        """
        was_open = self._states is not None and self._states.is_open
        states, layout = self._opened(replaces=True), self.layout()
        likes = dict(named_leaves(layout.state))
        here = [name for name in likes if name not in layout.disk and name != "disk"]

        def value_of(name: str) -> Any:
            return values[name] if name in values else source.leaves([name])[name]

        try:
            values = source.leaves([name for name in here if not name.startswith("weights/")])
            for names in chunks((name for name in here if name.startswith("weights/")), likes):
                params = {name: value_of(f"params/{name}") for name in (name.partition("/")[2] for name in names)}
                tree = split_named(layout.state.params, lambda name, _, params=params: name in params)[0]
                values |= self._weights(map_named(lambda name, _, params=params: params[name], tree))
            commit = states.write_all(value_of, int(values["step"]), self._note, source.check)
        except BaseException:
            if not was_open:
                self.close()
            raise
        return self._kept(values, commit.token)

    def close(self) -> None:
        """Gives the folder back, for another step or run; the state in it stays."""
        if self._states is not None:
            self._states.close()
            self._states = None

    def params(self, state: ZeroState) -> Params:
        """As `ZeroTrainStep`; what of the parameters is in files is read."""
        check_is_state(state)
        self._warn_of_variables(state)
        layout, arrays = self.layout(), dict(named_leaves(state))
        if names := [name for name in layout.disk if name.startswith("params/")]:
            arrays |= self._current(state).read_leaves(names)
        likes, shapes = ({"params": tree.params, "frozen": tree.frozen} for tree in (
            layout.state, layout.stored_shapes))
        loaded = jax.tree.map(layout.load_leaf, shapes, likes, map_named(lambda name, _: arrays.get(name), likes))
        return as_given(self.functions.model, merge(loaded["params"], loaded["frozen"]))

    def _readable(self, state: ZeroState, *, ema: bool) -> tuple[ZeroState, Any]:
        layout, known = self.layout(), dict(named_leaves(state))
        if names := [name for name in layout.disk if ema and name.startswith("ema/")]:
            known |= self._current(state).read_leaves(names)
        others = dataclasses.replace(layout, disk=layout.disk.difference(known))
        return (resident(others, map_named(lambda name, like: known.get(name, like), layout.state)),
                resident(others, layout.shardings))

    # How the files are opened.

    def _plan(self, layout: Layout, given: Any) -> UpdatePlan:
        assert self.options.offload is not None
        update = update_function(layout, self.functions.optimizer, stochastic=self._stochastic, ema=self.options.ema,
                                 streamed=True)
        return UpdatePlan(update, layout, given, self.options.offload.block_bytes(layout.axes.built_for))

    def _prepared(self, batch: Batch | None = None) -> DiskStates:
        """The files' layout, which may not exist yet."""
        layout = self.layout() if batch is None else self.layout(batch)
        if self._states is None:
            given = jax.eval_shape(lambda grads: given_values(
                ForwardOutput(jnp.zeros(()), {}, jnp.ones(()), None),
                unscaled(grads, grads, None, stochastic=self._stochastic),
                jax.random.key(0) if self._stochastic else None, None), layout.state.params)
            assert self.options.offload is not None
            self._states = DiskStates(layout, self._plan(layout, given), self.options.offload.disk)
        return self._states

    def _opened(self, *, replaces: bool = False) -> DiskStates:
        states = self._prepared()
        if message := states.create(replaces=replaces):
            LOG.warning(message)
        return states

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

    def _weights(self, params: Params) -> dict[str, Any]:
        """The copies that the model reads, by name, of all parameters or some."""
        layout = self.layout()
        if layout.state.weights is None:
            return {}
        there = {name for name, _ in named_leaves(params)}

        def some(tree: Any) -> Any:
            return split_named(tree, lambda name, _: name in there)[0]

        shards, likes = some(layout.gradients), some(layout.state.weights)
        copy = self.programs.get(("copy", frozenset(there)), lambda params: gather_copy(
            jax.tree.map(constrain, params, shards), shards, likes, some(layout.stored_shapes.params), layout),
            (some(layout.shardings.params),), some(layout.shardings.weights))
        return {f"weights/{name}": leaf for name, leaf in named_leaves(copy(some(params)))}

    def _kept(self, values: Mapping[str, Any], token: tuple[int, int]) -> ZeroState:
        """The state of `values`, those of its leaves that are in memory, and of files of that generation."""
        layout, leaves = self.layout(), {**values, "disk": self._token(token)}
        return map_named(lambda name, _: leaves[name], resident(layout, layout.state))

    def _token(self, token: tuple[int, int]) -> jax.Array:
        return jax.device_put(np.array(token, np.uint32), self.functions.replicated)

    # Forward and backward, and what no file is needed for.

    def _jit(self, batch: Batch) -> Any:
        self.batches.check(batch, self.accumulation.microbatches)
        self.layout(batch)
        return self._first_program("step", self._before_update, self.functions.batch_shardings(batch))

    def _first_program(self, key: Any, function: Callable[..., Any], *in_shardings: Any) -> Any:
        """(`function(plans, state, ...)` jitted, `plans`: the plan of its update, once it was traced)."""
        if key not in self._first_programs:
            layout, plans = self.layout(), list[UpdatePlan]()
            self._first_programs[key] = jax.jit(
                functools.partial(function, plans), in_shardings=(resident(layout, layout.shardings), *in_shardings),
                compiler_options=self.programs.compiler_options or None), plans
        return self._first_programs[key]

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The program of forward and backward, lowered; the update's programs are made block by block."""
        with loss_errors_explained(self.loss, batch, self.functions.model):
            return self._jit(batch)[0].lower(self.abstract_state(batch), self.abstract_batch(batch))

    def _before_update(self, plans: list[UpdatePlan], state: ZeroState, batch: Batch) -> Any:
        """What `_before` returns; traceable."""
        layout = self.layout(batch)
        check_state(state, layout)
        check_same_batch(batch, self.functions.first_batch)
        state, key = expanded(layout, state), self.functions.key(state)
        weights = state.params if state.weights is None else state.weights
        output, grads = self.functions.forward_backward(state, weights, key, batch, self.loss)
        # The blocks of the update make them wider: in float32 they would be stored so until then.
        grads, scale = self.functions.as_reduced(state, grads)
        result = self._before(plans, state, output, grads, key, scale)
        self.functions.first_batch = self.functions.first_batch or self.abstract_batch(batch)
        return result

    def _before_apply(self, plans: list[UpdatePlan], state: ZeroState, grads: Gradients, loss: Scalar | None,
                      variables: Variables | None) -> Any:
        state = expanded(self.layout(), state)
        given = self.functions.given_gradients(state, grads, loss, variables)
        return self._before(plans, state, *given, self.functions.key(state))

    def _before(self, plans: list[UpdatePlan], state: ZeroState, output: ForwardOutput, grads: Gradients, key: PRNGKey,
                scale: Scalar | None = None) -> Any:
        """(What the guard says, what is computed before the blocks, the metrics); traceable."""
        if output.written:
            raise UsageError(f"The model overwrites its parameters {', '.join(output.written)} in its forward pass, "
                             "whose master copy is in files: keep them in memory, without Offload(disk=...).")
        grads_now = unscaled(grads, state.params, scale, stochastic=self._stochastic)
        judged = judge(state, output, grads_now, self.functions.guard)
        given = given_values(output, grads, key if self._stochastic else None, scale)
        plan = self._plan(self.layout(), jax.eval_shape(lambda: given))
        plans[:] = [plan]
        old = Updated(state.params, state.opt_state, state.ema,
                      state.weights if self.layout().stage.shards_params else None)
        before = plan.before(old, given)
        metrics = update_metrics(judged, output, plan.tree(before.results)[0].opt_state)
        return judged._replace(metrics={}), before, metrics

    # The update of the files.

    def _update_files(self, compiled: Any, state: ZeroState, *args: Any) -> tuple[ZeroState, Metrics]:
        """The state after the step whose first program is `compiled`, and its metrics."""
        self._monitor.raise_if_stopped(waiting=1)
        states = self._current(state)
        program, plans = compiled
        judged, before, metrics = program(state, *args)
        (plan,) = plans
        if [group.places for group in states.plan.groups] != [group.places for group in plan.groups]:
            raise UsageError("This update reads other blocks than the files have: give loss= to apply_gradients.")
        if self.functions.guard.active:
            self._monitor.record(metrics)
        if judged.is_good is not None and not bool(np.asarray(judged.is_good)):
            return dataclasses.replace(state, step=judged.step, variables=judged.variables, guard=judged.guard), metrics
        jax.block_until_ready(judged.grad_norm)  # which no process has before all have committed the last generation
        new = self._fields(plan, state, states.update(plan, state, before))
        state = dataclasses.replace(
            state, step=judged.step, variables=judged.variables, guard=judged.guard, **new)
        with states.streaming.abandoned_by_errors():
            commit = states.finish(dict(named_leaves(state)).__getitem__, int(judged.step), self.note)
        return dataclasses.replace(state, disk=self._token(commit.token)), metrics

    def _fields(self, plan: UpdatePlan, state: ZeroState, results: Mapping[int, Any]) -> dict[str, Any]:
        layout = self.layout()
        new, cast = plan.tree(results)
        if cast is not None:
            gather = self.programs.get("weights", lambda cast, old: gather_compute_params(cast, layout, old), (
                layout.gradients, layout.shardings.weights), layout.shardings.weights, donate_argnums=1)
            weights = gather(cast, state.weights)
        else:
            weights = new.weights
        params = jax.tree.map(resharded, new.params, resident(layout, layout.shardings).params)
        return {"params": params, "weights": weights, "opt_state": new.opt_state, "ema": new.ema}
