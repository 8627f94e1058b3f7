"""The functions of a step that JAX traces, from the state to the gradient and the next state, and their layout.

The layout is found first, by `StepFunctions.layout(batch)`; every traced function reads the one that was found.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.frontends.model_functions import ModelFunctions, casting_inputs, other_reads, reseeded
from zero_jax.jaxpr.passes import with_jaxpr_passes
from zero_jax.layout.batch_layout import BatchLayout
from zero_jax.layout.compute_params import gather_compute_params
from zero_jax.layout.layout import Layout
from zero_jax.layout.step_weights import gather_step_weights, microbatch_layout
from zero_jax.offload.offload import as_placed, params_as_placed
from zero_jax.sharding.auto_axes import on_auto_axes, sharding_errors_explained
from zero_jax.sharding.batch import abstract_batch
from zero_jax.sharding.host_arrays import fetch, is_on_host
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.state import ZeroState
from zero_jax.step.accumulate import Microbatches, accumulate_gradients
from zero_jax.step.attention import initialising
from zero_jax.step.call_checks import (
    check_same_batch,
    check_state,
    loss_errors_explained,
    microbatch_errors_explained,
)
from zero_jax.step.gradients import ForwardInputs, ForwardOutput, gradient_function
from zero_jax.step.guard import GuardLogic
from zero_jax.step.losses import checked, takes_key, with_key
from zero_jax.step.metrics import values
from zero_jax.step.options import StepOptions
from zero_jax.step.overlap import with_overlap
from zero_jax.step.start import initial_state
from zero_jax.step.trace_layout import split_trainable, trace_layout
from zero_jax.step.update import apply_update, loss_scale, step_metrics, unscaled
from zero_jax.transforms.fp8_products import fp8_products
from zero_jax.transforms.gather_again import mark_last_reads
from zero_jax.transforms.tiled_products import tile_products
from zero_jax.tree import cast_floating, map_named, merge
from zero_jax.typing import Batch, Gradients, Loss, Metrics, OptState, Params, PRNGKey, Scalar, Variables
from zero_jax.views.in_parts import in_parts


class StepFunctions:
    """The functions of a step, from options and shapes: `ZeroTrainStep` compiles them, and none runs by itself.

    Attributes:
        known_layout: of the state, once a batch was seen.
        first_batch: the shapes of the first batch that was traced.
    """

    def __init__(self, model: ModelFunctions, optimizer: optax.GradientTransformationExtraArgs, loss: Loss,
                 axes: MeshAxes, options: StepOptions):
        """As `make_zero_train_step` calls it; raises ValueError for options that cannot take effect on this mesh."""
        options.check(axes)
        model.given = on_auto_axes(model.given, axes.mesh)
        self.axes, self.options = axes, options
        self.batches = BatchLayout(axes, options.parallelism.batch_specs)
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.guard = GuardLogic(options.guard, options.precision.loss_scale)
        self.known_layout: Layout | None = None
        self.first_batch: Any = None
        self._model_init = jax.jit(self._init_model)  # whose trace the layout and `init` share

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.axes.mesh

    def changed(self, **options: Any) -> "StepFunctions":
        """These functions with other options, whose layout is still to be made."""
        return StepFunctions(self.model, self.optimizer, self.loss, self.axes,
                             dataclasses.replace(self.options, **options))

    def of_slices(self) -> "StepFunctions":
        """The functions of one slice along the axis `replica`."""
        loss: Any = self.loss
        loss = loss.of_slices() if hasattr(loss, "of_slices") else loss  # one that names axes of the mesh
        return StepFunctions(self.model, self.optimizer, loss, self.axes.of_slices(), self.options)

    def layout(self, batch: Batch = None) -> Layout:
        """How every leaf of the state is stored, whatever the size of `batch`; it may be left out once known."""
        if batch is not None:
            self.batches.check(batch)
        elif self.known_layout is None:
            raise UsageError("This step has no layout yet: call step.init or step.layout(batch) first.")
        if self.known_layout is None:
            with loss_errors_explained(self.loss, batch, self.model), sharding_errors_explained():
                layout = trace_layout(
                    self.model, self._model_init, self._with_inputs_cast(self.loss), self.optimizer, self.axes,
                    self.options, jax.eval_shape(self.guard.init), batch)
            if self.options.communication.prefetch and not any(access.stacked for access in layout.reads.values()):
                raise UsageError("prefetch=True, and no loop of this model runs over its parameters: there is no next "
                                 "iteration to gather for. Put its layers in nn.scan or nnx.scan, or leave prefetch "
                                 "out.")
            self.known_layout = with_overlap(
                dataclasses.replace(layout, replicated_batch=self.batches.replicated(batch)), self.options)
        return self.known_layout

    def _init_model(self, rng: PRNGKey, batch: Batch, given: Any) -> tuple[Any, Any]:
        with initialising(), loss_errors_explained(self.loss, batch, self.model):
            return self.model.init(checked(with_key(self.loss, rng)), rng, batch, given)

    def initial_state(self, rng: PRNGKey, given: Any, batch: Batch) -> ZeroState:
        """The state before the first step; given: the values that the model object has."""
        model_rng, step_rng = jax.random.split(rng)
        params, variables = self._model_init(model_rng, batch, given)
        return as_placed(initial_state(
            *split_trainable(params, self.options.frozen), variables, rng=step_rng, optimizer=self.optimizer,
            layout=self.layout(), guard=self.guard), self.layout())

    def step(self, state: ZeroState, batch: Batch) -> tuple[ZeroState, Metrics]:
        """The next state, and metrics."""
        check_state(state, self.layout())
        self.batches.check(batch)
        check_same_batch(batch, self.first_batch)
        key = self.key(state)
        weights = state.params if state.weights is None else state.weights
        output, grads = self.forward_backward(state, weights, key, batch, self.loss)
        if self.options.host_offload:  # whose update makes them wider, and divides by the scale, block by block
            grads, scale = self.as_reduced(state, grads)
        else:
            grads, scale = self.unscaled(state, grads), None
        new_state = self.update(state, output, grads, key, scale)
        if self.first_batch is None:
            self.first_batch = abstract_batch(batch)
        return new_state

    def steps(self, state: ZeroState, batches: Batch) -> tuple[ZeroState, Metrics]:
        """As many steps as the first dim of `batches` says."""
        return jax.lax.scan(self.constrained_step, state, batches)

    def constrained_step(self, state: ZeroState, batch: Batch) -> tuple[ZeroState, Metrics]:
        """A step inside a larger program, in which nothing else says how the state is sharded."""
        shardings = self.layout().shardings
        batch = jax.tree.map(constrain, batch, self.batches.shardings(batch))
        state, metrics = self.step(jax.tree.map(constrain, state, shardings), batch)
        return jax.tree.map(constrain, state, shardings), metrics

    def gradients(self, state: ZeroState, batch: Batch, params: Params | None, loss: Loss
                  ) -> tuple[Gradients, Metrics, Variables]:
        """Reduced gradients without loss scale, metrics and new variables; params: in place of the state's."""
        layout = self.layout()
        check_state(state, layout)
        weights = state.params if state.weights is None else state.weights
        if params is not None:
            copy = gather_compute_params(jax.tree.map(constrain, params, layout.gradients), layout)
            weights = jax.tree.map(constrain, params, layout.shardings.params) if copy is None else copy
        output, grads = self.forward_backward(state, weights, self.key(state), batch, loss, host_gradients=False)
        if output.written:
            raise UsageError(f"The model overwrites its parameters {', '.join(output.written)} in its forward pass, "
                             "which step.gradients cannot hand on: call the step itself.")
        grads = self.unscaled(state, grads)
        metrics = step_metrics({"loss": output.loss, "grad_norm": optax.tree.norm(grads)})
        return grads, {**metrics, **values(output.metrics)}, output.variables

    def apply_gradients(self, state: ZeroState, grads: Gradients, loss: Scalar | None, variables: Variables | None
                        ) -> tuple[ZeroState, Metrics]:
        """The state after a step with the user's gradients."""
        return self.update(state, *self.given_gradients(state, grads, loss, variables), self.key(state))

    def given_gradients(self, state: ZeroState, grads: Gradients, loss: Scalar | None, variables: Variables | None
                        ) -> tuple[ForwardOutput, Gradients]:
        """The user's gradients on their shards, in the dtype of the update, as `forward_backward` returns its own."""
        output = ForwardOutput(loss, {}, jnp.ones(()), state.variables if variables is None else variables)
        grads = unscaled(grads, state.params, None, stochastic=self.stochastic)
        return output, jax.tree.map(constrain, grads, self.layout().gradients)

    def forward_backward(self, state: ZeroState, weights: Params, key: PRNGKey, batch: Batch, loss: Loss, *,
                         host_gradients: bool = True) -> tuple[ForwardOutput, Gradients]:
        """The output of the loss and the reduced gradient, multiplied by the loss scale; of all microbatches.

        host_gradients: False: all of them are in device memory, whatever the layout says.
        """
        batch = self._cast(batch)
        options, layout = self.options, self.layout()
        num_microbatches = options.accumulation.microbatches
        scale = state.guard.scale if self.guard.loss_scale else None
        activations = options.activations(self.axes, self.batches.size(batch) // num_microbatches)
        weights, frozen = gather_step_weights(*params_as_placed(weights, state.frozen, layout), layout)
        layout = microbatch_layout(layout)
        layout = layout if host_gradients else dataclasses.replace(layout, host_gradients={})
        gradient = gradient_function(self.model, self._with_inputs_cast(loss), layout, options, activations,
                                     self._reads_of(loss, batch, key))

        def run(weights: Params, inputs: ForwardInputs, batch: Batch, scale: Scalar) -> tuple[Gradients, ForwardOutput]:
            if num_microbatches == 1:
                output, grads = gradient(weights, inputs, batch, scale)
                return grads, output
            microbatches = Microbatches(options.accumulation.microbatches, self.axes, self.batches, batch)
            with microbatch_errors_explained(loss, options.accumulation):
                output, grads = accumulate_gradients(
                    gradient, options.accumulation, layout, weights, inputs, microbatches, scale)
            return grads, output

        grads, output = in_parts(run, layout, self.batches, layout.gradients)(
            weights, ForwardInputs(frozen, state.variables, key), batch, scale)
        return output, grads

    def update(self, state: ZeroState, output: ForwardOutput, grads: Gradients, key: PRNGKey,
               scale: Scalar | None = None) -> tuple[ZeroState, Metrics]:
        """The next state, and metrics, from the reduced gradient. scale: by which that is still multiplied."""
        return apply_update(
            state, output, grads, key=key, optimizer=self.optimizer, layout=self.layout(), guard=self.guard,
            stochastic=self.stochastic, ema=self.options.ema, offload=self.options.host_offload, scale=scale)

    def as_reduced(self, state: ZeroState, grads: Gradients) -> tuple[Gradients, Scalar | None]:
        """(`grads` on their shards, in any dtype and multiplied by the loss scale, that scale)."""
        grads = jax.tree.map(lambda grad, to: grad if is_on_host(grad) else constrain(grad, to),
                             grads, self.layout().gradients)
        return grads, loss_scale(state, self.guard)

    def unscaled(self, state: ZeroState, grads: Gradients) -> Gradients:
        """`grads` on their shards, in the dtype of the update, without the loss scale."""
        grads = jax.tree.map(constrain, grads, self.layout().gradients)
        return unscaled(grads, state.params, loss_scale(state, self.guard), stochastic=self.stochastic)

    def averaged(self, params: Params, opt_state: OptState) -> tuple[Params, Params | None]:
        """The parameters that a schedule-free optimizer is evaluated with, as they are stored, and the model's copy."""
        shapes = self.layout().stored_shapes
        load = functools.partial(jax.tree.map, lambda shape, leaf: shape.load(leaf))
        (found,) = schedule_free_states(load(shapes.opt_state, opt_state))
        average = optax.contrib.schedule_free_eval_params(found, load(shapes.params, params))
        stored = jax.tree.map(lambda shape, leaf: shape.store(leaf), shapes.params, average)
        return stored, gather_compute_params(stored, self.layout())

    def evaluate(self, fun: Loss, state: ZeroState, batch: Batch, rng: PRNGKey | None, *, ema: bool = False) -> Any:
        """`fun(model, batch)` in evaluation, each `Metric` as its value; traceable.

        rng: of the model's random streams, and of `fun` where it takes one; None: Linen modules get none, and NNX
        modules go on with their own. ema: with the moving average of the parameters.
        """
        return in_parts(self.forward(fun, batch, rng), self.layout(), self.batches)(
            *self.forward_inputs(state, rng, ema=ema), batch)

    def forward(self, fun: Loss, batch: Batch, rng: PRNGKey | None) -> Callable[..., Any]:
        """`evaluate` as one device computes it: a function of `forward_inputs` and the batch."""
        fun, model, layout = self._with_inputs_cast(fun), self.model, self.layout()
        reads = self._reads_of(fun, self._cast(batch), rng)

        def run(weights: Params, inputs: ForwardInputs, batch: Batch) -> Any:
            out, _, _ = model.run(with_key(fun, inputs.rng), merge(weights, inputs.frozen), inputs.variables,
                                  inputs.rng, self._cast(batch), layout.uses, train=False, reads=reads)
            return values(out)

        # `fun` may use a weight otherwise than the loss does: that one is gathered whole, or multiplied as it is.
        passes = [functools.partial(each, strict=False) for each, names in (
            (tile_products, layout.tiles), (fp8_products, layout.fp8)) if names]
        return with_jaxpr_passes(run, mark_last_reads, *passes) if passes else run

    def forward_inputs(self, state: ZeroState, rng: PRNGKey | None, *, ema: bool = False
                       ) -> tuple[Params, ForwardInputs]:
        """What `evaluate` reads of a state."""
        layout = self.layout()
        weights, frozen = state.params if state.weights is None else state.weights, state.frozen
        if ema:
            average = jax.tree.map(
                lambda leaf, param: leaf.astype(param.dtype), fetch(state.ema), state.params)
            gathered = gather_compute_params(average, layout)
            weights = jax.tree.map(constrain, average, layout.shardings.params) if gathered is None else gathered
        else:
            weights, frozen = params_as_placed(weights, frozen, layout)
        variables = state.variables if rng is None else reseeded(self.model, state.variables, rng)
        return weights, ForwardInputs(frozen, variables, rng)

    def _reads_of(self, fun: Loss, batch: Batch, rng: PRNGKey | None) -> Mapping[str, ParamAccess]:
        """How `fun(model, batch)` reads each parameter: another than the step's loss may read past the hooks."""
        layout = self.layout()
        if fun is self.loss:
            return layout.reads
        shapes, stored = layout.stored_shapes, layout.state
        as_read = map_named(lambda name, shape, leaf: jax.ShapeDtypeStruct(
            shape.shape, self.options.precision.read_dtype(name, leaf.dtype)),
            merge(shapes.params, shapes.frozen), merge(stored.params, stored.frozen))
        return other_reads(self.model, with_key(self._with_inputs_cast(fun), None), as_read, stored.variables,
                           *jax.eval_shape(lambda: (rng, batch)))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what every device has whole."""
        return NamedSharding(self.mesh, P())

    @property
    def stochastic(self) -> bool:
        """Whether parameters are rounded at random."""
        return self.options.precision.rounding == "stochastic"

    def key(self, state: ZeroState) -> PRNGKey:
        """The key of the step that `state` is before."""
        return jax.random.fold_in(state.rng, state.step)

    def _with_inputs_cast(self, fun: Loss) -> Loss:
        """`fun(model, batch)` with a model that casts what it is called with, where the precision says so."""
        precision = self.options.precision
        if precision.compute is None or precision.cast_batch != "inputs":
            return fun
        cast: Any = casting_inputs(fun, precision.compute)
        cast.takes_key = takes_key(fun)
        return cast

    def _cast(self, batch: Batch) -> Any:
        precision = self.options.precision
        return cast_floating(batch, precision.compute) if precision.cast_batch is True else batch

    def batch_shardings(self, batch: Batch) -> Any:
        """The shardings of `batch`: one for all leaves, or a tree."""
        return self.axes.batch_sharding if self.batches.is_even(batch) else self.batches.shardings(batch)


def schedule_free_states(opt_state: OptState) -> list[Any]:
    """The states of `optax.contrib.schedule_free` in that of an optimizer."""
    def is_average(each: Any) -> bool:
        return isinstance(each, optax.contrib.ScheduleFreeState)

    return list(filter(is_average, jax.tree.leaves(opt_state, is_leaf=is_average)))
