"""What one can ask of a DiLoCo step without a state: its fragments, and its programs beside their contracts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.contract.params import min_itemsize
from zero_jax.contract.report import Contract, Report
from zero_jax.diloco.fragments import Fragment, due, real_dtype
from zero_jax.diloco.functions import DiLoCoFunctions
from zero_jax.diloco.options import OuterOptions
from zero_jax.distributed.agreement import spans_processes
from zero_jax.errors import UsageError
from zero_jax.jaxpr.equations import trace
from zero_jax.sharding.auto_axes import in_any_context
from zero_jax.sharding.batch_layout import hashable
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.stages import Stage
from zero_jax.state import ZeroState
from zero_jax.step.compiled import CompiledStep
from zero_jax.step.losses import takes_key
from zero_jax.step.options import StepOptions
from zero_jax.step.program import Program
from zero_jax.tree import named_leaves
from zero_jax.typing import Batch, Loss, Metrics
from zero_jax.xla.overlap import concurrent_options


class InspectableDiLoCo(DiLoCoFunctions):
    """The programs of a DiLoCo step, as text and as data. Every `batch` may be abstract: `jax.ShapeDtypeStruct`s."""

    def __init__(self, step: Any, outer: Any, num_slices: int | None = None):
        """As `DiLoCoFunctions`."""
        super().__init__(step, outer, num_slices)
        self._jitted: dict[Any, Any] = {}

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

    def fragments(self, batch: Batch = None) -> tuple[Fragment, ...]:
        """By the names of parameters, what of each is averaged together, in the order in which they are."""
        self.layout(batch)
        return self._fragments

    def describe(self, batch: Batch = None) -> str:
        """The layout as text, then a line for each fragment: when it is averaged, and its bytes between slices."""
        lines, outer = [self.layout(batch).describe()], self.outer
        for index, fragment in enumerate(self._fragments):
            at = next(number for number in range(1, outer.every + 1)
                      if due(number, every=outer.every, fragments=outer.fragments) == index)
            parts = self.num_parts(index, batch)
            beside = f", in {parts} parts beside the loops of the next step" if parts > 1 else (
                ", beside the next step" * outer.overlap)
            lines.append(
                f"fragment {index}: after step {at} of every {outer.every}"
                f"{beside}, {fragment_bytes(fragment, self.axes, outer):,.0f} bytes sent by each device "
                f"({len(fragment)} parameters)")
        return "\n".join(lines)

    def fragment_bytes(self, fragment: int | None, batch: Batch = None) -> float:
        """Bytes that each device sends between slices where the fragment of this number is averaged; 0 for None."""
        return fragment_bytes(None if fragment is None else self.fragments(batch)[fragment], self.axes, self.outer)

    def due(self, steps: int) -> int | None:
        """The fragment that the program of the next step averages, once `steps` are taken; None: none."""
        return due(steps + (not self.outer.overlap), every=self.outer.every, fragments=self.outer.fragments)

    def abstract_state(self, batch: Batch) -> ZeroState:
        """The state as `jax.ShapeDtypeStruct`s with shardings, for compiling."""
        return self.layout(batch).state

    def contract(self, batch: Batch, fragment: int | None = None) -> Contract:
        """What a program may send: that of a slice's step, and between slices a fragment's outer gradients, or nothing.

        fragment: the number of the fragment that the program averages; None: the program of a step without.
        """
        inner = self._inner.contract(self._batch_of_one(batch))
        piece = None if fragment is None else self.fragments(batch)[fragment]
        return changed_contract(inner, piece, self._inner.layout(), self.outer, self.num_parts(fragment, batch))

    @in_any_context
    def lower(self, batch: Batch, fragment: int | None = None) -> jax.stages.Lowered:
        """A program lowered for `batch`. fragment: as `contract`."""
        return self._of(fragment, batch).lower(self.abstract_state(batch), self.step.abstract_batch(batch))

    def compile(self, batch: Batch, fragment: int | None = None) -> jax.stages.Compiled:
        """`lower`, compiled for the mesh's devices, live or of a target topology; calls of the step do not use it."""
        return self._inner._compiled(lambda: self.lower(batch, fragment), lambda: self._compiler_options(fragment))

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

    def evaluator(self, fun: Loss | None = None, *, ema: bool = False) -> Any:
        """See `DiLoCoStep.evaluator`."""
        raise NotImplementedError

    def verify(self, batch: Batch) -> dict[int | None, Report]:
        """Compiles every program and checks it against its contract; reports by fragment, None for the one of none.

        Raises ContractError (a ValueError) where a step without an outer one sends anything between slices, an outer
        step more or fewer bytes than its fragment has in the declared dtype, or a slice's step breaks its own contract.
        """
        programs = (None, *range(self.outer.fragments))
        return {fragment: self.compiled_step(batch, fragment).verify() for fragment in programs}

    def _compiler_options(self, fragment: int | None) -> dict[str, Any]:
        options = self._inner._compiler_options
        return options | concurrent_options(self.mesh.devices.flat[0]) if self.num_parts(fragment) > 1 else options

    def _of(self, fragment: int | None, batch: Batch) -> Any:
        """The jitted program that averages `fragment` (None: none)."""
        if self.num_slices != self.axes.size(self.axes.slices):
            raise UsageError(f"This is of {self.num_slices} slices, and the mesh {self.axes.sizes} has others: make a "
                             "state of the mesh's with resized(state, this).")
        layout = self.layout(batch)
        metrics = NamedSharding(self.mesh, P(self.axes.slices))

        def program(state: ZeroState, batch: Batch) -> tuple[ZeroState, Metrics]:
            return self._program(fragment, state, batch)

        of_batch = self.step.batches.shardings(batch)
        return self._jit((fragment, hashable(of_batch)), program, (layout.shardings, of_batch),
                         (layout.shardings, metrics), fragment, donate_argnums=0)

    def _jit(self, key: Any, function: Any, in_shardings: Any, out_shardings: Any, fragment: int | None = None,
             **options: Any) -> Any:
        if key not in self._jitted:
            self._jitted[key] = Program(
                function, lambda: self._compiler_options(fragment), self._inner._does_without,
                self._inner._uses_copy_engines, shared=spans_processes(self.mesh), out_shardings=out_shardings,
                **({"in_shardings": in_shardings} if in_shardings else {}), **options)
        return self._jitted[key]


