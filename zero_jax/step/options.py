"""All that `make_zero_train_step` was asked for beside model, optimizer, loss and mesh, validated in one place."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from zero_jax import combinations
from zero_jax.arguments import is_number, is_one_of, shown, texts
from zero_jax.errors import UsageError
from zero_jax.gather.quantized.policy import Codes
from zero_jax.layout.batch_layout import BatchLayout, BatchRule
from zero_jax.layout.make_layout import LayoutPolicy
from zero_jax.offload.offload import Offload, check_host_memory
from zero_jax.precision import Precision
from zero_jax.sharding.batch import Accumulation
from zero_jax.sharding.mesh_axes import AxisRoles, MeshAxes
from zero_jax.sharding.tensor_rules import TensorRule, rules_of
from zero_jax.sharding.tiling import Tiling
from zero_jax.stages import Stage
from zero_jax.step.guard import Guard
from zero_jax.transforms.activation_partitioning import Activations
from zero_jax.transforms.remat import Remat
from zero_jax.typing import AxisNames, Pattern
from zero_jax.xla.devices import combine_options
from zero_jax.xla.host_copies import copy_options, host_prefetch_options
from zero_jax.xla.overlap import Overlap, overlap_options, prefetch_options
from zero_jax.xla.platform import is_gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication(Codes):
    """When a step gathers and reduces, between which devices, in which codes, and what it computes meanwhile.

    Attributes:
        gather: at stage 3, parameters are gathered at each "use", twice in every microbatch, and dropped (FSDP's
            `reshard_after_forward=True`); or in the "forward" pass alone, and kept for the backward pass: the bytes
            sent, and the memory within a step, of stage 2, with gathers beside compute. With microbatches, or once a
            "step", before the first of them, into a copy in the compute dtype that all of them read: whole on each
            device, or sharded over `hpz_axes`, among which microbatches then gather. Gradients are then rounded to the
            compute dtype after their reduction, as at stages 1 and 2. `zero-jax plan` predicts which of them is
            fastest and fits.
        reduce: "every" microbatch's gradient is reduced, and shards of it summed; or each device sums its own and they
            are reduced "once" (`no_sync`): the communication of one batch, and a whole gradient in float32 on each
            device.
        hpz_axes: at stage 3, the ZeRO axes inside a node: forward keeps what it gathered over the others, a copy of the
            weights sharded over these alone, from which backward gathers without leaving the node (hpZ of ZeRO++, arXiv
            2306.10209).
        weights: the format of gathered weights, "int8", "fp8" (e4m3) or "int4" (qwZ of ZeRO++, section 3.1); None: in
            the dtypes of `precision`. The master weights stay as they are: the loss and its gradient are those of the
            decoded weights.
        gradients: the format in which gradients are reduced, by all-to-alls and float32 sums of what is decoded (qgZ,
            section 3.3); or a pair, of the devices inside a node and across nodes: ("int8", "fp4"). None: as they are.
            "fp4" (e3m0) has the bytes of "int4" and keeps small values. Inside is over `hpz_axes` where they are given,
            else over the last ZeRO axis of several, or all of them where the mesh has an axis `replica`.
        block: at most so many values share a scale; a multiple of 16.
        exclude: patterns (`re.search` in a name) of parameters that are sent as they are.
        overlap: on TPU v5p and v6e the SparseCores gather and reduce while the TensorCores compute; on v5e gradients
            are reduced within matrix products and elementwise work; on GPUs loops over layers gather for the next
            iteration, and reduce what the one before made. By options of XLA that `step.layout(batch).describe()`
            names, at a cost in memory and time to compile; at stages 1 and 2 weights are gathered in chunks. "auto":
            where there is more than one such device, and where XLA fails to compile the step with them it warns and
            does without; True: the same, but refused where nothing would change, and failing where XLA does; False:
            nowhere; a mapping, on TPUs and GPUs: these options of XLA besides, or in place of its own.
        prefetch: on TPU v5p and v6e at stage 3, each iteration of a loop over layers gathers the parameters of the next
            one while it computes, forward and backward, and gradients are reduced while the next iteration computes. It
            costs memory (some layers' weights) and time to compile. A model without a loop is refused.
        combine_bytes: the largest buffer into which XLA may combine collectives (C_B); None: as it does by itself.

    Raises ValueError for what is none of these; where it cannot take effect, `make_zero_train_step` does.
    """

    gather: str = "use"
    reduce: str = "every"
    hpz_axes: str | Sequence[str] = ()
    overlap: Overlap = "auto"
    prefetch: bool = False
    combine_bytes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        Accumulation(1, self.reduce, self.gather)  # raises
        object.__setattr__(self, "hpz_axes", texts("hpz_axes", self.hpz_axes, "(\"data_1\",)"))

    @property
    def codes(self) -> Codes | None:
        """What is sent as codes; None: nothing."""
        return None if self.weights is None and self.gradients is None else self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a step uses the axes of its mesh, where they are not those of `make_mesh` or split more than the batch.

    Attributes:
        axis: the mesh axes that ZeRO shards over, major first. Default: `data`, or `data_0`, `data_1`, ...
        axis_roles: the names of the mesh's axes by role, where they are not `data`, `replica`, `context` and `tensor`:
            {"data": "fsdp", "tensor": "tp"}. `data` may have several, major first.
        tensor_rules: with an axis `tensor` of the mesh: pairs of a pattern and a spec of a parameter's last dims, as
            ("up/kernel", P(None, "tensor")), or `TensorRule`s; the first that matches splits a parameter. The model's
            own partitioning metadata (Linen's `with_partitioning`, NNX's) count as well where they name that axis.
        sequence_parallel: what lies between the products that `tensor` splits (norms, dropout, the residual stream) is
            split over it along the sequence, the second dim.
        batch_specs: for leaves of the batch that are no examples (a graph's edges, a table, a key as uint32): pairs of
            a pattern (`re.search` in the leaf's name) and a `PartitionSpec` over axes of the mesh, or None for leaves
            that are whole on every device, as ("edges", P("data")). Scalars and typed keys need no rule. With
            microbatches each gets what is whole, and of a typed key one of its own; what a rule shards is refused.

    Raises ValueError for what is none of these; where it cannot take effect, `make_zero_train_step` does.
    """

    axis: str | Sequence[str] | None = None
    axis_roles: AxisRoles | None = None
    tensor_rules: Sequence[TensorRule | tuple[Any, ...]] = ()
    sequence_parallel: bool = False
    batch_specs: Sequence[BatchRule] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor_rules", rules_of(self.tensor_rules))
        if not isinstance(self.batch_specs, (tuple, list)):
            raise UsageError(f"batch_specs={shown(self.batch_specs)}: give a list of rules, as [(\"edges\", "
                             "P(\"data\"))].")
        object.__setattr__(self, "batch_specs", tuple(self.batch_specs))
        if not isinstance(self.sequence_parallel, bool):
            raise UsageError(f"sequence_parallel={shown(self.sequence_parallel)}: give True or False.")


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The arguments of `make_zero_train_step` of the same names.

    `copy_engines` is none of them: a step sets it to False once XLA has compiled other rows of host memory for these.

    What is wrong on any mesh raises ValueError here, what is wrong on one mesh in `check`.
    """

    stage: Stage
    precision: Precision = Precision()
    accumulate: int = 1
    communication: Communication = Communication()
    parallelism: Parallelism = Parallelism()
    frozen: tuple[Pattern, ...] = ()
    ema: float | None = None
    guard: Guard | None = None
    remat: Remat | None = None
    partition_activations: bool | str = False
    offload: Offload | None = None
    tiling: Tiling | None = None
    copy_engines: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulate", self.accumulation.microbatches)
        if self.ema is not None and not (is_number(self.ema) and 0 <= self.ema < 1):
            raise UsageError(f"ema={shown(self.ema)}: give a decay from 0 to below 1, as 0.999, or None.")
        if self.guard is not None and not isinstance(self.guard, Guard):
            raise UsageError(f"guard={shown(self.guard)} is a {type(self.guard).__name__}: give "
                             "zero_jax.Guard(skip=3), say, or None.")
        if not is_one_of(self.partition_activations, "cpu", True, False):
            raise UsageError(f"partition_activations={shown(self.partition_activations)}: give True (split over the "
                             "axis `tensor`) or \"cpu\" (and kept in the host's memory).")

    def check(self, axes: MeshAxes) -> None:
        """Raises ValueError for what cannot take effect on this mesh, at this stage."""
        combinations.check(self.values(axes), rows=combinations.STEP)
        inside, sent = self.hpz_axes, self.communication
        unknown = [name for name in inside if name not in axes.zero]
        if unknown or inside and set(inside) == set(axes.zero):
            raise UsageError(f"hpz_axes={inside}: give some of the axes {axes.zero} that ZeRO shards over in "
                             f"the mesh {axes.sizes}, but not all.")
        hpz_size = math.prod(map(axes.size, inside))
        if inside and hpz_size == axes.zero_size:
            raise UsageError(f"hpz_axes={inside} in the mesh {axes.sizes}, all of whose {axes.zero_size} "
                             "devices they span: backward would gather from all of them as without: leave it out.")
        if inside and hpz_size == 1:
            raise UsageError(f"hpz_axes={inside} in the mesh {axes.sizes} span one device, which would keep all "
                             "weights until backward: leave it out, or give gather=\"forward\", which does that.")
        # Each of these raises for what it cannot be made of.
        BatchLayout(axes, self.parallelism.batch_specs)
        if self.host_offload:
            check_host_memory(axes)
        self.activations(axes, 1)
        # Whatever the layout will be.
        self.compiler_options(axes)
        overlap_options(axes.mesh.devices.flat[0], sent.overlap, scatters=self.stage.shards_optimizer)
        prefetch_options(axes.mesh.devices.flat[0], sent.prefetch, sent.overlap)

    def values(self, axes: MeshAxes) -> dict[str, Any]:
        """These options on this mesh, as `combinations.TABLE` names them."""
        codes, sent = self.communication.codes, vars(self.communication)
        return {
            **{name: getattr(self, name) for name in (
                "accumulate", "ema", "guard", "partition_activations", "offload", "tiling")},
            **{name: sent[name] for name in ("gather", "reduce", "hpz_axes", "overlap", "prefetch")},
            **{f"communication.{name}": sent[name] for name in ("weights", "gradients")},
            **{name: getattr(self.parallelism, name) for name in ("tensor_rules", "sequence_parallel")},
            "stage": self.stage.number, "fp8": self.precision.fp8,
            "one_hop": codes is not None and isinstance(codes.gradients, tuple) and len(
                codes.hops(axes, self.hpz_axes)) == 1,
            **{f"offload.{name}": value for name, value in vars(self.offload or Offload()).items()},
            "sizes": axes.sizes, "platform": axes.platform, "shards": axes.zero_size, "tensor": axes.tensor_size,
            "context": axes.context if axes.context in axes.zero else None, "replica": axes.replica_size,
            "diloco.every": axes.slices}

    @property
    def accumulation(self) -> Accumulation:
        """Microbatches, and when they gather and reduce."""
        return Accumulation(self.accumulate, self.communication.reduce, self.communication.gather)

    @property
    def hpz_axes(self) -> AxisNames:
        """The ZeRO axes inside a node."""
        return tuple(self.communication.hpz_axes)

    @property
    def layout_policy(self) -> LayoutPolicy:
        """What of these options decides how the state is stored."""
        precision, codes, offload = self.precision, self.communication.codes, self.offload
        # Stage 3 reads a sharded copy of master weights in host memory: it must have the same gradients.
        reads_copy = (offload is not None and offload.master != "device" and codes is None
                      and self.communication.gather == "use" and precision.reduce in (None, precision.compute))
        return LayoutPolicy(self.stage, precision, reduce_at_use=not self.accumulation.once, hpz_axes=self.hpz_axes,
                            codes=codes, compute_shards=reads_copy)

    @property
    def host_offload(self) -> Offload | None:
        """What is in host memory; None where all that is offloaded is in files."""
        return None if self.offload is None or self.offload.disk is not None else self.offload

    def activations(self, axes: MeshAxes, batch_size: int) -> Activations:
        """How the activations of so many examples are sharded and stored."""
        host = self.partition_activations == "cpu"
        partition = self.partition_activations is True or host and axes.tensor in axes.mesh.axis_names
        return Activations(axes, batch_size, partition=partition, host=host,
                           sequence=self.parallelism.sequence_parallel)

    def compiler_options(self, axes: MeshAxes) -> dict[str, Any]:
        """XLA's options for the devices of the mesh, without those that depend on the layout (`step.overlap`)."""
        device = axes.mesh.devices.flat[0]
        activations, offload = self.partition_activations == "cpu", self.host_offload
        copies = copy_options(device, engines=self.uses_copy_engines(axes)) if activations or offload else {}
        parameters = offload is not None and offload.parameters == "host"
        reads = host_prefetch_options(device, parameters=parameters) if activations or parameters else {}
        # Without a GPU to measure on, Triton takes a product of rounded operands before cuBLAS can take its codes.
        products = {"xla_gpu_enable_triton_gemm": False} if self.precision.fp8 and is_gpu(device) else {}
        return combine_options(device, self.communication.combine_bytes) | copies | reads | products

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
        return self.communication.prefetch or self.communication.overlap not in (False, "auto")
