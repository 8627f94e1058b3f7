"""A train step: the rooms below, assembled in the order of the paper."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.accumulate import accumulated
from zero_jax.activations import Activations
from zero_jax.batch import Accumulation, abstract_batch, check_batch
from zero_jax.cluster import lay_out
from zero_jax.contract import Contract, Report, contract_of, verify
from zero_jax.evaluate import evaluated
from zero_jax.functional import Functional
from zero_jax.gradients import Reading, gradient_function
from zero_jax.guard import Guard, Lookout, Watch
from zero_jax.hardware import compiled_for
from zero_jax.initial import initial_state
from zero_jax.layout import Layout, plan_layout
from zero_jax.losses import Loss
from zero_jax.mesh import CONTEXT, TENSOR, batch_axes, batch_spec, of_rank
from zero_jax.precision import Precision
from zero_jax.stages import Stage
from zero_jax.state import ZeroState, typed_key
from zero_jax.tensor import tensor_specs
from zero_jax.trained import check_trained, split_trained
from zero_jax.transform import check_optimizer
from zero_jax.tree import cast_floating, merge
from zero_jax.update import updated
from zero_jax.zero_r import ZeroR


class ZeroTrainStep:
    """A train step: `init`, then `state, metrics = step(state, batch)` for as long as the user likes.

    A batch is a pytree of arrays (numpy or jax) whose leading dim is the global batch, laid over the mesh's
    data axes. Shapes are learned from the first batch; batches of other sizes compile once each.
    """

    def __init__(self, model: Functional, stage: Stage, optimizer: Any, loss: Loss, mesh: Mesh, axes: tuple[str, ...],
                 precision: Precision, accumulation: Accumulation, frozen: tuple[str, ...], ema: float | None,
                 guard: Guard | None, zero_r: ZeroR):
        zero_r.check(mesh, axes, stage, accumulation)
        if ema is not None and not 0 <= ema < 1:
            raise ValueError(f"ema={ema}: give a decay from 0 to below 1, as 0.999, or None.")
        self.mesh = mesh
        self.stage = stage
        self.accumulation = accumulation
        self.batch_sharding = NamedSharding(mesh, batch_spec(mesh, axes))
        self._model, self._optimizer, self._loss, self._axes, self._precision = model, optimizer, loss, axes, precision
        self._frozen, self._ema, self._watch, self._lookout = frozen, ema, Watch(guard, precision.loss_scale), Lookout()
        self._zero_r, self._options = zero_r, zero_r.options(mesh)
        self._layout: Layout | None = None
        self._compiled: Any = None

    def init(self, rng: jax.Array, batch: Any) -> ZeroState:
        """The initial state, each leaf made where the layout puts it; `batch` may be abstract.

        rng: a JAX PRNG key. Raises ValueError for a batch that does not fit the mesh.
        """
        make = self._initializer(batch)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
            batch = lay_out(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), batch), self.batch_sharding)
        return make(typed_key(rng), self._model.given, batch)

    def __call__(self, state: ZeroState, batch: Any) -> tuple[ZeroState, dict[str, jax.Array]]:
        """One step: (new state, metrics). `state` is donated; nothing waits for the devices.

        Metrics are float32 scalars: `loss`, `grad_norm` (of the whole reduced gradient, before any clipping),
        `learning_rate` where the optimizer's state tells it (`optax.inject_hyperparams`; `learning_rate_1` and so
        on where it tells several), and those of the user's loss. With a guard or a loss scale: `bad` steps in a row,
        steps `skipped` in all, whether it `stopped`, and the `loss_scale` of this step.

        Raises BadStepError once more steps in a row were bad than the guard skips, at most two calls late; `state` is
        then the one before them, and `forgive` gives one to go on from.
        """
        compiled = self._compiled or self._jitted(batch)
        self._lookout.look(waiting=1)
        try:
            state, metrics = compiled(state, batch)
        except (TypeError, ValueError):
            # A batch that does not fit the mesh gets its own message.
            check_batch(batch, self.mesh, self._axes, self.accumulation.microbatches)
            raise
        if self._watch.active:
            self._lookout.see(metrics)
        return state, metrics

    def check(self) -> None:
        """Waits for all steps so far, and raises BadStepError if the guard stopped: call it after the last step."""
        self._lookout.look(waiting=0)

    def forgive(self, state: ZeroState) -> ZeroState:
        """`state` with no bad steps behind it: what stopped goes on."""
        if state.guard is None:
            return state
        return dataclasses.replace(state, guard=dataclasses.replace(state.guard, bad=jnp.zeros_like(state.guard.bad)))

    def params(self, state: ZeroState) -> Any:
        """The parameters of `state` in their true shapes, in as many parts as those allow."""
        state = self.layout().load(state)
        return merge(state.params, state.frozen)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """As the step calls it."""
        return self._optimizer

    def abstract_state(self, batch: Any) -> ZeroState:
        """The state as `jax.ShapeDtypeStruct`s with shardings, for restoring and for compiling."""
        return self.layout(batch).state

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The step lowered for `batch` (arrays or `jax.ShapeDtypeStruct`s); its mesh may be of described devices."""
        return self._jitted(batch).lower(self.abstract_state(batch), self.abstract_batch(batch))

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """`lower`, compiled for the mesh's devices, described or live: its text, its memory; calls do not use it."""
        return compiled_for(self.lower(batch), self.mesh.devices.flat[0], self._options)

    def contract(self, batch: Any) -> Contract:
        """What a step may send over the wire: kinds of collectives, mesh axes, bytes per device."""
        sent, layout = 0.0, self.layout(batch)
        if {TENSOR, CONTEXT} & set(self.mesh.axis_names):
            batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(
                (leaf.shape[0] // self.accumulation.microbatches, *leaf.shape[1:]), leaf.dtype), abstract_batch(batch))
            traced = jax.make_jaxpr(self.evaluator())(layout.state, batch)
            sent = self._activations(jax.tree.leaves(batch)[0].shape[0]).wire_bytes(traced.jaxpr)
        return contract_of(layout, self.accumulation, self._optimizer, sent)

    def verify(self, batch: Any) -> Report:
        """Compiles the step and holds it against its contract: what is sent for what, beside what was promised.

        Raises ContractError (a ValueError) if it sends more, with the operation, its bytes, its source line and
        what to do.
        """
        return verify(self.compile(batch).as_text() or "", self.contract(batch))

    def lower_init(self, batch: Any) -> jax.stages.Lowered:
        """`init` lowered for `batch`, to see what it needs."""
        return self._initializer(batch).lower(
            jax.eval_shape(lambda: jax.random.key(0)), jax.eval_shape(lambda: self._model.given),
            self.abstract_batch(batch))

    def layout(self, batch: Any = None) -> Layout:
        """Where every leaf of the state lies, whatever the size of `batch`; that may be left out once there was one."""
        if batch is not None:
            check_batch(batch, self.mesh, self._axes)
        elif self._layout is None:
            raise ValueError("This step has no layout yet: call step.init or step.layout(batch) first.")
        if self._layout is None:
            rng = jax.eval_shape(lambda: jax.random.key(0))
            batch = jax.eval_shape(self._cast, abstract_batch(batch))
            given = jax.eval_shape(lambda: self._model.given)
            made, variables = jax.eval_shape(lambda *args: self._model.init(self._loss, *args), rng, batch, given)
            check_trained(made, frozen=self._frozen, keep=self._precision.keep)
            params, frozen = split_trained(made, self._frozen)
            params = jax.eval_shape(lambda tree: cast_floating(tree, self._precision.params), params)
            check_optimizer(self._optimizer, params)
            reads = self._model.reads(self._loss, merge(params, frozen), variables, rng, batch)
            # Reading settles which of a Linen module's collections start empty at each step: they are no state.
            _, variables = jax.eval_shape(lambda *args: self._model.init(self._loss, *args), rng, batch, given)
            self._layout = plan_layout(
                params=params, frozen=frozen, variables=variables, guard=jax.eval_shape(self._watch.init), rng=rng,
                optimizer=self._optimizer, stage=self.stage, mesh=self.mesh, axes=self._axes,
                precision=self._precision, reads=reads, ema=self._ema is not None,
                reduce_at_use=not self.accumulation.once,
                tensor=tensor_specs(made, self.mesh, self._zero_r.tensor_rules, self._model.metadata),
                secondary=self._zero_r.secondary)
        return self._layout

    def evaluator(self, fun: Loss | None = None, *, ema: bool = False) -> Callable[[ZeroState, Any], Any]:
        """`fun(model, batch)` (default: the loss) compiled as a function of (state, batch); nothing is changed.

        Parameters are gathered where they are used, as in training; `ema`: their moving average is. Linen modules get
        no RNG streams, NNX modules are switched to `eval()`.
        """
        if ema and self._ema is None:
            raise ValueError("evaluator(ema=True): this step keeps no average; make it with ema=0.999, say.")
        compiled: list[Any] = []

        def evaluate(state: ZeroState, batch: Any) -> Any:
            return evaluated(self._model, fun or self._loss, self.layout(batch), state, self._cast(batch), ema=ema)

        def call(state: ZeroState, batch: Any) -> Any:
            if not compiled:
                shardings = (self.layout(batch).shardings, self._batch_shardings(batch))
                compiled.append(jax.jit(evaluate, in_shardings=shardings))
            return compiled[0](state, batch)

        return call

    def _jitted(self, batch: Any) -> Any:
        check_batch(batch, self.mesh, self._axes, self.accumulation.microbatches)
        layout = self.layout(batch)
        if self._compiled is None:
            self._compiled = jax.jit(
                self._step, donate_argnums=0, compiler_options=self._options or None,
                in_shardings=(layout.shardings, self._batch_shardings(batch)),
                out_shardings=(layout.shardings, NamedSharding(self.mesh, P())))
        return self._compiled

    def _batch_shardings(self, batch: Any) -> Any:
        if CONTEXT not in self._axes:
            return self.batch_sharding
        return jax.tree.map(lambda leaf: of_rank(self.batch_sharding, np.ndim(leaf)), batch)

    def _initializer(self, batch: Any) -> Any:
        layout, shardings = self.layout(batch), (None, None, self._batch_shardings(batch))
        return jax.jit(self._init, in_shardings=shardings, out_shardings=layout.shardings)

    def _init(self, rng: jax.Array, given: Any, batch: Any) -> ZeroState:
        make_rng, step_rng = jax.random.split(rng)
        made, variables = self._model.init(self._loss, make_rng, self._cast(batch), given)
        return initial_state(
            *split_trained(made, self._frozen), variables, rng=step_rng, optimizer=self._optimizer,
            layout=self.layout(batch), watch=self._watch)

    def _step(self, state: ZeroState, batch: Any) -> tuple[ZeroState, dict[str, jax.Array]]:
        layout, batch = self.layout(batch), self._cast(batch)
        many, scale = self.accumulation.microbatches, state.guard.scale if self._watch.loss_scale else None
        activations = self._activations(jax.tree.leaves(batch)[0].shape[0] // many)
        gradient = gradient_function(self._model, self._loss, layout, self._precision, activations,
                                     remat=self._zero_r.blocks, reduced=not self.accumulation.once)
        key = jax.random.fold_in(state.rng, state.step)
        weights = state.params if state.weights is None else state.weights
        reading = Reading(state.frozen, state.variables, key)
        if many == 1:
            told, grads = gradient(weights, reading, batch, scale)
        else:
            told, grads = accumulated(gradient, self.accumulation, layout, batch_axes(self.mesh, self._axes), weights,
                                     reading, batch, scale)
        return updated(
            state, told, grads, key=key, optimizer=self._optimizer, layout=layout, watch=self._watch,
            stochastic=self._precision.rounding == "stochastic", ema=self._ema)

    def _activations(self, batch_size: int) -> Activations:
        return self._zero_r.activations(self.mesh, self._axes, batch_size)

    def _cast(self, batch: Any) -> Any:
        return cast_floating(batch, self._precision.compute)

    def abstract_batch(self, batch: Any) -> Any:
        """`batch` as `jax.ShapeDtypeStruct`s, laid over the mesh."""
        def place(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=of_rank(self.batch_sharding, len(leaf.shape)))

        return jax.tree.map(place, abstract_batch(batch))
