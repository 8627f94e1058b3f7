"""All that `make_zero_train_step` was asked for beside model, optimizer, loss and mesh, validated in one place."""

import dataclasses
import math
from typing import Any

from zero_jax import combinations
from zero_jax.arguments import is_number, is_one_of, shown
from zero_jax.errors import UsageError
from zero_jax.gather.quantized.policy import Communication
from zero_jax.layout.batch_layout import BatchLayout, BatchRule
from zero_jax.layout.make_layout import LayoutPolicy
from zero_jax.offload.offload import Offload, check_host_memory
from zero_jax.precision import Precision
from zero_jax.sharding.batch import Accumulation
from zero_jax.sharding.mesh_axes import MeshAxes
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

    def check(self, axes: MeshAxes) -> None:
        """Raises ValueError for what cannot take effect on this mesh, at this stage."""
        combinations.check(self.values(axes), rows=combinations.STEP)
        unknown = [name for name in self.hpz_axes if name not in axes.zero]
        if unknown or self.hpz_axes and set(self.hpz_axes) == set(axes.zero):
            raise UsageError(f"hpz_axes={self.hpz_axes}: give some of the axes {axes.zero} that ZeRO shards over in "
                             f"the mesh {axes.sizes}, but not all.")
        hpz_size = math.prod(map(axes.size, self.hpz_axes))
        if self.hpz_axes and hpz_size == axes.zero_size:
            raise UsageError(f"hpz_axes={self.hpz_axes} in the mesh {axes.sizes}, all of whose {axes.zero_size} "
                             "devices they span: backward would gather from all of them as without: leave it out.")
        if self.hpz_axes and hpz_size == 1:
            raise UsageError(f"hpz_axes={self.hpz_axes} in the mesh {axes.sizes} span one device, which would keep all "
                             "weights until backward: leave it out, or give gather=\"forward\", which does that.")
        # Each of these raises for what it cannot be made of.
        BatchLayout(axes, self.batch_specs)
        if self.host_offload:
            check_host_memory(axes)
        self.activations(axes, 1)
        # Whatever the layout will be.
        self.compiler_options(axes)
        overlap_options(axes.mesh.devices.flat[0], self.overlap, scatters=self.stage.shards_optimizer)
        prefetch_options(axes.mesh.devices.flat[0], self.prefetch, self.overlap)

    def values(self, axes: MeshAxes) -> dict[str, Any]:
        """These options on this mesh, as `combinations.TABLE` names them."""
        accumulation, communication = self.accumulation, self.communication
        gradients = communication.gradients if communication is not None else None
        return {
            **{name: getattr(self, name) for name in (
                "ema", "guard", "tensor_rules", "sequence_parallel", "partition_activations", "hpz_axes", "overlap",
                "prefetch", "offload", "tiling")},
            "stage": self.stage.number, "accumulate": accumulation.microbatches, "reduce": accumulation.reduce,
            "gather": accumulation.gather, "communication.gradients": gradients,
            "communication.weights": communication.weights if communication is not None else None,
            "one_hop": communication is not None and isinstance(gradients, tuple) and len(
                communication.hops(axes, self.hpz_axes)) == 1,
            **{f"offload.{name}": value for name, value in vars(self.offload or Offload()).items()},
            "sizes": axes.sizes, "platform": axes.platform, "shards": axes.zero_size, "tensor": axes.tensor_size,
            "context": axes.context if axes.context in axes.zero else None, "replica": axes.replica_size,
            "diloco.every": axes.slices}

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

        Not activations beside states: of small ones XLA starts no read an iteration ahead.
        """
        offload, activations = self.offload, self.partition_activations == "cpu"
        if not self.copy_engines or activations == (offload is not None):
            return False
        return (offload is None or offload.allows_copy_engines) and axes.built_for.has_copy_engines

    @property
    def asks_for_overlap(self) -> bool:
        """Whether `overlap` or `prefetch` was given, so that a plan tells what they change."""
        return self.prefetch or self.overlap not in (False, "auto")
