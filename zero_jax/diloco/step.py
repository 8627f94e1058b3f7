"""`DiLoCoStep`: a train step of slices that train by themselves, how it is made, and which program runs when."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from zero_jax.arguments import shown, whole
from zero_jax.diloco.inspection import InspectableDiLoCo
from zero_jax.diloco.options import OuterOptions
from zero_jax.errors import UsageError
from zero_jax.sharding.auto_axes import in_any_context
from zero_jax.sharding.compute_params import gather_compute_params
from zero_jax.state import ZeroState
from zero_jax.step.call_checks import check_is_state, check_state, check_values, is_traced, state_explained
from zero_jax.step.step import ZeroTrainStep
from zero_jax.typing import Batch, Loss, Metrics, Params, PRNGKey, Pytree


class DiLoCoStep(InspectableDiLoCo):
    """A train step of slices that train by themselves: `init`, then `state, metrics = step(state, batch)`.

    Batches are those of the step that it was made from: each slice gets an equal part of the examples. A state is a
    `ZeroState` whose leaves have a leading dim of the slices, but for `step`, which counts the steps of all, and
    `frozen`; its `opt_state` has the slices' ("inner") and the outer one: {"params", "momentum"}, in float32, sharded
    over a slice and the same in all of them. One program is compiled for steps that send nothing, and one for each
    fragment. `zero_jax.Checkpoints` saves and restores these states as those of any step.

    Attributes:
        step: of the slices together, as `make_zero_train_step` made it: synchronous training.
        outer: what `make_diloco_step` was asked for.
        axes: the mesh and the roles of its axes; `axes.slices` is that of the slices.
        num_slices: how many slices train by themselves.
    """

    def __init__(self, step: Any, outer: Any, num_slices: int | None = None):
        """As `DiLoCoFunctions`."""
        super().__init__(step, outer, num_slices)
        self._last: tuple[Any, int] = (None, 0)

    def __repr__(self) -> str:
        return (f"DiLoCoStep(stage={self.stage.number}, mesh={self.axes.sizes}, every={self.outer.every}, "
                f"fragments={self.outer.fragments})")

    def batch_target(self, *, steps: bool) -> Callable[[str, Any], NamedSharding]:
        """Where a leaf of a batch belongs, as `step.batch_target`."""
        return self.step.batch_target(steps=steps)

    @in_any_context
    def init(self, rng: PRNGKey, batch: Batch, *, params: Pytree | None = None) -> ZeroState:
        """The state before the first step, in which all slices are alike but for their random keys; as `step.init`."""
        self.layout(batch)
        return self.from_synchronous(self.step.init(rng, batch, params=params))

    @in_any_context
    def from_synchronous(self, state: ZeroState) -> ZeroState:
        """A state whose slices go on from `state`, one of `step`; the outer momentum is zero. `state` stays."""
        check_is_state(state)
        check_state(state, self.step.layout())
        return self._jit("from", self._from_synchronous, None, self.layout().shardings)(state)

    @in_any_context
    def synchronous(self, state: ZeroState) -> ZeroState:
        """A state of `step` from the outer parameters: to evaluate, export, or go on with synchronous training.

        The optimizer's state and statistics of the batch are the means over the slices; counters and keys are those of
        the first slice. What slices learned since they were last averaged is not in it. `state` stays.
        """
        self._check(state)
        return self._jit("to", self._synchronous, None, self.step.layout().shardings)(state)

    def evaluator(self, fun: Loss | None = None, *, ema: bool = False) -> Callable[..., Any]:
        """As `step.evaluator`, of the outer parameters: a function of (state, batch, rng=None) that changes nothing.

        Statistics of the batch are the means over the slices. No optimizer state is made for it, as `synchronous` does.
        """
        evaluate = self.step.evaluator(fun, ema=ema)
        run = jax.jit(lambda state, batch, rng: evaluate(self._synchronous(state), batch, rng))

        def call(state: ZeroState, batch: Batch, rng: PRNGKey | None = None) -> Any:
            check_is_state(state)
            with state_explained(state, self.layout()):
                return run(state, batch, rng)

        return in_any_context(call, at=self)

    def params(self, state: ZeroState) -> Params:
        """The outer parameters in their true shapes, and the frozen ones."""
        return self.step.params(self.synchronous(state))

    @in_any_context
    def resized(self, state: ZeroState, before: "DiLoCoStep") -> ZeroState:
        """The state of `before`, of another number of slices or on other devices, as one of this step; `state` stays.

        Slices that are new are copies of those that there were, in turn, with random keys of their own; of slices that
        leave, what they learned since they were last averaged is lost: resize after an outer step. `before` must be of
        the same model and optimizer; its slices may have another size. Call `layout(batch)` of this step first.
        """
        if not isinstance(before, DiLoCoStep):
            raise UsageError(f"before is a {type(before).__name__}: give the DiLoCoStep that the state is of, or make "
                             "a state of a plain step one with from_synchronous(state).")
        before._check(state)
        picked = jax.jit(lambda state: self._resized(state, before))(before.layout().load(state))
        layout = self.layout()
        here = jax.tree.map(
            lambda shape, like, leaf: jax.device_put(leaf, layout.true_sharding(shape, like)),
            *(dataclasses.replace(tree, weights=None) for tree in (layout.stored_shapes, layout.state)), picked)

        def store(state: ZeroState) -> ZeroState:
            stored = jax.tree.map(lambda shape, leaf: shape.store(leaf),
                                  dataclasses.replace(layout.stored_shapes, weights=None), state)
            return dataclasses.replace(stored, weights=gather_compute_params(
                jax.tree.map(jax.lax.with_sharding_constraint, stored.params, layout.gradients), layout))

        return jax.jit(store, out_shardings=layout.shardings)(here)

    @in_any_context
    def __call__(self, state: ZeroState, batch: Batch) -> tuple[ZeroState, Metrics]:
        """One step of every slice, and the outer step of the fragment that is due: (new state, metrics).

        `state` is donated. The metrics are those of the slices' steps, each with a leading dim of the slices. Which
        fragment is due follows from `state.step`, which is waited for where `state` is not what the last call returned.
        Raises ValueError in the user's own `jit`, where that is not known.
        """
        check_is_state(state)
        if is_traced(state, batch):
            raise UsageError("A DiLoCo step inside of jit: which fragment is due depends on the step's number, and "
                             "each is a program of its own: call the step outside.")
        check_values(batch, self.step.loss, self.step.batches)
        self.step.batches.check(batch, self.step.accumulation.microbatches)
        number = self._last[1] if self._last[0] is state.step else int(state.step)
        try:
            state, metrics = self._of(self.due(number), batch)(state, batch)
        except (TypeError, ValueError) as error:
            self._check(state)  # what does not fit gets its own message
            if "spmd_axis_name" in str(error):
                raise UsageError(f"A jax.shard_map of the model or its loss names the axis {self.axes.slices!r} of the "
                                 "slices, between which nothing is sent: let it name axes of one slice.") from error
            raise
        self._last = state.step, number + 1
        return state, metrics

    def of_slices(self, num_slices: int) -> "DiLoCoStep":
        """What stores the states of `num_slices` slices on this mesh, for `Checkpoints.restore`; it does not train.

        `resized` makes a state of this step of what was restored.
        """
        return DiLoCoStep(self.step, self.outer, whole("num_slices", num_slices, 1))

    def _check(self, state: ZeroState) -> None:
        check_is_state(state)
        check_state(state, self.layout())


def make_diloco_step(
    step: ZeroTrainStep, *, every: int, learning_rate: float = 0.7, momentum: float = 0.9, nesterov: bool = True,
    fragments: int = 1, overlap: bool = False, mix: float | None = None, dtype: Any = "float32",
) -> DiLoCoStep:
    """`step`, taken by each slice of the mesh axis `replica` by itself; the slices are averaged once in `every` steps.

    DiLoCo (arXiv 2311.08105), and with `fragments` and `overlap` its streaming form (arXiv 2501.18512). Between slices
    nothing is sent in a step, but the outer gradients of one fragment where one is due: 2 (R - 1) / R of its bytes on
    each device for R slices, over the number of devices of a slice.

    Args:
      step: of `make_zero_train_step` at any stage, on a mesh with an axis `replica` of the slices.
      every: H, the steps between two averages of a parameter.
      learning_rate: of the outer optimizer, SGD. With 1, and no momentum, the slices take the mean of their parameters
        (local SGD, federated averaging).
      momentum: of the outer optimizer.
      nesterov: whether that is Nesterov's.
      fragments: in how many parts the parameters are averaged, each after a step of its own: the traffic is spread
        evenly over the steps. At most `every`, and as many as there are parameters; stacked ones are cut by layer.
      overlap: a fragment is sent while the slices compute the next step, and arrives at its end: in parts, one in each
        round of loops over layers; in one where the model has none, or all-reduces block (`DiLoCoStep.num_parts`).
      mix: with `overlap`, what remains of a slice's own parameters where the outer ones arrive; default 0.5.
      dtype: in which outer gradients are sent: "float32" or "bfloat16". Parameters and momentum stay in float32.

    Raises ValueError for what cannot take effect: no axis `replica`, a guard, a moving average, more fragments than
    parts.
    """
    if not isinstance(step, ZeroTrainStep):
        raise UsageError(f"step={shown(step)} is a {type(step).__name__}: give the step that "
                         "zero_jax.make_zero_train_step returned.")
    return DiLoCoStep(step, OuterOptions(every, learning_rate, momentum, nesterov, fragments, overlap, mix, dtype))
