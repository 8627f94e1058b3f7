"""All that `make_zero_train_step` was asked for beside model, optimizer, loss and mesh, validated in one place."""

import dataclasses
import math
from typing import Any, Literal, TypeAlias

from zero_jax.arguments import is_number, is_one_of, shown
from zero_jax.errors import UsageError
from zero_jax.precision import Precision
from zero_jax.sharding.batch import Accumulation
from zero_jax.sharding.batch_layout import BatchLayout, BatchRule
from zero_jax.sharding.make_layout import LayoutPolicy
from zero_jax.sharding.memory.kinds import Offload, check_host_memory
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.quantized.policy import Communication
from zero_jax.sharding.tensor_rules import TensorRule
from zero_jax.sharding.tiling import Tiling
from zero_jax.stages import Stage
from zero_jax.step.guard import Guard
from zero_jax.transforms.activation_partitioning import Activations
from zero_jax.transforms.remat import Remat
from zero_jax.typing import AxisNames, Pattern
from zero_jax.xla.devices import combine_options
from zero_jax.xla.host_copies import copy_options, host_prefetch_options
from zero_jax.xla.overlap import Overlap, overlap_options, prefetch_options

View: TypeAlias = Literal["auto", "global", "local"]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The arguments of `make_zero_train_step` of the same names; `accumulation` has three: `accumulate` and so on.

    `copy_engines` is none of them: a step sets it to False once XLA has compiled other rows of host memory for these.

    What is wrong on any mesh raises ValueError here, what is wrong on one mesh in `check`.
    """

    stage: Stage
    precision: Precision = Precision()
    accumulation: Accumulation = Accumulation()
    frozen: tuple[Pattern, ...] = ()
    ema: float | None = None
    guard: Guard | None = None
    tensor_rules: tuple[TensorRule | tuple[Any, ...], ...] = ()
    sequence_parallel: bool = False
    remat: Remat | None = None
    partition_activations: bool | str = False
    hpz_axes: AxisNames = ()
    combine_bytes: int | None = None
    overlap: Overlap = "auto"
    prefetch: bool = False
    batch_specs: tuple[BatchRule, ...] = ()
    communication: Communication | None = None
    offload: Offload | None = None
    tiling: Tiling | None = None
    view: View = "auto"
    copy_engines: bool = True

    def __post_init__(self) -> None:
        if self.ema is not None and not (is_number(self.ema) and 0 <= self.ema < 1):
            raise UsageError(f"ema={shown(self.ema)}: give a decay from 0 to below 1, as 0.999, or None.")
        if self.guard is not None and not isinstance(self.guard, Guard):
            raise UsageError(f"guard={shown(self.guard)} is a {type(self.guard).__name__}: give "
                             "zero_jax.Guard(skip=3), say, or None.")
        if not isinstance(self.sequence_parallel, bool):
            raise UsageError(f"sequence_parallel={shown(self.sequence_parallel)}: give True or False.")
        if not is_one_of(self.partition_activations, "cpu", True, False):
            raise UsageError(f"partition_activations={shown(self.partition_activations)}: give True (split over the "
                             "axis `tensor`) or \"cpu\" (and kept in the host's memory).")
        if not is_one_of(self.view, "auto", "global", "local"):
            raise UsageError(f"view={shown(self.view)}: give \"local\" (the gradient is one shard_map), \"global\" "
                             "(XLA partitions it) or \"auto\" (local, where that is built).")

    def check(self, axes: MeshAxes) -> None:
        """Raises ValueError for what cannot take effect on this mesh, at this stage."""
        unknown = [name for name in self.hpz_axes if name not in axes.zero]
        if unknown or self.hpz_axes and (self.stage.number < 3 or set(self.hpz_axes) == set(axes.zero)):
            raise UsageError(f"hpz_axes={self.hpz_axes} at stage {self.stage.number}: give some of the axes "
                             f"{axes.zero} that ZeRO shards over in the mesh {axes.sizes}, but not all, and stage 3.")
        hpz_size = math.prod(map(axes.size, self.hpz_axes))
        if self.hpz_axes and hpz_size == axes.zero_size:
            raise UsageError(f"hpz_axes={self.hpz_axes} in the mesh {axes.sizes}, all of whose {axes.zero_size} "
                             "devices they span: backward would gather from all of them as without: leave it out.")
        if self.hpz_axes and hpz_size == 1:
            raise UsageError(f"hpz_axes={self.hpz_axes} in the mesh {axes.sizes} span one device, which would keep all "
                             "weights until backward: leave it out, or give gather=\"forward\", which does that.")
        gather = self.accumulation.gather
        if gather != "use" and self.stage.number < 3:
            raise UsageError(f"gather={gather!r} at stage {self.stage.number}: its parameters are whole on every "
                             "device all the time: leave gather out, or take stage 3, which with gather=\"forward\" "
                             "sends as little as stages 1 and 2.")
        if gather in ("forward", "step") and axes.zero_size == 1:
            raise UsageError(f"gather={gather!r} in the mesh {axes.sizes}, where ZeRO shards over one device: there is "
                             "nothing to gather: leave it out.")
        if gather == "forward" and self.hpz_axes:
            raise UsageError(f"gather=\"forward\" with hpz_axes={self.hpz_axes}: backward gathers nothing, inside of a "
                             "node or outside: leave one of them out.")
        if self.accumulation.once and axes.context in axes.zero:
            raise UsageError(f"reduce=\"once\" with an axis {axes.context!r}: each of its devices has a part of every "
                             "example, and no batch of its own: give reduce=\"every\".")
        if self.tensor_rules and not axes.tensor_enabled:
            raise UsageError(f"tensor_rules: the mesh {axes.sizes} has no axis {axes.tensor!r} to split over: build "
                             "it with zero_jax.make_mesh(tensor=...), or leave tensor_rules out.")
        if self.communication is not None:
            self.communication.check(self.stage.number, axes, self.hpz_axes)
            if self.communication.weights is not None and self.hpz_axes and self.accumulation.gather != "use":
                raise UsageError(
                    f"gather={self.accumulation.gather!r} with hpz_axes={self.hpz_axes} and quantised weights: the "
                    "copy of a step would be decoded, and gathered inside of a node as it is: leave one of them out.")
        whole = self.stage.number < 3 or self.accumulation.gather == "step" and not self.hpz_axes
        if self.prefetch is True and whole:
            raise UsageError(f"prefetch=True at stage {self.stage.number} with gather={self.accumulation.gather!r}: no "
                             "layer gathers its parameters, which are whole: leave it out.")
        if self.tiling is not None:
            self._check_tiling(axes)
        if self.view == "local" and (missing := self._not_local(axes)):
            raise UsageError(f"view=\"local\" {missing[0]} is not built: leave view out, or that.")
        if not self.is_local(axes):
            self._check_global(axes)
        # Each of these raises for what it cannot be made of.
        BatchLayout(axes, self.batch_specs)
        if self.host_offload:
            check_host_memory(axes)
            if self.host_offload.parameters == "host":
                self._check_host_params()
            if self.host_offload.gradients == "host":
                self._check_host_gradients()
        self.activations(axes, 1)
        # Whatever the layout will be.
        self.compiler_options(axes)
        overlap_options(axes.mesh.devices.flat[0], self.overlap, scatters=self.stage.shards_optimizer)
        prefetch_options(axes.mesh.devices.flat[0], self.prefetch, self.overlap)

    def _whole_weights(self) -> tuple[tuple[bool, str, str], ...]:
        """(Whether it is asked for, what, why) of all that keeps parameters on the devices beside host memory."""
        return (
            *self._whole_gradients(),
            (bool(self.hpz_axes), f"with hpz_axes={self.hpz_axes}",
             "what forward keeps for backward would be on the devices: leave hpz_axes out"),
            (self.communication is not None, "with communication=",
             "what is encoded before the loop over layers would be on the devices: leave communication out"))

    def _whole_gradients(self) -> tuple[tuple[bool, str, str], ...]:
        """Those of them that keep whole weights or gradients on the devices."""
        number, accumulation = self.stage.number, self.accumulation
        return (
            (number < 3, f"at stage {number}", "its parameters are whole on every device: take stage 3"),
            (accumulation.gather != "use", f"with gather={accumulation.gather!r}",
             "a copy of all parameters would be gathered on the devices: leave gather out"),
            (accumulation.once, "with reduce=\"once\"",
             "a whole gradient would be on every device: give reduce=\"every\""))

    def _check_host_params(self) -> None:
        """Raises ValueError for what keeps whole or gathered parameters on the devices beside those in host memory."""
        for is_wrong, what, why in self._whole_weights():
            if is_wrong:
                raise UsageError(f"offload=\"parameters\" {what}: {why}, or give offload=\"optimizer\".")

    def _check_host_gradients(self) -> None:
        """Raises ValueError for what keeps gradients on the devices, or needs all of them there."""
        for is_wrong, what, why in (
                *self._whole_weights(),
                (self.tiling is not None, "with tiling=",
                 "the gradient of a weight in tiles is made tile by tile on the device: leave tiling out"),
                (self.partition_activations == "cpu", "with partition_activations=\"cpu\"",
                 "what backward reads and writes in host memory is not counted apart: give remat=\"full\" alone")):
            if is_wrong:
                raise UsageError(f"Offload(gradients=\"host\") {what}: {why}, or leave gradients out.")

    def is_local(self, axes: MeshAxes) -> bool:
        """Whether the gradient is one `jax.shard_map` on this mesh: else XLA partitions it."""
        return self.view == "local" or self.view == "auto" and not self._not_local(axes)

    def _check_global(self, axes: MeshAxes) -> None:
        """Raises UsageError for what the partitioner's view does not have."""
        why = self._not_local(axes) or ["with view=\"global\""]
        for what in self.needs_local:
            raise UsageError(f"{what} {why[0]}: each device's own sums are known in the local view alone. Leave one of "
                             "them out.")

    @property
    def needs_local(self) -> list[str]:
        """What of these options the partitioner's view does not have."""
        return [what for is_asked, what in (
            (self.accumulation.once, "reduce=\"once\""),
            (self.communication is not None and bool(self.communication.gradients), "communication= of gradients"))
            if is_asked]

    def _not_local(self, axes: MeshAxes) -> list[str]:
        """What the local view does not have yet."""
        return [what for is_asked, what in (
                (axes.tensor_enabled and bool(axes.slices), f"with DiLoCo in the mesh {axes.sizes}"),
                (axes.tensor_enabled and bool(self.partition_activations),
                 f"with partition_activations in the mesh {axes.sizes}"),
                (self.tiling is not None, "with tiling")) if is_asked]

    def _check_tiling(self, axes: MeshAxes) -> None:
        """Raises ValueError for what gathers whole weights, or sums whole gradients, whatever their products do."""
        host = self.host_offload is not None and self.host_offload.parameters == "host"
        communication = self.communication
        for is_wrong, what, why in (
                *self._whole_gradients(),
                (communication is not None and bool(communication.gradients), "with communication's gradients",
                 "the gradient of a tile is sent as it is: give zero_jax.Communication(weights=...) alone"),
                (communication is not None and bool(self.hpz_axes),
                 f"with hpz_axes={self.hpz_axes} and quantised weights",
                 "the copy inside of a node would be codes of whole shards: leave hpz_axes or communication out"),
                (self.sequence_parallel, "with sequence_parallel",
                 "the products with split weights gather the sequence themselves: leave sequence_parallel out"),
                (axes.zero_size == 1 and not host, f"in the mesh {axes.sizes}",
                 "ZeRO shards over one device, which has the weights and the gradients whole: give more devices, or "
                 "offload=\"parameters\", with which tiles come up from host memory")):
            if is_wrong:
                raise UsageError(f"tiling {what}: {why}, or leave tiling out.")

    @property
    def layout_policy(self) -> LayoutPolicy:
        """What of these options decides how the state is stored."""
        return LayoutPolicy(self.stage, self.precision, reduce_at_use=not self.accumulation.once,
                            hpz_axes=self.hpz_axes, communication=self.communication,
                            compute_shards=self._offloads_master)

    @property
    def host_offload(self) -> Offload | None:
        """What is in host memory; None where all that is offloaded is in files."""
        return None if self.offload is None or self.offload.disk is not None else self.offload

    @property
    def _offloads_master(self) -> bool:
        """Whether stage 3 reads a sharded copy of master weights in host memory: it must have the same gradients."""
        precision = self.precision
        return (self.offload is not None and self.offload.master != "device" and self.communication is None
                and self.accumulation.gather == "use" and precision.reduce in (None, precision.compute))

    def activations(self, axes: MeshAxes, batch_size: int) -> Activations:
        """How the activations of so many examples are sharded and stored."""
        host = self.partition_activations == "cpu"
        partition = self.partition_activations is True or host and axes.tensor in axes.mesh.axis_names
        return Activations(axes, batch_size, partition=partition, host=host,
                           sequence=self.sequence_parallel)

    def compiler_options(self, axes: MeshAxes) -> dict[str, Any]:
        """XLA's options for the devices of the mesh, without those that depend on the layout (`step.overlap`)."""
        device = axes.mesh.devices.flat[0]
        activations, offload = self.partition_activations == "cpu", self.host_offload
        copies = copy_options(device, engines=self.uses_copy_engines(axes)) if activations or offload else {}
        parameters = offload is not None and offload.parameters == "host"
        reads = host_prefetch_options(device, parameters=parameters) if activations or parameters else {}
        return combine_options(device, self.combine_bytes) | copies | reads

    def uses_copy_engines(self, axes: MeshAxes) -> bool:
        """Whether what is in host memory is copied by a GPU's copy engines, beside compute, not by kernels after it.

        Not activations beside states: of small ones XLA starts no read a round ahead.
        """
        offload, activations = self.offload, self.partition_activations == "cpu"
        if not self.copy_engines or activations == (offload is not None):
            return False
        return (offload is None or offload.allows_copy_engines) and axes.built_for.has_copy_engines

    @property
    def asks_for_overlap(self) -> bool:
        """Whether `overlap` or `prefetch` was given, so that a plan tells what they change."""
        return self.prefetch or self.overlap not in (False, "auto")
