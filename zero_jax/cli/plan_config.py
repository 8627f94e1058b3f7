"""The configuration of `plan`. Nothing here imports JAX, so that bad input is refused at once."""

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Literal, get_args

from zero_jax.cli.attention_options import AttentionOptions
from zero_jax.cli.choices import Gather, Offloaded, Optimizer, PrecisionName, Reduce, RematName, check_gather
from zero_jax.cli.communication_options import CommunicationOptions
from zero_jax.cli.environment import check_folder
from zero_jax.cli.model_lookup import ModelChoice, find_model, nearest, with_remat
from zero_jax.cli.renamed import REMAT_VALUES, takes_old_names
from zero_jax.errors import UsageError
from zero_jax.xla.targets import Target, target_of


@takes_old_names
@dataclasses.dataclass(frozen=True)
class PlanConfig(AttentionOptions, CommunicationOptions):
    """Compile a train step for a target topology, no accelerator needed: does it fit, and what does it send."""

    target: str = "h100:8"
    """h100:16x8 (hosts x GPUs per host), v5p:8x8x16 (a torus), ...; or a file of your own, ./mychip.toml:4x8."""

    model: str = "gpt2:1.5b"
    """MODULE:PRESET. One of ours (gpt2, llama, bert, t5, vit, ...), or any module on the path or in this folder that
    has PRESETS and build(config)."""

    stage: Literal[0, 1, 2, 3] = 3
    """What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""

    batch_per_device: int = 1
    """Sequences on each device, or each group of tensor x context devices that share them, over all microbatches."""

    accumulate: int = 1
    """Microbatches of a step, one after another."""

    reduce: Reduce = "every"
    """Reduce-scatter every microbatch's gradient, or their sum once."""

    gather: Gather = "use"
    """With microbatches at stage 3: gather parameters at each use, or once a step into a copy that all microbatches
    read; auto: once a step where that takes at most half of a device's memory."""

    seq_len: int | None = None
    """Tokens per sequence. None: the model's max_length."""

    precision: PrecisionName = "bf16"
    """Of computation and communication; master weights are fp32, except with bf16-stochastic."""

    optimizer: Optimizer = "adamw"
    """The report says how much state it saves against AdamW."""

    remat: RematName = "model"
    """Activation checkpointing. model: as the preset does it; no, yes: the model's own, off or on; full, dots, sqrt:
    from outside, saving each block's input, also its products, or the input of every sqrt-th block."""

    mesh: tuple[int, ...] = ()
    """Sizes of ZeRO's mesh axes; with the others their product is the number of devices. Empty: one, or a torus."""

    tensor: int = 1
    """Devices over which the model's tensor_rules split it (tensor parallelism); they share their sequences."""

    vocab_size: int | None = None
    """Of the model, in place of the preset's: tensor parallelism needs one that divides. None: as the preset says."""

    context: int = 1
    """Devices over which each sequence is split."""

    replica: int = 1
    """Hybrid sharding: the number of device groups, each of which stores a complete set of shards."""

    sequence_parallel: bool = False
    """Split activations between tensor-parallel products along the sequence."""

    partition_activations: Literal["no", "yes", "cpu"] = "no"
    """Split checkpointed activations over the tensor axis (P_a); cpu: also offload them to host memory."""

    offload: Offloaded = "no"
    """optimizer: the optimizer's states, the moving average and, with bf16, the fp32 master weights are in host memory
    (ZeRO-Offload); the update streams them through the device."""

    overlap: bool = False
    """On TPU v5p and v6e: gather and reduce on the SparseCores while the TensorCores compute, at a cost in memory. The
    step is compiled without it, too, to say what it changes."""

    prefetch_weights: bool = False
    """On GPUs at stage 3: each layer of a loop gathers the parameters of the next one while it computes. The
    step is compiled without it, too, to say what it changes."""

    search: Literal["no", "fit", "layers"] = "no"
    """fit: the smallest stage, largest batch and least remat that fit; layers: the deepest model."""

    json: bool = False
    """Print JSON instead of tables."""

    png: Path | None = None
    """Draw the memory of every stage, stacked as in the paper's Figure 1, into this file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", tuple(self.mesh))
        if str(self.remat) in REMAT_VALUES:
            object.__setattr__(self, "remat", REMAT_VALUES[str(self.remat)])
            warnings.warn(f"PlanConfig.remat is now one of {', '.join(get_args(RematName))}.", DeprecationWarning, 4)
        if self.remat not in get_args(RematName):
            raise UsageError(f"remat={self.remat!r} is unknown{nearest(str(self.remat), [*get_args(RematName)])}")
        for name, value in (("batch_per_device", self.batch_per_device), ("seq_len", self.seq_len),
                            ("accumulate", self.accumulate), ("tensor", self.tensor), ("context", self.context),
                            ("replica", self.replica),
                            *(("mesh", size) for size in self.mesh)):
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: give at least 1.")
        if self.batch_per_device % self.accumulate:
            raise UsageError(f"batch_per_device={self.batch_per_device} does not divide into {self.accumulate} "
                             "microbatches: give a multiple.")
        check_gather(self.gather, self.stage, self.accumulate)
        self.check_quantized(self.stage, self.precision, one_hop=False)
        quantized = self.quantize_gradients or self.quantize_weights != "no"
        if quantized and (self.search == "fit" or self.png is not None):
            raise UsageError("quantize_weights and quantize_gradients are for stages 1 to 3, and search=fit and png "
                             "compile stage 0, too: leave them out.")
        if self.gather != "use" and (self.search == "fit" or self.png is not None):
            raise UsageError(f"gather={self.gather} is for stage 3 alone, and search=fit and png compile every stage: "
                             "leave it out.")
        if self.offload not in get_args(Offloaded):
            raise UsageError(f"offload={self.offload!r} is unknown{nearest(str(self.offload), [*get_args(Offloaded)])}")
        if self.png is not None and self.png.suffix != ".png":
            raise UsageError(f"png={self.png} does not end in .png.")

    def check(self) -> "tuple[Target, ModelChoice]":
        """The target and the model; raises ValueError for what is wrong and can be known before JAX is imported."""
        target = target_of(self.target)
        others = self.tensor * self.context * self.replica
        if self.mesh and math.prod(self.mesh) * others != target.num_devices or target.num_devices % others:
            with_others = f" x tensor, context, replica {self.tensor}, {self.context}, {self.replica}" * (others > 1)
            raise UsageError(f"mesh={self.mesh}{with_others} is of {math.prod(self.mesh) * others} devices, and "
                             f"{self.target} has {target.num_devices}: give sizes whose product is that.")
        if self.png is not None:
            check_folder("png", self.png.parent)
        choice = with_remat(find_model(self.model), self.remat)
        self.check_attention(choice, target.chip.platform)
        if self.vocab_size is not None:
            choice = choice.with_change("vocab_size", self.vocab_size)
        if self.search == "layers":
            choice.check_field("num_layers")
        if self.seq_len is None and not hasattr(choice.config, "max_length") and choice.batch_shapes is None:
            raise UsageError(f"{self.model} has no max_length in its config: give seq_len=....")
        if self.seq_len is not None and not hasattr(choice.config, "max_length") and choice.batch_shapes is not None:
            raise UsageError(f"seq_len={self.seq_len}: {self.model} takes no sequences: leave it out.")
        choice.check(seq_len=self.seq_len or 1, vocab_size=None)
        choice.tensor_rules(self.tensor)
        return target, choice

    @property
    def groups(self) -> int:
        """Groups of devices that share no sequence."""
        return target_of(self.target).num_devices // (self.tensor * self.context)
