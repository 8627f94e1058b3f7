"""make_zero_train_step: the rooms below, assembled in the order of the paper."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.batch import abstract_batch, check_batch
from zero_jax.contract import Contract, Report, contract_of, verify
from zero_jax.functional import Functional, functional
from zero_jax.gather import gather
from zero_jax.hardware import compiler_options
from zero_jax.layout import Layout, plan_layout
from zero_jax.losses import Loss, learning_rates, loss_and_metrics, next_token_loss
from zero_jax.mesh import batch_axes, make_mesh, on_torus, zero_axes
from zero_jax.partial import inline_calls, merge_scatters, scatter_parts
from zero_jax.passes import (
    checkpoint_loops,
    hide_checkpoints,
    keep_all_but_gathered,
    mark_derived,
    separate_reads,
)
from zero_jax.precision import Precision, precision_of
from zero_jax.rewrite import rewritten
from zero_jax.stages import Stage, stage_of
from zero_jax.state import ZeroState
from zero_jax.tree import cast_floating, named_leaves
from zero_jax.widen import widen_reductions


def make_zero_train_step(
    model: Any,
    stage: int,
    *,
    optimizer: optax.GradientTransformation | None = None,
    loss: Loss | None = None,
    mesh: Mesh | None = None,
    axis: str | Sequence[str] | None = None,
    precision: Precision | str | None = None,
    streams: Sequence[str] = ("dropout",),
) -> "ZeroTrainStep":
    """A train step of any Flax model at a ZeRO stage, with the numbers of one device.

    Args:
      model: a Linen module, an NNX module, or a function of `rngs: nnx.Rngs` that makes one (then its state
        is born sharded, where a constructed module has already been whole on one device).
      stage: 0 (data parallel), 1 (optimizer states sharded), 2 (and gradients), 3 (and parameters).
      optimizer: any optax transform. Default: `optax.adamw(3e-4)`.
      loss: `loss(model, batch) -> scalar` or `(scalar, {name: metric})`, over the global batch. `model` is a
        bound Linen module or the merged NNX module. Default: `next_token_loss`.
      mesh: Default: `make_mesh()`, all live devices on the axis `data`.
      axis: the mesh axes that ZeRO shards over, major first. Default: `data`, or `data_0`, `data_1`, ...
      precision: a policy's name ("fp32", "bf16"), a `Precision`, or None: dtypes as the model declares them.
      streams: Linen's RNG streams beside "params", given anew at each step. NNX modules own theirs.

    Raises ValueError for anything that is not as described, with what to do about it.
    """
    row = stage_of(stage)
    mesh = make_mesh() if mesh is None else mesh
    axes = zero_axes(mesh, axis)
    optimizer = optax.adamw(3e-4) if optimizer is None else optimizer
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ValueError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}, not an optax transform: give optax.adamw(1e-3), "
            "say.")
    return ZeroTrainStep(
        functional(model, streams), row, optax.with_extra_args_support(optimizer), loss or next_token_loss, mesh, axes,
        precision_of(precision))


class ZeroTrainStep:
    """A train step: `init`, then `state, metrics = step(state, batch)` for as long as the user likes.

    A batch is a pytree of arrays (numpy or jax) whose leading dim is the global batch, laid over the mesh's
    data axes. Shapes are learned from the first batch; batches of other sizes compile once each.
    """

    def __init__(self, model: Functional, stage: Stage, optimizer: Any, loss: Loss, mesh: Mesh, axes: tuple[str, ...],
                 precision: Precision):
        self.mesh = mesh
        self.stage = stage
        self.batch_sharding = NamedSharding(mesh, P(batch_axes(mesh, axes)))
        self._model, self._optimizer, self._loss, self._axes, self._precision = model, optimizer, loss, axes, precision
        self._layout: Layout | None = None
        self._compiled: Any = None

    def init(self, rng: jax.Array, batch: Any) -> ZeroState:
        """The initial state, each leaf made where the layout puts it; `batch` may be abstract.

        rng: a JAX PRNG key. Raises ValueError for a batch that does not fit the mesh.
        """
        make = self._initializer(batch)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(batch)):
            batch = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), batch)
        return make(_typed_key(rng), self._model.given, batch)

    def __call__(self, state: ZeroState, batch: Any) -> tuple[ZeroState, dict[str, jax.Array]]:
        """One step: (new state, metrics). `state` is donated; nothing waits for the devices.

        Metrics are float32 scalars: `loss`, `grad_norm` (of the whole reduced gradient, before any clipping),
        `learning_rate` where the optimizer's state tells it (`optax.inject_hyperparams`; `learning_rate_1` and so
        on where it tells several), and those of the user's loss.
        """
        compiled = self._compiled or self._jitted(batch)
        try:
            return compiled(state, batch)
        except (TypeError, ValueError):
            check_batch(batch, self.mesh)  # a batch that does not fit the mesh gets its own message
            raise

    def params(self, state: ZeroState) -> Any:
        """The parameters of `state` in their true shapes, in as many parts as those allow."""
        if self._layout is None:
            raise ValueError("This step has no layout yet: call step.init or step.layout(batch) before step.params.")
        return self._layout.load(state).params

    def abstract_state(self, batch: Any) -> ZeroState:
        """The state as `jax.ShapeDtypeStruct`s with shardings, for restoring and for compiling."""
        return self.layout(batch).state

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The step lowered for `batch` (arrays or `jax.ShapeDtypeStruct`s); its mesh may be of described devices."""
        return self._jitted(batch).lower(self.abstract_state(batch), self.abstract_batch(batch))

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """`lower`, compiled for the mesh's devices, described or live: its text, its memory; calls do not use it."""
        return self.lower(batch).compile(compiler_options=compiler_options(self.mesh.devices.flat[0]))

    def contract(self, batch: Any) -> Contract:
        """What a step may send over the wire: kinds of collectives, mesh axes, bytes per device."""
        return contract_of(self.layout(batch))

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

    def layout(self, batch: Any) -> Layout:
        """Where every leaf of the state lies. It depends on the model, not on the size of `batch`."""
        check_batch(batch, self.mesh)
        if self._layout is None:
            rng = jax.eval_shape(lambda: jax.random.key(0))
            batch = jax.eval_shape(self._cast, abstract_batch(batch))
            given = jax.eval_shape(lambda: self._model.given)
            params, variables = jax.eval_shape(lambda *args: self._model.init(self._loss, *args), rng, batch, given)
            params = jax.eval_shape(lambda tree: cast_floating(tree, self._precision.params), params)
            _refuse_integers(params)
            reads = self._model.reads(self._loss, params, variables, rng, batch)
            # Reading settles which of a Linen module's collections start empty at each step: they are no state.
            _, variables = jax.eval_shape(lambda *args: self._model.init(self._loss, *args), rng, batch, given)
            self._layout = plan_layout(
                params=params, variables=variables, rng=rng, optimizer=self._optimizer, stage=self.stage,
                mesh=self.mesh, axes=self._axes, precision=self._precision, reads=reads)
        return self._layout

    def evaluator(self, fun: Loss | None = None) -> Callable[[ZeroState, Any], Any]:
        """`fun(model, batch)` (default: the loss) compiled as a function of (state, batch); nothing is changed.

        Parameters are gathered where they are used, as in training. Linen modules get no RNG streams, NNX
        modules are switched to `eval()`.
        """
        fun = fun or self._loss
        compiled: list[Any] = []

        def evaluate(state: ZeroState, batch: Any) -> Any:
            weights = state.params if state.weights is None else state.weights
            uses = self.layout(batch).uses
            out, _ = self._model.run(fun, weights, state.variables, None, self._cast(batch), uses, train=False)
            return out

        def call(state: ZeroState, batch: Any) -> Any:
            if not compiled:
                shardings = (self.layout(batch).shardings, self.batch_sharding)
                compiled.append(jax.jit(evaluate, in_shardings=shardings))
            return compiled[0](state, batch)

        return call

    def _jitted(self, batch: Any) -> Any:
        layout = self.layout(batch)
        if self._compiled is None:
            self._compiled = jax.jit(
                self._step, donate_argnums=0, in_shardings=(layout.shardings, self.batch_sharding),
                out_shardings=(layout.shardings, NamedSharding(self.mesh, P())))
        return self._compiled

    def _initializer(self, batch: Any) -> Any:
        layout = self.layout(batch)
        return jax.jit(self._init, in_shardings=(None, None, self.batch_sharding), out_shardings=layout.shardings)

    def _init(self, rng: jax.Array, given: Any, batch: Any) -> ZeroState:
        make_rng, step_rng = jax.random.split(rng)
        params, variables = self._model.init(self._loss, make_rng, self._cast(batch), given)
        layout = self.layout(batch)
        params = _strong(cast_floating(params, self._precision.params))
        params = jax.tree.map(lambda view, leaf: view.store(leaf), layout.views.params, params)
        params = jax.tree.map(_constrain, params, layout.shardings.params)
        return ZeroState(
            step=jnp.zeros((), jnp.int32), params=params, weights=self._weights(params, layout),
            opt_state=_strong(layout.init(self._optimizer, params)), variables=_strong(variables), rng=step_rng)

    def _step(self, state: ZeroState, batch: Any) -> tuple[ZeroState, dict[str, jax.Array]]:
        layout = self.layout(batch)

        def loss_of(weights: Any, variables: Any, rng: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
            out, variables = self._model.run(self._loss, weights, variables, rng, batch, layout.uses)
            loss, metrics = loss_and_metrics(out)
            return loss, (metrics, variables)

        if self.stage.shards_params and layout.num_shards > 1:  # else nothing is gathered
            loss_of = jax.checkpoint(
                rewritten(loss_of, separate_reads, mark_derived, hide_checkpoints, checkpoint_loops),
                policy=keep_all_but_gathered)
        else:
            loss_of = rewritten(loss_of, separate_reads)
        weights = state.params if state.weights is None else state.weights
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        edits = [inline_calls] if self._precision.reduce is None else [inline_calls, widen_reductions]
        flat = len(self.mesh.axis_names) == 1 and not on_torus(self.mesh)
        if not flat or not all(view.natural for view in jax.tree.leaves(layout.views.params)):
            size = jax.tree.leaves(batch)[0].shape[0]
            edits = [functools.partial(merge_scatters, uneven=flat), *edits,
                     functools.partial(scatter_parts, batch_size=size, uneven=flat)]
        gradient_of = rewritten(gradient_of, *edits)
        (loss, (metrics, variables)), grads = gradient_of(
            weights, state.variables, jax.random.fold_in(state.rng, state.step), self._cast(batch))

        # From here on each device works on its own part: gradients, moments and parameters lie alike.
        grads = jax.tree.map(_constrain, grads, layout.gradients)
        grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
        params = jax.tree.map(_constrain, state.params, layout.gradients)
        updates, opt_state = layout.update(self._optimizer, grads, state.opt_state, params, value=loss)
        params = jax.tree.map(_constrain, optax.apply_updates(params, updates), layout.gradients)
        new = ZeroState(
            step=state.step + 1, params=params, weights=self._weights(params, layout), opt_state=opt_state,
            variables=variables, rng=state.rng)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), **learning_rates(opt_state), **metrics}
        return new, jax.tree.map(lambda metric: jnp.asarray(metric, jnp.float32), metrics)

    def _weights(self, params: Any, layout: Layout) -> Any:
        """The working copy: cast on the shard, then gathered, so that the wire carries the compute dtype."""
        if layout.state.weights is None:
            return None

        def copy(param: jax.Array, shard: NamedSharding, like: jax.ShapeDtypeStruct) -> jax.Array:
            return gather(param.astype(like.dtype), self.mesh, shard.spec)

        return jax.tree.map(copy, params, layout.gradients, layout.state.weights)

    def _cast(self, batch: Any) -> Any:
        return cast_floating(batch, self._precision.compute)

    def abstract_batch(self, batch: Any) -> Any:
        """`batch` as `jax.ShapeDtypeStruct`s, laid over the mesh."""
        def place(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.batch_sharding)

        return jax.tree.map(place, abstract_batch(batch))


def _refuse_integers(params: Any) -> None:
    for name, leaf in named_leaves(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"Parameter {name} has dtype {leaf.dtype} and shape {leaf.shape}, and only floating parameters can be "
                "trained: keep it in another collection (Linen) or another Variable type than nnx.Param (NNX).")


def _constrain(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(value, sharding)


def _strong(tree: Any) -> Any:
    """`tree` without weak types: a weakly typed leaf would compile the step twice."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), tree)


def _typed_key(rng: Any) -> jax.Array:
    if not isinstance(rng, jax.Array):
        raise ValueError(f"rng={rng!r} is a {type(rng).__name__}, not a key: give jax.random.key(0), say.")
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng
    return jax.random.wrap_key_data(rng)
