"""The step whose optimizer states, average and master weights are in files (`Offload(disk=...)`, ZeRO-Infinity).

Forward and backward are one compiled program, which returns sharded gradients. Then the update walks over the files:
the next block is read while this one is computed and the last one is written. A commit at its end makes the new
generation valid at once, and the state that the step returns names it: no other is taken.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint as constrain

from zero_jax.errors import UsageError
from zero_jax.sharding.compute_params import gather_compute_params
from zero_jax.sharding.memory.disk_leaves import expanded, resident, with_layers
from zero_jax.state import ZeroState
from zero_jax.step.call_checks import (
    check_is_state,
    check_same_batch,
    check_state,
    check_values,
    is_traced,
    loss_errors_explained,
)
from zero_jax.step.compiled import CompiledStep
from zero_jax.step.disk.begin import StepThatBegins
from zero_jax.step.disk.leaf import resharded
from zero_jax.step.disk.plan import UpdatePlan, without
from zero_jax.step.disk.walk import walk
from zero_jax.step.gradients import ForwardOutput
from zero_jax.step.loop_checks import check_update
from zero_jax.step.pieces.compiled import compiled_pieces
from zero_jax.step.pieces.program import PiecewiseProgram
from zero_jax.step.replicas import Replicas
from zero_jax.step.update import Updated, given_values, judge, unscaled, update_metrics
from zero_jax.tree import named_leaves
from zero_jax.typing import Batch, Gradients, Metrics, PRNGKey, Scalar, Variables

_ONE_PROGRAM = ("with Offload(disk=...) a step reads and writes files between compiled programs, and cannot be part of "
                "one: {}, or give offload=\"optimizer\" (host memory).")


class DiskTrainStep(StepThatBegins):
    """A `ZeroTrainStep` with a part of its state in files.

    In a `ZeroState` an `OnDisk` is in the place of each leaf in files, and `disk` tells their generation. A state of
    another generation raises ValueError. After a kill, or an error while writing, `stored_state` is the state of the
    last step that returned. A process uses a folder until `close`, or its end. `note` is what each commit says beside.
    """

    def __call__(self, state: ZeroState, batch: Batch) -> tuple[ZeroState, Metrics]:
        """As `ZeroTrainStep`; it returns when the new generation is on the disk. Not inside a `jit` or `scan`."""
        check_is_state(state)
        if is_traced(state, batch):
            raise UsageError(_ONE_PROGRAM.format("call it outside of jit and scan"))
        check_values(batch, self._loss, self.batches)
        return self._walk(self._jit(batch), state, batch)

    def gradients(self, state: ZeroState, batch: Batch, **options: Any) -> tuple[Gradients, Metrics, Variables]:
        """As `ZeroTrainStep`; refused where activations or parameters are in files."""
        self._check_one_program("gradients", "one program, which cannot read files, makes them: call the step itself")
        return super().gradients(state, batch, **options)

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
        if self.options.in_layers:
            raise UsageError("apply_gradients with Offload(parameters=\"disk\"): its gradients are in files: call the "
                             "step itself, or leave parameters out.")
        check_update(gradients, loss, variables, layout := self.layout(), self.options.guard)
        key = ("apply", loss is None, variables is None)
        if key not in self._programs:
            plans: list[UpdatePlan] = []
            shardings = resident(layout, layout.shardings)
            self._programs[key] = jax.jit(
                functools.partial(self._before_apply, plans), in_shardings=(
                    shardings, layout.gradients, None, None if variables is None else shardings.variables),
                compiler_options=self._compiler_options or None), plans
        return self._walk(self._programs[key], state, gradients, loss, variables)

    def from_train_state(self, rng: PRNGKey, batch: Batch, train_state: Any) -> ZeroState:
        """Refused: start from `params`, or restore a checkpoint of a step without files."""
        raise UsageError("from_train_state with Offload(disk=...): make the state with a step without disk, save it "
                         "with zero_jax.Checkpoints, and restore it with this one.")

    def to_train_state(self, state: ZeroState, train_state: Any) -> Any:
        """As `ZeroTrainStep`; the whole state is read into memory."""
        return super().to_train_state(self.in_memory(state)[0], train_state)

    # Forward and backward, and what no file is needed for.

    def _jit(self, batch: Batch) -> Any:
        self.batches.check(batch, self.accumulation.microbatches)
        layout = self.layout(batch)
        if self._jitted is None:
            plans: list[UpdatePlan] = []
            before, of_batch = functools.partial(self._before_update, plans), self._batch_shardings(batch)
            if self.options.in_pieces:
                program: Any = PiecewiseProgram(
                    before, self._prepared(batch).generations.path, self._is_saved, self.mesh, of_batch,
                    self._compiler_options, functools.partial(with_layers, layout), layout.disk_layers,
                    layout.disk_gradients)
            else:
                program = jax.jit(lambda state, batch: before(state, batch)[0], in_shardings=(
                    resident(layout, layout.shardings), of_batch), compiler_options=self._compiler_options or None)
            self._jitted = program, plans
        return self._jitted

    def _is_saved(self, batch: Batch) -> Callable[[Any], bool]:
        """Whether an array that a round of forward leaves for backward goes to a file."""
        if self.options.partition_activations != "disk":
            return lambda aval: False
        return self.options.activations(self.axes, self.batches.size(batch)).is_activation

    def _check_one_program(self, what: str, why: str) -> None:
        for is_given, name, otherwise in (
                (self.options.partition_activations == "disk", "partition_activations=\"disk\"",
                 "give \"cpu\" (host memory)"),
                (self.options.in_layers, "Offload(parameters=\"disk\")", "leave parameters out")):
            if is_given:
                raise UsageError(f"{what} with {name}: {why}, or {otherwise}.")

    def compiled_step(self, batch: Batch) -> CompiledStep:
        """As `ZeroTrainStep`; where activations or parameters are in files, of all programs together."""
        if not self.options.in_pieces:
            return super().compiled_step(batch)
        with loss_errors_explained(self._loss, batch):
            pieces = self._jit(batch)[0].compiled(self.abstract_state(batch), self.abstract_batch(batch))
        return compiled_pieces(pieces, self.layout(batch), self.contract(batch))

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The program of forward and backward, lowered; the update's programs are made block by block.

        Refused where activations or parameters are in files: there are several.
        """
        self._check_one_program("lower", "forward and backward are several programs: see compiled_step(batch)")
        with loss_errors_explained(self._loss, batch):
            return self._jit(batch)[0].lower(self.abstract_state(batch), self.abstract_batch(batch))

    def _before_update(self, plans: list[UpdatePlan], state: ZeroState, batch: Batch) -> Any:
        """(What `_before` returns, the gradients that go to files, by the name of the parameter); traceable."""
        layout = self.layout(batch)
        check_state(state, layout)
        check_same_batch(batch, self._first_batch)
        state, key = expanded(layout, state), self._key(state)
        weights = state.params if state.weights is None else state.weights
        output, grads = self._forward_backward(state, weights, key, batch, self._loss)
        # The blocks of the update make them wider: in float32 they would be stored so until then.
        grads, scale = self._as_reduced(state, grads)
        result = self._before(plans, state, output, grads, key, scale)
        self._first_batch = self._first_batch or self.abstract_batch(batch)
        return result, {name: grad for name, grad in named_leaves(grads) if name in layout.disk_gradients}

    def _before_apply(self, plans: list[UpdatePlan], state: ZeroState, grads: Gradients, loss: Scalar | None,
                      variables: Variables | None) -> Any:
        state = expanded(self.layout(), state)
        output = ForwardOutput(loss, {}, jnp.ones(()), state.variables if variables is None else variables)
        grads = jax.tree.map(lambda grad, param: grad.astype(
            jnp.promote_types(param.dtype, jnp.float32) if self._stochastic else param.dtype), grads, state.params)
        return self._before(plans, state, output, jax.tree.map(constrain, grads, self.layout().gradients),
                            self._key(state))

    def _before(self, plans: list[UpdatePlan], state: ZeroState, output: ForwardOutput, grads: Gradients, key: PRNGKey,
                scale: Scalar | None = None) -> Any:
        """(What the guard says, what is computed before the pieces, the metrics); traceable."""
        if output.written:
            raise UsageError(f"The model overwrites its parameters {', '.join(output.written)} in its forward pass, "
                             "whose master copy is in files: keep them in memory, without Offload(disk=...).")
        layout = self.layout()
        judged = judge(state, output, unscaled(grads, state.params, scale, stochastic=self._stochastic), self._guard)
        files = {name: grad for name, grad in named_leaves(grads) if name in layout.disk_gradients}
        given = given_values(output, without(grads, files), key if self._stochastic else None, None, scale)
        plan = self._plan(layout, jax.eval_shape(lambda: given))
        plans[:] = [plan]
        old = Updated(state.params, state.opt_state, state.ema,
                      state.weights if layout.stage.shards_params else None)
        before = plan.before(old, given, files)
        metrics = update_metrics(judged, output, plan.tree(before.results)[0].opt_state)
        return judged._replace(metrics={}), before, metrics

    # The walk over the files.

    def _walk(self, compiled: Any, state: ZeroState, *args: Any) -> tuple[ZeroState, Metrics]:
        """The state after the step whose first program is `compiled`, and its metrics."""
        self._monitor.raise_if_stopped(waiting=1)
        states = self._current(state)
        program, plans = compiled
        layers = self._layer_files(states)
        judged, before, metrics = program(state, *args, *[layers] if isinstance(program, PiecewiseProgram) else [])
        (plan,) = plans
        if [piece.group.blocks for piece in states.pieces] != [group.blocks for group in plan.groups
                                                               for _ in group.pieces()]:
            raise UsageError("This update reads other blocks than the files have: give loss= to apply_gradients.")
        if self._guard.active:
            self._monitor.record(metrics)
        if judged.is_good is not None and not bool(np.asarray(judged.is_good)):
            return dataclasses.replace(state, step=judged.step, variables=judged.variables, guard=judged.guard), metrics
        jax.block_until_ready(judged.grad_norm)  # which no process has before all have committed the last generation
        new = self._fields(plan, state, walk(states, plan, state, before, layers.gradients))
        state = dataclasses.replace(
            state, step=judged.step, variables=judged.variables, guard=judged.guard, **new)
        with states.streaming.abandoned_by_errors():
            commit = states.finish(state, int(judged.step), self.note)
        return dataclasses.replace(state, disk=self._token(commit.token)), metrics

    def _fields(self, plan: UpdatePlan, state: ZeroState, results: Mapping[int, Any]) -> dict[str, Any]:
        layout = self.layout()
        new, cast = plan.tree(results)
        if cast is not None:
            gather = self._jit_once("weights", lambda cast, old: gather_compute_params(cast, layout, old), (
                layout.gradients, layout.shardings.weights), layout.shardings.weights, donate_argnums=1)
            weights = gather(cast, state.weights)
        else:
            weights = new.weights
        params = jax.tree.map(
            lambda leaf, sharding: leaf if leaf.sharding.is_equivalent_to(sharding, leaf.ndim) else (
                resharded(leaf, sharding)),
            new.params, resident(layout, layout.shardings).params)
        return {"params": params, "weights": weights, "opt_state": new.opt_state, "ema": new.ema}
