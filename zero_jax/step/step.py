"""The compiled ZeRO step: gather at use, backward with reduce-scatter, sharded update, re-gather."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.contract.verify import Contract, Report, contract_of
from zero_jax.distributed.agreement import check_same, devices_on_host, spans_processes
from zero_jax.distributed.initialize import on_host, zeros_of
from zero_jax.errors import UsageError, few
from zero_jax.frontends.lora import Lora
from zero_jax.frontends.model_functions import as_given, check_has_values, is_nnx, named, stored_values
from zero_jax.jaxpr.equations import trace
from zero_jax.layout.batch_layout import BatchLayout, hashable
from zero_jax.layout.layout import Layout
from zero_jax.offload.disk_leaves import expanded, resident
from zero_jax.offload.offload import check_capacity
from zero_jax.sharding.auto_axes import in_any_context, on_auto_axes
from zero_jax.sharding.batch import Accumulation, split_steps
from zero_jax.sharding.host_arrays import in_groups
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.stages import Stage
from zero_jax.state import FROM_PARAMS, ZeroState, state_key, typed_key
from zero_jax.step.any_step import AnyStep
from zero_jax.step.call_checks import (
    check_is_state,
    check_loss,
    check_state,
    check_stored,
    check_update,
    check_values,
    is_traced,
    loss_errors_explained,
    state_explained,
)
from zero_jax.step.compiled import CompiledStep
from zero_jax.step.functions import StepFunctions, schedule_free_states
from zero_jax.step.guard import BadStepMonitor
from zero_jax.step.losses import takes_key
from zero_jax.step.options import StepOptions
from zero_jax.step.overlap import with_overlap
from zero_jax.step.programs import Programs
from zero_jax.step.replicas import Replicas, compare, copies_digests, replicas_of
from zero_jax.step.start import (
    as_train_state,
    check_train_state,
    names_without_streams,
    with_optimizer_state,
    with_values,
)
from zero_jax.tree import merge
from zero_jax.typing import Batch, Gradients, Loss, Metrics, Params, PRNGKey, Pytree, Scalar, Variables

LOG = logging.getLogger("zero_jax")


class ZeroTrainStep(AnyStep):
    """A train step: `init`, then `state, metrics = step(state, batch)` for as long as the user likes.

    A batch is a pytree of arrays (numpy or jax) whose leading dim is the global batch, sharded over the mesh's
    data axes. Shapes are learned from the first batch; batches of other sizes compile once each, and other keys or
    dtypes raise ValueError. Inside the user's own `jit` or `scan` a step is part of that program: nothing is donated,
    and no error of the guard is raised (`check(state)` does so afterwards).

    Attributes:
        functions: what it compiles: the step, gradients, evaluation, as functions that JAX traces.
        programs: what it has compiled.
    """

    def __init__(self, functions: StepFunctions, given_params: Mapping[str, Any] | None = None):
        """given_params: the values to start from, by name; None: those that the model makes."""
        self.functions, self.programs, self._given_params = functions, Programs(functions), given_params
        self._monitor = BadStepMonitor()
        self._jitted: Any = None
        self._warned = False

    def __repr__(self) -> str:
        layout = self.functions.known_layout
        known = "" if layout is None else (
            f", num_params={layout.num_params:,}, state_bytes_per_device={layout.device_bytes:,}")
        return f"ZeroTrainStep(stage={self.stage.number}, mesh={self.axes.sizes}{known})"

    @property
    def axes(self) -> MeshAxes:
        """The mesh and the roles of its axes."""
        return self.functions.axes

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.axes.mesh

    @property
    def options(self) -> StepOptions:
        """What `make_zero_train_step` was asked for."""
        return self.functions.options

    @property
    def stage(self) -> Stage:
        """The row of the stage table."""
        return self.options.stage

    @property
    def accumulation(self) -> Accumulation:
        """The microbatches of a step."""
        return self.options.accumulation

    @property
    def batches(self) -> BatchLayout:
        """How a batch is split over the mesh."""
        return self.functions.batches

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a leaf of the batch."""
        return self.axes.batch_sharding

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """As the step calls it."""
        return self.functions.optimizer

    @property
    def loss(self) -> Loss:
        """As the step calls it."""
        return self.functions.loss

    @property
    def lora(self) -> Lora | None:
        """The model with its adapters, which are known once there is a layout; None where it has none."""
        return self.functions.model if isinstance(self.functions.model, Lora) else None

    def layout(self, batch: Batch = None) -> Layout:
        """How every leaf of the state is stored, whatever the size of `batch`; it may be left out once known."""
        return self.functions.layout(batch)

    def batch_target(self, *, steps: bool) -> Callable[[str, Any], NamedSharding]:
        """Where a leaf of a batch belongs; steps: of several batches, (steps, global batch, ...)."""
        return functools.partial(self.batches.target, steps=steps)

    def of_slices(self) -> Self:
        """This step as each slice along the axis `replica` takes it by itself, to be mapped over the slices.

        `jax.vmap` with that axis as `spmd_axis_name` maps a call over states and batches with a leading dim.
        """
        return type(self)(self.functions.of_slices(), self._given_params)

    def without_overlap(self) -> Self:
        """The same step without `overlap` and `prefetch`, to compare.

        A step of its own: what is lowered with compiler options keeps them, whatever it is compiled with.
        """
        other = self.functions.changed(communication=dataclasses.replace(
            self.options.communication, overlap=False, prefetch=False))
        if layout := self.functions.known_layout:
            other.known_layout = with_overlap(layout, other.options)
        return type(self)(other, self._given_params)

    # The state.

    def init(self, rng: PRNGKey, batch: Batch, *, params: Pytree | None = None) -> ZeroState:
        """The initial state, each leaf initialised in its shards; `batch` may be abstract.

        rng: a JAX PRNG key. params: what to start from, as `with_params` takes it; default: the model's own values
        where it has some (an NNX module, a bound Linen module, a Flax model object with `params`). Variables, such as
        batch statistics, that `params` lacks are the model's initial ones, which a warning names. Raises ValueError
        for a batch that does not fit the mesh, and for parameters that do not fit the model.
        """
        rng = state_key(rng)
        self._check_capacity(batch)
        self._check_same(rng, batch)
        given = self._starting_values(params, batch)
        check_values(batch, self.loss, self.batches)
        if given is None:
            return self._initial_state(rng, batch)
        return self._with_values(self._initial_state(rng, batch, without=FROM_PARAMS), given)

    def with_params(self, state: ZeroState, params: Pytree) -> ZeroState:
        """`state` from other parameters, whose optimizer state, average and copy for the model are made anew.

        Each leaf is copied into its shards, one after another, so that no device holds more than one of them whole;
        floating dtypes are converted. `state` is deleted, `params` is not.

        params: in true shapes, for every parameter: a tree of arrays, or of Linen's collections (then `batch_stats` and
        so on are taken, too), a bound Linen module, an NNX module or state, or an object with `params` (a `TrainState`,
        whose other fields are looked at for variables). A warning names variables that it lacks: they stay.
        Raises ValueError, with `state` alive, for names, shapes and kinds of dtype that are not the model's.
        """
        check_is_state(state)
        check_state(state, self.layout())
        return self._with_values(state, self._named(params))

    def from_train_state(self, rng: PRNGKey, batch: Batch, train_state: Any) -> ZeroState:
        """The state that goes on where a Flax `TrainState` is: its step, parameters and optimizer state, copied.

        Variables in its other fields (`batch_stats`, an `nnx.State`) are taken, too. Its `tx` must be the
        optimizer of this step, whose state has the same leaves. rng: of what is drawn from here on.
        """
        check_train_state(train_state)
        state = self.init(rng, batch, params=train_state)
        return with_optimizer_state(state, train_state.opt_state, train_state.step, self.layout())

    def to_train_state(self, state: ZeroState, train_state: Any) -> Any:
        """`train_state`, a Flax `TrainState` of this model, with copies of the values of `state` in true shapes."""
        check_is_state(state)
        check_train_state(train_state)
        return as_train_state(state, train_state, self.layout())

    def __call__(self, state: ZeroState, batch: Batch) -> tuple[ZeroState, Metrics]:
        """One step: (new state, metrics). `state` is donated; nothing waits for the devices.

        The step's own metrics are scalars in float32, or float64 where they are: `loss`, `grad_norm` (of the whole
        reduced gradient, before any clipping), `learning_rate` where the optimizer's state tells it
        (`optax.inject_hyperparams`; `learning_rate_1` and so on where it tells several). With a guard or a loss scale:
        `bad` steps in a row, steps `skipped` in all, whether it `stopped`, and the `loss_scale` of this step. Those of
        the user's loss keep their shape and dtype (see `zero_jax.Metric`).

        Raises BadStepError once more steps in a row were bad than the guard skips, at most two calls late; `state` is
        then the one before them, and `forgive` gives one to go on from. Raises ValueError for a state that was donated
        before, or is of another step, and for a batch that does not fit.
        """
        check_is_state(state)
        if is_traced(state, batch):
            self.batches.check(batch, self.accumulation.microbatches)
            self.layout(batch)
            return self.functions.constrained_step(state, batch)
        check_values(batch, self.loss, self.batches)
        return self._run(self._jitted or self._jit(batch), state, batch)

    def multi(self, state: ZeroState, batches: Batch) -> tuple[ZeroState, Metrics]:
        """Several steps in one compiled program: (new state, metrics, each with a leading dim of the steps).

        batches: a pytree of arrays of shape (steps, global batch, ...). `state` is donated. Another number of steps
        compiles once more. The guard works in every step; BadStepError is raised as by single steps.
        """
        check_is_state(state)
        check_values(batches, self.loss, self.batches, steps=True)
        first = split_steps(batches)
        self.batches.check(first, self.accumulation.microbatches)
        layout = self.layout(first)
        shardings = jax.tree.map(lambda each: NamedSharding(self.mesh, P(None, *each.spec)),
                                 self.batches.shardings(first))
        return self._run(self.programs.get(
            ("multi", hashable(shardings)), self.functions.steps, (layout.shardings, shardings),
            (layout.shardings, self.functions.replicated), donate_argnums=0), state, batches)

    def gradients(self, state: ZeroState, batch: Batch, *, params: Params | None = None, loss: Loss | None = None
                  ) -> tuple[Gradients, Metrics, Variables]:
        """(Gradients, metrics, the model's new variables) for a loop of one's own; `state` is not donated.

        Gradients are reduced, without loss scale, stored and sharded as `step.layout().gradients`: elementwise
        arithmetic with `state.params` needs no care. Microbatches are those of the step.

        params: in place of `state.params` and stored like them, such as parameters that SAM moved. loss: in place of
        the step's, such as the generator's; the same function each time, or it compiles anew.
        """
        check_is_state(state)
        fun = self.loss if loss is None else loss
        check_loss(fun)
        params, layout = on_auto_axes(params, self.mesh), self.layout(batch)
        self.batches.check(batch, self.accumulation.microbatches)
        if params is not None:
            check_stored("params", params, layout.state.params, "a tree as state.params is")

        def run(state: ZeroState, batch: Batch, params: Params | None) -> Any:
            return self.functions.gradients(expanded(layout, state), batch, params, fun)

        if is_traced(state, batch):
            return run(state, batch, params)
        check_values(batch, fun, self.batches)
        of_batch = self.functions.batch_shardings(batch)
        compiled = self.programs.get(
            ("gradients", fun, params is None, hashable(of_batch)), run,
            (resident(layout, layout.shardings), of_batch, None),
            (layout.gradients, self.functions.replicated, layout.shardings.variables))
        with state_explained(state, layout):
            return compiled(state, batch, params)

    def apply_gradients(self, state: ZeroState, gradients: Gradients, *, loss: Scalar | None = None,
                        variables: Variables | None = None) -> tuple[ZeroState, Metrics]:
        """(The state after the optimizer's update, metrics), from gradients as `gradients` returns them.

        `state` is donated. loss: for optimizers and guards that look at it. variables: as `gradients` returned them;
        default: unchanged.
        """
        check_is_state(state)
        check_update(gradients, loss, variables, self.layout(), self.options.guard)
        shardings = self.layout().shardings
        if is_traced(state, gradients):
            return self.functions.apply_gradients(state, gradients, loss, variables)
        return self._run(self.programs.get(
            ("apply", loss is None, variables is None), self.functions.apply_gradients,
            (shardings, self.layout().gradients, None, None if variables is None else shardings.variables),
            (shardings, self.functions.replicated), donate_argnums=0), state, gradients, loss, variables)

    def check(self, state: ZeroState | None = None) -> None:
        """Waits for all steps so far, and raises BadStepError if the guard stopped: call it after the last step.

        state: looked at as well, for steps that ran inside a program of the user's.
        """
        self._monitor.raise_if_stopped(waiting=0)
        if state is not None:
            check_is_state(state)
        if state is not None and state.guard is not None:
            self._monitor.record({"stopped": self.functions.guard.stopped(state.guard)})
            self._monitor.raise_if_stopped(waiting=0)

    def check_replicas(self, state: ZeroState) -> Replicas:
        """Compares what several devices store copies of, bit for bit; waits for the devices, and `state` stays.

        At stages 0 to 2 that is all that the model reads; at stage 3, without an axis `replica`, only leaves too small
        to shard: the result says how much. In a run of several processes all of them call this.

        Raises ReplicaError with each device whose bits differ from most copies; of two copies, with both. Raises
        ValueError where no device has a copy of anything.
        """
        check_is_state(state)
        check_state(state, layout := self.layout())
        replicas = replicas_of(layout)
        if not replicas.leaves:
            raise UsageError(f"check_replicas: no two devices of the mesh {self.axes.sizes} store the same.")
        digests = self.programs.get(("replicas",), lambda state: copies_digests(state, layout), (layout.shardings,),
                                 self.functions.replicated)
        compare(on_host(digests(state)), layout)
        return replicas

    def forgive(self, state: ZeroState) -> ZeroState:
        """`state` with no bad steps behind it: what stopped goes on."""
        check_is_state(state)
        guard = state.guard and dataclasses.replace(state.guard, bad=jnp.zeros_like(state.guard.bad))
        return dataclasses.replace(state, guard=guard) if guard else state

    def params(self, state: ZeroState) -> Params:
        """The parameters of `state` in their true shapes, in as many parts as those allow.

        Batch statistics and other variables are in `state.variables`: a trained NNX module comes back by
        `nnx.update(module, step.params(state), state.variables)`.
        """
        check_is_state(state)
        self._warn_of_variables(state)
        with state_explained(state, self.layout()):
            state = self.layout().load(state)
        return as_given(self.functions.model, merge(state.params, state.frozen))

    def evaluator(self, fun: Loss | None = None, *, ema: bool = False) -> Callable[..., Any]:
        """`fun(model, batch)` (default: the loss) compiled as a function of (state, batch, rng=None).

        It returns what `fun` does, of any shapes and dtypes, and changes nothing. Parameters are gathered where they
        are used, as in training; `ema`: their moving average is. NNX modules are switched to `eval()`.

        rng: a key for the streams that Linen modules draw from (they get none without) and for those of NNX modules.
        A batch that does not divide over the devices (the last one) is computed whole on each of them.
        """
        if ema and self.options.ema is None:
            raise UsageError("evaluator(ema=True): this step keeps no average; make it with ema=0.999, say.")
        if fun is not None:
            check_loss(fun)
        compiled: dict[Any, Any] = {}

        def run(state: ZeroState, batch: Batch, rng: PRNGKey | None) -> Any:
            return self.functions.evaluate(fun or self.loss, expanded(self.layout(), state), batch, rng, ema=ema)

        def call(state: ZeroState, batch: Batch, rng: PRNGKey | None = None) -> Any:
            check_is_state(state)
            if rng is None and takes_key(fun or self.loss):
                raise UsageError("This function takes rng: give the evaluator a key, evaluate(state, batch, key).")
            whole = self.batches.is_ragged(batch)
            check_values(batch, fun or self.loss, self.batches, whole=whole)
            read, shardings = self._readable(state, ema=ema)
            of_batch = self.functions.replicated if whole else self.functions.batch_shardings(batch)
            if (kind := (whole, jax.tree.structure(batch), hashable(of_batch))) not in compiled:
                layout = self.layout(self.batches.rounded_up(batch) if whole else batch)
                compiled[kind] = jax.jit(run, in_shardings=(shardings or layout.shardings, of_batch, None))
            with state_explained(state, self.layout()):
                return compiled[kind](read, batch, None if rng is None else typed_key(rng))

        return in_any_context(call, at=self)

    def evaluation_state(self, state: ZeroState) -> ZeroState:
        """`state` with the parameters that an `optax.contrib.schedule_free` optimizer is evaluated with: its average.

        With any other optimizer `state` as it is. The average is one more copy of the parameters, sharded as they are;
        training goes on from `state`.
        """
        check_is_state(state)
        if not schedule_free_states(state.opt_state):
            return state
        shardings = self.layout().shardings
        params, weights = self.programs.get("average", self.functions.averaged, None, (
            shardings.params, shardings.weights))(state.params, state.opt_state)
        return dataclasses.replace(state, params=params, weights=weights)

    # Before it runs: lowered, compiled, and checked against its contract, on live devices or target topologies.

    def abstract_batch(self, batch: Batch) -> Any:
        """`batch` as `jax.ShapeDtypeStruct`s with shardings."""
        return self.batches.abstract(batch)

    def abstract_state(self, batch: Batch) -> ZeroState:
        """The state as `jax.ShapeDtypeStruct`s with shardings, for restoring and for compiling."""
        return self.layout(batch).state

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The step lowered for `batch` (arrays or `jax.ShapeDtypeStruct`s); its mesh may be of a target topology."""
        with loss_errors_explained(self.loss, batch, self.functions.model):
            return self.programs.with_memory_kinds(
                self._jit(batch).lower(self.abstract_state(batch), self.abstract_batch(batch)))

    def lower_init(self, batch: Batch) -> jax.stages.Lowered:
        """`init` lowered for `batch`, to see what it needs."""
        make, like, shardings = self._initializer(batch)
        lowered = jax.jit(make, in_shardings=shardings, out_shardings=_shardings_of(like)).lower(
            *jax.eval_shape(lambda: (jax.random.key(0), self.functions.model.given)), self.abstract_batch(batch))
        return self.programs.with_memory_kinds(lowered, of_arguments=False)

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """`lower`, compiled for the mesh's devices, live or of a target topology; calls of the step do not use it."""
        return self.programs.compile(lambda: self.lower(batch))

    def compiled_step(self, batch: Batch) -> CompiledStep:
        """`compile`, as data: text, memory, layout and contract, for `verify`, the plan and the memory report."""
        compiled = self.compile(batch)
        return CompiledStep(compiled.as_text() or "", compiled.memory_analysis(), self.layout(batch),
                            self.contract(batch))

    def contract(self, batch: Batch) -> Contract:
        """What a step may send: kinds of collectives, mesh axes, bytes per device."""
        activation_bytes, layout = 0.0, self.layout(batch)
        if self.axes.tensor_enabled or self.axes.context_enabled:
            size = self.batches.size(batch) // self.accumulation.microbatches
            traced = self.trace_forward(self.batches.resized(batch, size))
            activation_bytes = self.options.activations(self.axes, size).communication_bytes(traced.jaxpr)
        return contract_of(layout, self.accumulation, self.functions.optimizer, activation_bytes,
                           host_activations=self.options.partition_activations == "cpu")

    def trace_forward(self, batch: Batch) -> Any:
        """The jaxpr of the loss in evaluation, of the whole state and batch."""
        key = jax.eval_shape(lambda: jax.random.key(0))  # Linen modules draw in evaluation, too, unless told not to
        state = expanded(self.layout(batch), self.abstract_state(batch))
        functions = self.functions

        def forward(state: ZeroState, batch: Batch, key: PRNGKey) -> Any:
            return functions.forward(self.loss, batch, key)(*functions.forward_inputs(state, key), batch)

        return trace(forward, state, self.abstract_batch(batch), key)

    def verify(self, batch: Batch) -> Report:
        """Compiles the step and checks it against its contract: what is sent for what, beside what was promised.

        Where a chip file is of the devices, also the predicted ms that it takes alone, and exposed.
        Raises ContractError (a ValueError) if it sends more, or does not do what its stage is for (leaves stay whole,
        gradients are summed whole or in fewer bits than declared, gathers stand in loops over time, nothing is sent for
        a parameter, the whole model is in memory), if scatters or gathers leave other rows on devices than the layout
        says, or a GPU would copy other rows of host memory than the program says: with the operation, its bytes, its
        source line and what to do. It compiles the step alone; `multi`, `gradients`, `apply_gradients` and evaluators
        are programs of their own, of the same functions, and unchecked.
        """
        compiled = self.compiled_step(batch)
        return compiled.verify().timed(compiled.timing)

    # How it is done.

    def _initial_state(self, rng: PRNGKey, batch: Batch, *, without: Sequence[str] = ()) -> ZeroState:
        """The state that the model makes; without: fields that are left out, of parameters abstract."""
        make, like, shardings = self._initializer(batch, without=without)
        if self.options.host_offload is None:
            run = jax.jit(make, in_shardings=shardings, out_shardings=_shardings_of(like))
        else:  # made by several programs, one group after another
            run = in_groups(make, like, in_shardings=shardings)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
            batch = jax.tree.map(zeros_of, self.abstract_batch(batch))
        state, stored = run(rng, self.functions.model.given, batch), self.layout().state
        return dataclasses.replace(state, params=stored.params, frozen=stored.frozen) if "params" in without else state

    def _initializer(self, batch: Batch, *, without: Sequence[str] = ()) -> tuple[Any, ZeroState, Any]:
        """(The function that makes the state, its result as `ShapeDtypeStruct`s, the shardings of its arguments).

        without: fields of the state that are left out, and not drawn.
        """
        functions, left_out = self.functions, dict.fromkeys(without)

        def make(rng: PRNGKey, given: Any, batch: Batch) -> ZeroState:
            return dataclasses.replace(functions.initial_state(rng, given, batch), **left_out)

        like = dataclasses.replace(self.layout(batch).state, **left_out)
        return make, like, (None, None, functions.batch_shardings(batch))

    def _named(self, given: Any, batch: Batch = None) -> dict[str, Any]:
        """The values that a user gives, by the names that the state has for them."""
        return named(self.functions.model, given, self.layout(batch).state.variables)

    def _starting_values(self, params: Any, batch: Batch) -> Mapping[str, Any] | None:
        """The values that `init` starts from, by name; None: those that the model makes."""
        given = self._given_params if params is None else self._named(params, batch)
        if given is None:
            check_has_values(self.functions.model)
        return given

    def _with_values(self, state: ZeroState, given: Mapping[str, Any]) -> ZeroState:
        """`state` from values of the model's parameters by name; what the model adds to them is new."""
        return with_values(state, stored_values(self.functions.model, given, state.rng), layout=self.layout(),
                           optimizer=self.functions.optimizer)

    def _readable(self, state: ZeroState, *, ema: bool) -> tuple[ZeroState, Any]:
        """`state` with what an evaluator reads in arrays, and its shardings; None: those of the layout."""
        return state, None

    def _warn_of_variables(self, state: ZeroState) -> None:
        """Says once what an NNX module would lack that is updated with the parameters alone; Linen raises an error."""
        if not self._warned and is_nnx(self.functions.model) and (others := names_without_streams(state.variables)):
            self._warned = True
            LOG.warning("step.params(state) has the parameters alone, and state.variables has %s: nnx.update(module, "
                        "step.params(state), state.variables) takes all.", few(others))

    def _check_same(self, rng: PRNGKey, batch: Batch) -> None:
        """Raises ValueError where processes would start from different keys or states; all of several call it."""
        if not spans_processes(self.mesh) or isinstance(rng, Tracer) or not rng.is_fully_addressable:
            return
        check_same("The key of init", np.asarray(jax.random.key_data(rng)).tobytes(),
                   "give all processes the same, as jax.random.key(0)")
        check_same("The layout of the state", self.layout(batch).describe(),
                   "give all processes the same model, stage and options")

    def _check_capacity(self, batch: Batch) -> None:
        """Raises ValueError for a batch that does not fit the mesh, and where this host cannot hold what it should."""
        self.batches.check(batch)
        if self.options.host_offload is not None:
            check_capacity(self.layout(batch), devices_on_host(self.mesh))

    def _run(self, compiled: Any, state: ZeroState, *args: Any) -> tuple[ZeroState, Metrics]:
        """`compiled(state, *args)`, watched by the guard; args: a batch, or gradients and what belongs to them."""
        self._monitor.raise_if_stopped(waiting=1)
        try:
            state, metrics = compiled(state, *args)
        except (TypeError, ValueError) as error:  # what does not fit gets its own message
            check_state(state, self.layout(), error)
            if compiled is not self._jitted or (again := self._jit(args[0])) is compiled:
                raise
            state, metrics = again(state, *args)  # a batch that is sharded otherwise than those before
        if self.functions.guard.active:
            self._monitor.record(metrics)
        return state, metrics

    def _jit(self, batch: Batch) -> Any:
        self.batches.check(batch, self.accumulation.microbatches)
        layout, of_batch = self.layout(batch), self.functions.batch_shardings(batch)
        self._jitted = self.programs.get(
            ("step", hashable(of_batch)), self.functions.step, (layout.shardings, of_batch),
            (layout.shardings, self.functions.replicated), donate_argnums=0)
        return self._jitted


def _shardings_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
