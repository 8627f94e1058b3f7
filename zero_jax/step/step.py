"""The compiled ZeRO step: gather at use, backward with reduce-scatter, sharded update, re-gather."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.distributed.initialize import on_host, zeros_of
from zero_jax.errors import UsageError
from zero_jax.frontends.model_functions import ModelFunctions
from zero_jax.sharding.auto_axes import in_any_context, on_auto_axes
from zero_jax.sharding.batch import split_steps
from zero_jax.sharding.batch_layout import hashable
from zero_jax.sharding.memory.disk_leaves import expanded, resident
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.state import ZeroState, state_key, typed_key
from zero_jax.step.call_checks import check_is_state, check_loss, check_state, check_values, is_traced, state_explained
from zero_jax.step.guard import BadStepMonitor
from zero_jax.step.inspection import InspectableStep
from zero_jax.step.loop_checks import check_params, check_update
from zero_jax.step.losses import takes_key
from zero_jax.step.options import StepOptions
from zero_jax.step.replicas import Replicas, compare, copies_digests, replicas_of
from zero_jax.step.start import as_train_state, check_train_state, with_optimizer_state
from zero_jax.tree import merge
from zero_jax.typing import Batch, Gradients, Loss, Metrics, Params, PRNGKey, Pytree, Scalar, Variables


class ZeroTrainStep(InspectableStep):
    """A train step: `init`, then `state, metrics = step(state, batch)` for as long as the user likes.

    A batch is a pytree of arrays (numpy or jax) whose leading dim is the global batch, sharded over the mesh's
    data axes. Shapes are learned from the first batch; batches of other sizes compile once each, and other keys or
    dtypes raise ValueError. Inside the user's own `jit` or `scan` a step is part of that program: nothing is donated,
    and no error of the guard is raised (`check(state)` does so afterwards).

    Attributes:
        axes: the mesh and the roles of its axes.
        options: what `make_zero_train_step` was asked for.
        batch_sharding: the sharding of a leaf of the batch.
    """

    def __init__(self, model: ModelFunctions, optimizer: optax.GradientTransformationExtraArgs, loss: Loss,
                 axes: MeshAxes, options: StepOptions, given_params: Mapping[str, Any] | None = None):
        """As `StepFunctions`."""
        super().__init__(model, optimizer, loss, axes, options, given_params)
        self._monitor = BadStepMonitor()
        self._jitted: Any = None
        self._programs: dict[Any, Any] = {}

    def __repr__(self) -> str:
        known = "" if self._layout is None else (
            f", num_params={self._layout.num_params:,}, state_bytes_per_device={self._layout.device_bytes:,}")
        return f"ZeroTrainStep(stage={self.stage.number}, mesh={self.axes.sizes}{known})"

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
        given = self._given_params if params is None else self._named(params, batch)
        make = self._run_init(batch, params=given is None)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
            batch = jax.tree.map(zeros_of, self.abstract_batch(batch))
        state = make(rng, self._model.given, batch)
        if given is None:
            return state
        like = self.layout().state
        return self._with_values(dataclasses.replace(state, params=like.params, frozen=like.frozen), given)

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
            return self._constrained_step(state, batch)
        check_values(batch, self._loss, self.batches)
        return self._run(self._jitted or self._jit(batch), state, batch)

    def multi(self, state: ZeroState, batches: Batch) -> tuple[ZeroState, Metrics]:
        """Several steps in one compiled program: (new state, metrics, each with a leading dim of the steps).

        batches: a pytree of arrays of shape (steps, global batch, ...). `state` is donated. Another number of steps
        compiles once more. The guard works in every step; BadStepError is raised as by single steps.
        """
        check_is_state(state)
        check_values(batches, self._loss, self.batches, steps=True)
        first = split_steps(batches)
        self.batches.check(first, self.accumulation.microbatches)
        layout = self.layout(first)
        shardings = jax.tree.map(lambda each: NamedSharding(self.mesh, P(None, *each.spec)),
                                 self.batches.shardings(first))
        return self._run(self._jit_once(
            ("multi", hashable(shardings)), self._steps, (layout.shardings, shardings),
            (layout.shardings, self._replicated), donate_argnums=0), state, batches)

    def gradients(self, state: ZeroState, batch: Batch, *, params: Params | None = None, loss: Loss | None = None
                  ) -> tuple[Gradients, Metrics, Variables]:
        """(Gradients, metrics, the model's new variables) for a loop of one's own; `state` is not donated.

        Gradients are reduced, without loss scale, stored and sharded as `step.layout().gradients`: elementwise
        arithmetic with `state.params` needs no care. Microbatches are those of the step.

        params: in place of `state.params` and stored like them, such as parameters that SAM moved. loss: in place of
        the step's, such as the generator's; the same function each time, or it compiles anew.
        """
        check_is_state(state)
        fun = self._loss if loss is None else loss
        check_loss(fun)
        params, layout = on_auto_axes(params, self.mesh), self.layout(batch)
        self.batches.check(batch, self.accumulation.microbatches)
        check_params(params, layout)

        def run(state: ZeroState, batch: Batch, params: Params | None) -> Any:
            return self._gradients(expanded(layout, state), batch, params, fun)

        if is_traced(state, batch):
            return run(state, batch, params)
        check_values(batch, fun, self.batches)
        of_batch = self._batch_shardings(batch)
        compiled = self._jit_once(
            ("gradients", fun, params is None, hashable(of_batch)), run,
            (resident(layout, layout.shardings), of_batch, None),
            (layout.gradients, self._replicated, layout.shardings.variables))
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
            return self._apply(state, gradients, loss, variables)
        return self._run(self._jit_once(
            ("apply", loss is None, variables is None), self._apply,
            (shardings, self.layout().gradients, None, None if variables is None else shardings.variables),
            (shardings, self._replicated), donate_argnums=0), state, gradients, loss, variables)

    def check(self, state: ZeroState | None = None) -> None:
        """Waits for all steps so far, and raises BadStepError if the guard stopped: call it after the last step.

        state: looked at as well, for steps that ran inside a program of the user's.
        """
        self._monitor.raise_if_stopped(waiting=0)
        if state is not None:
            check_is_state(state)
        if state is not None and state.guard is not None:
            self._monitor.record({"stopped": self._guard.stopped(state.guard)})
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
        digests = self._jit_once(("replicas",), lambda state: copies_digests(state, layout), (layout.shardings,),
                                 self._replicated)
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
        return merge(state.params, state.frozen)

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
            return self._evaluate(fun or self._loss, expanded(self.layout(), state), batch, rng, ema=ema)

        def call(state: ZeroState, batch: Batch, rng: PRNGKey | None = None) -> Any:
            check_is_state(state)
            if rng is None and takes_key(fun or self._loss):
                raise UsageError("This function takes rng: give the evaluator a key, evaluate(state, batch, key).")
            whole = self.batches.is_ragged(batch)
            check_values(batch, fun or self._loss, self.batches, whole=whole)
            read, shardings = self._readable(state, ema=ema)
            of_batch = self._replicated if whole else self._batch_shardings(batch)
            if (kind := (whole, jax.tree.structure(batch), hashable(of_batch))) not in compiled:
                layout = self.layout(self.batches.rounded_up(batch) if whole else batch)
                compiled[kind] = jax.jit(run, in_shardings=(shardings or layout.shardings, of_batch, None))
            with state_explained(state, self.layout()):
                return compiled[kind](read, batch, None if rng is None else typed_key(rng))

        return in_any_context(call, at=self)

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
        if self._guard.active:
            self._monitor.record(metrics)
        return state, metrics

    def _jit(self, batch: Batch) -> Any:
        self.batches.check(batch, self.accumulation.microbatches)
        layout, of_batch = self.layout(batch), self._batch_shardings(batch)
        self._jitted = self._jit_once(("step", hashable(of_batch)), self._step, (layout.shardings, of_batch),
                                      (layout.shardings, self._replicated), donate_argnums=0)
        return self._jitted
