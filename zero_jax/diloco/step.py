"""`DiLoCoStep`: a train step of slices that train by themselves, how it is made, and which program runs when."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.arguments import shown, whole
from zero_jax.contract.params import min_itemsize
from zero_jax.contract.report import Contract, Report
from zero_jax.diloco.fragments import Fragment, due, real_dtype
from zero_jax.diloco.functions import DiLoCoFunctions
from zero_jax.diloco.options import OuterOptions
from zero_jax.errors import UsageError
from zero_jax.jaxpr.equations import trace
from zero_jax.layout.batch_layout import BatchLayout, hashable
from zero_jax.layout.compute_params import gather_compute_params
from zero_jax.layout.layout import Layout
from zero_jax.sharding.auto_axes import in_any_context
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.stages import Stage
from zero_jax.state import ZeroState
from zero_jax.step.any_step import AnyStep
from zero_jax.step.call_checks import check_is_state, check_state, check_values, is_traced, state_explained
from zero_jax.step.compiled import CompiledStep
from zero_jax.step.losses import takes_key
from zero_jax.step.options import StepOptions
from zero_jax.step.programs import Programs
from zero_jax.step.step import ZeroTrainStep
from zero_jax.tree import named_leaves
from zero_jax.typing import Batch, Loss, Metrics, Params, PRNGKey, Pytree
from zero_jax.xla.overlap import concurrent_options


class DiLoCoStep(AnyStep):
    """A train step of slices that train by themselves: `init`, then `state, metrics = step(state, batch)`.

    Batches are those of the step that it was made from: each slice gets an equal part of the examples. A state is a
    `ZeroState` whose leaves have a leading dim of the slices, but for `step`, which counts the steps of all, and
    `frozen`; its `opt_state` has the slices' ("inner") and the outer one: {"params", "momentum"}, in float32, sharded
    over a slice and the same in all of them. One program is compiled for steps that send nothing, and one for each
    fragment. `zero_jax.Checkpoints` saves and restores these states as those of any step.
    """

    def __init__(self, functions: DiLoCoFunctions):
        """functions: what it compiles."""
        self.functions, self.programs = functions, Programs(functions.inner.functions)
        self._last: tuple[Any, int] = (None, 0)

    def __repr__(self) -> str:
        return (f"DiLoCoStep(stage={self.stage.number}, mesh={self.axes.sizes}, every={self.outer.every}, "
                f"fragments={self.outer.fragments})")

    @property
    def step(self) -> ZeroTrainStep:
        """The step of the slices together, as `make_zero_train_step` made it: synchronous training."""
        return self.functions.step

    @property
    def outer(self) -> OuterOptions:
        """What `make_diloco_step` was asked for."""
        return self.functions.outer

    @property
    def axes(self) -> MeshAxes:
        """The mesh and the roles of its axes; `axes.slices` is that of the slices."""
        return self.functions.axes

    @property
    def num_slices(self) -> int:
        """How many slices train by themselves."""
        return self.functions.num_slices

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.axes.mesh

    @property
    def stage(self) -> Stage:
        """The row of the stage table."""
        return self.step.stage

    @property
    def options(self) -> StepOptions:
        """What `make_zero_train_step` was asked for."""
        return self.step.options

    @property
    def batches(self) -> BatchLayout:
        """How a batch is split over the mesh."""
        return self.step.batches

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a leaf of the batch."""
        return self.step.batch_sharding

    def layout(self, batch: Batch = None) -> Layout:
        """How every leaf of the state is stored; `batch` may be left out once known."""
        return self.functions.layout(batch)

    def num_parts(self, fragment: int | None, batch: Batch = None) -> int:
        """In how many parts the fragment of this number is sent: with `overlap` one in each iteration over layers.

        1 without, where all-reduces block, and where the step has no such loops or a fragment next to nothing to send.
        """
        return self.functions.num_parts(fragment, batch)

    def batch_target(self, *, steps: bool) -> Callable[[str, Any], NamedSharding]:
        """Where a leaf of a batch belongs, as `step.batch_target`."""
        return self.step.batch_target(steps=steps)

    def init(self, rng: PRNGKey, batch: Batch, *, params: Pytree | None = None) -> ZeroState:
        """The state before the first step, in which all slices are alike but for their random keys; as `step.init`."""
        self.layout(batch)
        return self.from_synchronous(self.step.init(rng, batch, params=params))

    def from_synchronous(self, state: ZeroState) -> ZeroState:
        """A state whose slices go on from `state`, one of `step`; the outer momentum is zero. `state` stays."""
        check_is_state(state)
        check_state(state, self.step.layout())
        return self.programs.get("from", self.functions.from_synchronous, None, self.layout().shardings)(state)

    def synchronous(self, state: ZeroState) -> ZeroState:
        """A state of `step` from the outer parameters: to evaluate, export, or go on with synchronous training.

        The optimizer's state and statistics of the batch are the means over the slices; counters and keys are those of
        the first slice. What slices learned since they were last averaged is not in it. `state` stays.
        """
        self._check(state)
        return self.programs.get("to", self.functions.synchronous, None, self.step.layout().shardings)(state)

    def evaluator(self, fun: Loss | None = None, *, ema: bool = False) -> Callable[..., Any]:
        """As `step.evaluator`, of the outer parameters: a function of (state, batch, rng=None) that changes nothing.

        Statistics of the batch are the means over the slices. No optimizer state is made for it, as `synchronous` does.
        """
        evaluate = self.step.evaluator(fun, ema=ema)
        run = jax.jit(lambda state, batch, rng: evaluate(self.functions.synchronous(state), batch, rng))

        def call(state: ZeroState, batch: Batch, rng: PRNGKey | None = None) -> Any:
            check_is_state(state)
            with state_explained(state, self.layout()):
                return run(state, batch, rng)

        return in_any_context(call, at=self)

    def params(self, state: ZeroState) -> Params:
        """The outer parameters in their true shapes, and the frozen ones."""
        return self.step.params(self.synchronous(state))

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
        picked = jax.jit(lambda state: self.functions.resized(state, before.functions))(before.layout().load(state))
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
        with state_explained(state, self.layout(batch)):
            state, metrics = self._of(self.due(number), batch)(state, batch)
        self._last = state.step, number + 1
        return state, metrics

    # Its programs, as text and as data. Every `batch` may be abstract: `jax.ShapeDtypeStruct`s.

    def fragments(self, batch: Batch = None) -> tuple[Fragment, ...]:
        """By the names of parameters, what of each is averaged together, in the order in which they are."""
        self.layout(batch)
        return self.functions.fragments

    def describe(self, batch: Batch = None) -> str:
        """The layout as text, then a line for each fragment: when it is averaged, and its bytes between slices."""
        lines, outer = [self.layout(batch).describe()], self.outer
        for index, fragment in enumerate(self.functions.fragments):
            at = next(number for number in range(1, outer.every + 1)
                      if due(number, every=outer.every, fragments=outer.fragments) == index)
            parts = self.num_parts(index, batch)
            beside = f", in {parts} parts beside the loops of the next step" if parts > 1 else (
                ", beside the next step" * outer.overlap)
            lines.append(
                f"fragment {index}: after step {at} of every {outer.every}"
                f"{beside}, {self.fragment_bytes(index, batch):,.0f} bytes sent by each device "
                f"({len(fragment)} parameters)")
        return "\n".join(lines)

    def fragment_bytes(self, fragment: int | None, batch: Batch = None) -> float:
        """Bytes that each device sends between slices where the fragment of this number is averaged; 0 for None.

        As rings sum its outer gradients.
        """
        if fragment is None:
            return 0.0
        itemsize = max(jnp.dtype(self.outer.dtype).itemsize, min_itemsize(self.axes.platform))
        num_slices = self.axes.size(self.axes.slices)
        elements = sum(chunk.elements for chunk in self.fragments(batch)[fragment].values())
        return 2 * (num_slices - 1) / num_slices * itemsize * elements

    def due(self, steps: int) -> int | None:
        """The fragment that the program of the next step averages, once `steps` are taken; None: none."""
        return due(steps + (not self.outer.overlap), every=self.outer.every, fragments=self.outer.fragments)

    def abstract_state(self, batch: Batch) -> ZeroState:
        """The state as `jax.ShapeDtypeStruct`s with shardings, for compiling."""
        return self.layout(batch).state

    def contract(self, batch: Batch, fragment: int | None = None) -> Contract:
        """What a program may send: that of a slice's step, and between slices a fragment's outer gradients, or nothing.

        fragment: the number of the fragment that the program averages; None: the program of a step without. Several
        parts of it are sent in the iterations of loops.
        """
        inner = self.functions.inner.contract(self.functions.batch_of_one(batch))
        chunks = {} if fragment is None else self.fragments(batch)[fragment]
        layout, min_bytes = self.functions.inner.layout(), min_itemsize(self.axes.platform)
        gathered = sum(  # at stages 0 to 2 the slices gather the new parameters that they store whole
            chunks[name].elements * max(real_dtype(leaf.dtype).itemsize, min_bytes) * (layout.axes.zero_size - 1)
            for name, leaf in named_leaves(layout.state.params)
            if name in chunks and leaf.sharding.spec != chunks[name].spec)
        changes = {"slices": self.fragment_bytes(fragment, batch), "outer": gathered}
        budgets = tuple(dataclasses.replace(budget, communication_bytes=changes.get(
            budget.key, budget.communication_bytes)) for budget in inner.budgets)
        return dataclasses.replace(inner, slices_in_loops=self.num_parts(fragment, batch) > 1, budgets=budgets)

    def lower(self, batch: Batch, fragment: int | None = None) -> jax.stages.Lowered:
        """A program lowered for `batch`. fragment: as `contract`."""
        return self._of(fragment, batch).lower(self.abstract_state(batch), self.step.abstract_batch(batch))

    def compile(self, batch: Batch, fragment: int | None = None) -> jax.stages.Compiled:
        """`lower`, compiled for the mesh's devices, live or of a target topology; calls of the step do not use it."""
        return self.programs.compile(lambda: self.lower(batch, fragment), lambda: self._more_options(fragment))

    def compiled_step(self, batch: Batch, fragment: int | None = None) -> CompiledStep:
        """`compile`, as data. fragment: as `contract`."""
        return self.as_data(self.compile(batch, fragment), batch, fragment)

    def as_data(self, compiled: jax.stages.Compiled, batch: Batch, fragment: int | None = None) -> CompiledStep:
        """What `compile` returned for `batch` and `fragment`, as data."""
        return CompiledStep(compiled.as_text() or "", compiled.memory_analysis(), self.layout(batch),
                            self.contract(batch, fragment))

    def trace_forward(self, batch: Batch) -> Any:
        """The jaxpr of the loss of the outer parameters, in evaluation, of the whole state."""
        key = (jax.eval_shape(lambda: jax.random.key(0)),) if takes_key(self.step.loss) else ()
        return trace(self.evaluator(), self.abstract_state(batch), self.step.abstract_batch(batch), *key)

    def verify(self, batch: Batch) -> dict[int | None, Report]:
        """Compiles every program and checks it against its contract; reports by fragment, None for the one of none.

        Raises ContractError (a ValueError) where a step without an outer one sends anything between slices, an outer
        step more or fewer bytes than its fragment has in the declared dtype, or a slice's step breaks its own contract.
        """
        programs = {fragment: self.compiled_step(batch, fragment) for fragment in (None, *range(self.outer.fragments))}
        return {fragment: program.verify().timed(program.timing) for fragment, program in programs.items()}

    def of_slices(self, num_slices: int) -> "DiLoCoStep":
        """What stores the states of `num_slices` slices on this mesh, for `Checkpoints.restore`; it does not train.

        `resized` makes a state of this step of what was restored.
        """
        return DiLoCoStep(DiLoCoFunctions(self.step, self.outer, whole("num_slices", num_slices, 1)))

    def _more_options(self, fragment: int | None) -> dict[str, Any]:
        return concurrent_options(self.mesh.devices.flat[0]) if self.num_parts(fragment) > 1 else {}

    def _of(self, fragment: int | None, batch: Batch) -> Any:
        """The jitted program that averages `fragment` (None: none)."""
        if self.num_slices != self.axes.size(self.axes.slices):
            raise UsageError(f"This is of {self.num_slices} slices, and the mesh {self.axes.sizes} has others: make a "
                             "state of the mesh's with resized(state, this).")
        layout = self.layout(batch)
        metrics = NamedSharding(self.mesh, P(self.axes.slices))

        def program(state: ZeroState, batch: Batch) -> tuple[ZeroState, Metrics]:
            return self.functions.step_and_outer(fragment, state, batch)

        of_batch = self.step.batches.shardings(batch)
        return self.programs.get(
            (fragment, hashable(of_batch)), program, (layout.shardings, of_batch), (layout.shardings, metrics),
            more_options=lambda: self._more_options(fragment), donate_argnums=0)

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
        iteration of loops over layers; in one where the model has none, or all-reduces block (`DiLoCoStep.num_parts`).
      mix: with `overlap`, what remains of a slice's own parameters where the outer ones arrive; default 0.5.
      dtype: in which outer gradients are sent: "float32" or "bfloat16". Parameters and momentum stay in float32.

    Raises ValueError for what cannot take effect: no axis `replica`, a guard, a moving average, more fragments than
    parts.
    """
    if not isinstance(step, ZeroTrainStep):
        raise UsageError(f"step={shown(step)} is a {type(step).__name__}: give the step that "
                         "zero_jax.make_zero_train_step returned.")
    outer = OuterOptions(every, learning_rate, momentum, nesterov, fragments, overlap, mix, dtype)
    return DiLoCoStep(DiLoCoFunctions(step, outer))