def changed_contract(contract: Contract, fragment: Fragment | None, layout: Layout, options: OuterOptions,
                     parts: int = 1) -> Contract:
    """The contract of the program that averages `fragment`, from that of a slice's step and the layout of one slice.

    parts: in how many it is sent; several are sent in the rounds of loops. At stages 0 to 2 the slices gather the new
    parameters that they store whole.
    """
    axes, min_bytes = layout.axes, min_itemsize(layout.axes.platform)
    gathered = sum(
        fragment[name].elements * max(real_dtype(leaf.dtype).itemsize, min_bytes) * (axes.zero_size - 1)
        for name, leaf in named_leaves(layout.state.params)
        if fragment is not None and name in fragment and leaf.sharding.spec != fragment[name].spec)
    sent = fragment_bytes(fragment, axes, options)
    changes = {"slices": sent, "outer": gathered}
    return dataclasses.replace(contract, slices_in_loops=parts > 1, budgets=tuple(
        dataclasses.replace(budget, communication_bytes=changes.get(budget.key, budget.communication_bytes))
        for budget in contract.budgets))


def fragment_bytes(fragment: Fragment | None, axes: MeshAxes, options: OuterOptions) -> float:
    """Bytes that each device sends to sum a fragment's outer gradients over the slices, as rings do; 0 for none."""
    if fragment is None:
        return 0.0
    itemsize = max(jnp.dtype(options.dtype).itemsize, min_itemsize(axes.platform))
    num_slices = axes.size(axes.slices)
    return 2 * (num_slices - 1) / num_slices * itemsize * sum(piece.elements for piece in fragment.values())
