"""A step before it runs: lowered, compiled, and checked against its contract, on live devices or target topologies."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
from jax.core import Tracer

from zero_jax.contract.verify import Contract, Report, contract_of
from zero_jax.distributed.agreement import check_same, devices_on_host, spans_processes
from zero_jax.jaxpr.equations import trace
from zero_jax.sharding.memory.disk_leaves import expanded
from zero_jax.sharding.memory.host_arrays import HOST
from zero_jax.sharding.memory.in_groups import in_groups
from zero_jax.sharding.memory.kinds import check_capacity
from zero_jax.state import FROM_PARAMS, ZeroState
from zero_jax.step.call_checks import check_values, loss_errors_explained
from zero_jax.step.compiled import CompiledStep
from zero_jax.step.functions import StepFunctions
from zero_jax.step.overlap import overlaps_by_default, step_overlap_options, with_overlap
from zero_jax.step.program import (
    Program,
    may_be_of_overlap,
    warn_without_copy_engines,
    warn_without_overlap,
)
from zero_jax.tree import named_leaves
from zero_jax.typing import Batch, Loss, PRNGKey
from zero_jax.xla.devices import compiled_for
from zero_jax.xla.host_copies import WrongRows, check_rows
from zero_jax.xla.host_memory import lists_memories, set_memory_kinds


class InspectableStep(StepFunctions):
    """What one can ask of a step without a state. Every `batch` may be abstract: `jax.ShapeDtypeStruct`s."""

    _programs: dict[Any, Any]

    @functools.cached_property
    def _compiler_options(self) -> dict[str, Any]:
        """XLA's options for the programs of the step, whose layout is known."""
        return self.options.compiler_options(self.axes) | step_overlap_options(self.options, self.layout())

    def abstract_state(self, batch: Batch) -> ZeroState:
        """The state as `jax.ShapeDtypeStruct`s with shardings, for restoring and for compiling."""
        return self.layout(batch).state

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The step lowered for `batch` (arrays or `jax.ShapeDtypeStruct`s); its mesh may be of a target topology."""
        with loss_errors_explained(self._loss, batch):
            lowered = self._jit(batch).lower(self.abstract_state(batch), self.abstract_batch(batch))
        kinds = self._memory_kinds(batch)
        return set_memory_kinds(lowered, kinds, kinds) if self._writes_memory_kinds else lowered

    def without_overlap(self) -> Self:
        """The same step without `overlap` and `prefetch`, to compare.

        A step of its own: what is lowered with compiler options keeps them, whatever it is compiled with.
        """
        other = type(self)(self._model, self._optimizer, self._loss, self.axes,
                           dataclasses.replace(self.options, overlap=False, prefetch=False), self._given_params)
        other._layout = self._layout and with_overlap(self._layout, other.options)
        return other

    def compile(self, batch: Batch) -> jax.stages.Compiled:
        """`lower`, compiled for the mesh's devices, live or of a target topology; calls of the step do not use it."""
        return self._compiled(lambda: self.lower(batch), lambda: self._compiler_options)

    def _compiled(self, lower: Callable[[], jax.stages.Lowered], options: Callable[[], dict[str, Any]]
                 ) -> jax.stages.Compiled:
        """`lower()` compiled with `options()`, and once more where the step `_does_without` what it asked for."""
        def once() -> jax.stages.Compiled:
            compiled = compiled_for(lower(), self.mesh.devices.flat[0], options())
            if self._uses_copy_engines():
                check_rows(compiled.as_text() or "")
            return compiled

        try:
            return once()
        except (jax.errors.JaxRuntimeError, WrongRows) as error:
            if not self._does_without(error):
                raise
            return once()

    def _uses_copy_engines(self) -> bool:
        return self.options.uses_copy_engines(self.axes)

    def _does_without(self, error: Exception) -> bool:
        """Whether from here on it has none of XLA's options that this error may be of: see `program`."""
        if isinstance(error, WrongRows):
            warn_without_copy_engines(error)
            self.options = dataclasses.replace(self.options, copy_engines=False)
            del self.__dict__["_compiler_options"]
            return True
        if not (overlaps_by_default(self.options, self.layout()) and may_be_of_overlap(error)):
            return False
        warn_without_overlap(error)
        self.options = dataclasses.replace(self.options, overlap=False)
        self._layout = with_overlap(self.layout(), self.options)
        del self.__dict__["_compiler_options"]
        return True

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
            microbatch = self.batches.resized(batch, size)
            traced = self.trace_forward(microbatch)
            activations = self.options.activations(self.axes, size)
            activation_bytes = activations.communication_bytes(traced.jaxpr)
        return contract_of(layout, self.accumulation, self._optimizer, activation_bytes,
                           host_activations=self.options.partition_activations == "cpu",
                           partitioned=not self.options.is_local(self.axes))

    def trace_forward(self, batch: Batch) -> Any:
        """The jaxpr of the loss in evaluation, of the whole state."""
        key = jax.eval_shape(lambda: jax.random.key(0))  # Linen modules draw in evaluation, too, unless told not to
        state = expanded(self.layout(batch), self.abstract_state(batch))
        return trace(self.evaluator(), state, self.abstract_batch(batch), key)

    def verify(self, batch: Batch) -> Report:
        """Compiles the step and checks it against its contract: what is sent for what, beside what was promised.

        Raises ContractError (a ValueError) if it sends more, or does not do what its stage is for (leaves stay whole,
        gradients are summed whole or in fewer bits than declared, gathers stand in loops over time, nothing is sent for
        a parameter, the whole model is in memory), if scatters or gathers leave other rows on devices than the layout
        says, or a GPU would copy other rows of host memory than the program says: with the operation, its bytes, its
        source line and what to do. Where XLA's partitioner splits the gradient (`view="global"`), what it sends beyond
        the promise raises nothing: `Report.excess` tells it. It compiles the step alone; `multi`, `gradients`,
        `apply_gradients` and evaluators are programs of their own, of the same functions, and unchecked.
        """
        return self.compiled_step(batch).verify()

    def lower_init(self, batch: Batch) -> jax.stages.Lowered:
        """`init` lowered for `batch`, to see what it needs."""
        lowered = self._initializer(batch).lower(
            jax.eval_shape(lambda: jax.random.key(0)), jax.eval_shape(lambda: self._model.given),
            self.abstract_batch(batch))
        return set_memory_kinds(lowered, (), self._memory_kinds(batch)) if self._writes_memory_kinds else lowered

    @property
    def _writes_memory_kinds(self) -> bool:
        """Whether memory kinds are to be written on a lowered program, since JAX drops them for these devices."""
        return self.options.host_offload is not None and not lists_memories(self.mesh.devices.flat[0])

    @property
    def _offload_options(self) -> dict[str, Any]:
        """What `jax.jit` needs so that a program's arguments are the leaves of the state and the batch."""
        return {"keep_unused": True} if self._writes_memory_kinds else {}

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

    def _memory_kinds(self, batch: Batch) -> list[str | None]:
        """For each leaf of the state where it is stored; None: in device memory."""
        layout = self.layout(batch)
        return [HOST if name in layout.host else None for name, _ in named_leaves(layout.state)]

    def evaluator(self, fun: Loss | None = None, *, ema: bool = False) -> Any:
        """See `ZeroTrainStep.evaluator`."""
        raise NotImplementedError

    def _jit(self, batch: Batch) -> Any:
        raise NotImplementedError

    def _jit_once(self, key: Any, function: Any, in_shardings: Any, out_shardings: Any, **options: Any) -> Any:
        if key not in self._programs:
            self._programs[key] = Program(
                function, lambda: self._compiler_options, self._does_without, self._uses_copy_engines,
                shared=spans_processes(self.mesh),
                in_shardings=in_shardings, out_shardings=out_shardings, **options | self._offload_options)
        return self._programs[key]

    def _initializer(self, batch: Batch, *, params: bool = True) -> Any:
        """The compiled `init`; params: False leaves out the parameters and what follows from them, drawing none."""
        make, like = self._init_of(batch, params=params)
        return jax.jit(make, in_shardings=(None, None, self._batch_shardings(batch)),
                       out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))

    def _run_init(self, batch: Batch, *, params: bool) -> Any:
        """`_initializer` for running: what goes to host memory is made by several programs, one group after another."""
        check_values(batch, self._loss, self.batches)
        if self.options.host_offload is None:
            return self._initializer(batch, params=params)
        return in_groups(*self._init_of(batch, params=params),
                         in_shardings=(None, None, self._batch_shardings(batch)))

    def _init_of(self, batch: Batch, *, params: bool) -> tuple[Any, ZeroState]:
        """(The function that makes the state, its result as `jax.ShapeDtypeStruct`s)."""
        kept = {} if params else dict.fromkeys(FROM_PARAMS)

        def make(rng: PRNGKey, given: Any, batch: Batch) -> ZeroState:
            return dataclasses.replace(self._init(rng, given, batch), **kept)

        return make, dataclasses.replace(self.layout(batch).state, **kept)
