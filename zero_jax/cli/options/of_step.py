"""The options of a step that `train`, `inspect` and `plan` share, with one default for all of them. No JAX."""

import dataclasses
import re
from typing import Annotated, Literal, Self

from zero_jax.arguments import patterns
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.options.choices import Count, Within, settle
from zero_jax.cli.options.combinations import check_combinations, check_kernel
from zero_jax.cli.options.lora import LoraOptions
from zero_jax.errors import UsageError

Precision = Literal["fp32", "bf16", "fp16", "bf16-fp8", "bf16-stochastic"]
Optimizer = Literal[
    "adamw", "adamw-bf16-momentum", "adafactor", "lion", "lion-bf16-momentum", "sgd-momentum", "lamb", "muon",
    "schedule-free"]

MAX_DEFAULT_LENGTH, SIMULATED_LENGTH = 8192, 128
"""Tokens of a sequence where none are given, at most: of some models' far more, which few train with; and of simulated
devices, which take seconds for more."""


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Which step of which model: the same options, and the same defaults, of a run and of a plan of it."""

    stage: Literal[0, 1, 2, 3] = 3
    """What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""

    model: str = "gpt2:bytes"
    """A preset, as gpt2:124m (zero-jax models lists them), or a folder with a config.json of Hugging Face's, of a
    family that models/ covers: its weights are those of --init-from. Or MODULE:PRESET of any module on the path or in
    this folder that has PRESETS and build(config)."""

    seq_len: Count = None  # pyright: ignore[reportAssignmentType]  (None until the model is known: `check`)
    """Tokens per sequence, at most the model's max_length. None: that, at most 8,192, and 128 on simulated devices."""

    precision: Precision = None  # pyright: ignore[reportAssignmentType]  (None until `settle_shared`)
    """Of computation and communication. bf16 and fp16 store fp32 master weights, fp16 scales its loss; bf16-fp8
    multiplies the blocks' matrices in float8; bf16-stochastic stores all state in bf16 and rounds updates
    stochastically. None: bf16, and fp32 on simulated devices."""

    remat: Literal["model", "no", "yes", "full", "dots", "sqrt"] = "model"
    """Activation checkpointing. model: as the preset does it; no, yes: the model's own, off or on; full, dots, sqrt:
    from outside, saving each block's input, also its products, or the input of every sqrt-th block."""

    offload: Literal["no", "optimizer", "parameters", "gradients", "disk", "auto"] = "no"
    """optimizer: the optimizer's states, the moving average and, with bf16, the fp32 master weights are in host memory
    (ZeRO-Offload); the update streams them through the device. parameters: at stage 3 also what the model reads
    (ZeRO-Infinity), layer by layer. gradients: these, and the gradients of stacked layers as they are made. disk: what
    optimizer puts into host memory is in files, of a run in offload_disk. auto: compiles each, and takes the one that
    fits with the least predicted time; gradients only where nothing that moves less fits, files only where the host's
    memory is not enough."""

    offload_fraction: Annotated[float, Within(1e-9, 1)] = 1.0
    """With offload=optimizer: the share of these states that is in host memory, all of a parameter's or none; the rest
    stays on the devices. auto finds the least that fits."""

    overlap: Literal["auto", "yes", "no"] = "auto"
    """On TPU v5p and v6e: gather and reduce on the SparseCores while the TensorCores compute; on v5e, at stages 1 to 3,
    within matrix products and elementwise work. It costs memory and time to compile. auto: on those; no: never; yes: an
    error on others, and a plan is compiled without it, too, to say what it changes."""

    prefetch_weights: bool = False
    """On GPUs, TPU v5p and v6e at stage 3: each layer of a loop gathers the parameters of the next one while it
    computes. A plan is compiled without it, too, to say what it changes."""

    def settle_length(self, choice: ModelChoice, simulated: bool) -> None:
        """Puts in place of no length the model's longest, as far as that goes; none where it has none."""
        if self.seq_len is None and (longest := getattr(choice.config, "max_length", None)):
            object.__setattr__(self, "seq_len", min(longest, SIMULATED_LENGTH if simulated else MAX_DEFAULT_LENGTH))


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """In which formats weights are gathered and gradients reduced (ZeRO++)."""

    quantize_weights: Literal["no", "int8", "fp8", "int4"] = "no"
    """Gather weights as codes of this format: at stage 3, and with bf16 or fp16 at stages 1 and 2."""

    quantize_gradients: tuple[Literal["int8", "fp8", "int4", "fp4"], ...] = ()
    """Reduce gradients as codes of this format; two formats: inside a node and across nodes."""


_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclasses.dataclass(frozen=True)
class TilingOptions:
    """Which products are computed in tiles (memory-centric tiling, ZeRO-Infinity); none by default."""

    tiling: tuple[str, ...] = ()
    """At stage 3: the products whose weights are gathered, multiplied and dropped in tiles: PATTERN=TILES for each, as
    mlp/up/kernel=16; or one size, as 512MiB, above which a layer's gathered weight is in tiles."""

    @property
    def tiles(self) -> dict[str, int] | int | None:
        """What `make_zero_train_step(tiling=...)` takes. Raises UsageError for what is neither."""
        if not self.tiling:
            return None
        if len(self.tiling) == 1 and (size := re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([KMG]iB)", self.tiling[0])):
            number = round(float(size[1]) * _UNITS[size[2]])
            if number < 2**10:
                raise UsageError(f"tiling={self.tiling[0]}: give at least 1KiB.")
            return number
        tiles: dict[str, int] = {}
        for text in self.tiling:
            pattern, _, count = text.rpartition("=")
            if not (pattern and re.fullmatch(r"[0-9]{1,6}", count) and int(count) > 1):
                raise UsageError(f"tiling={text}: give PATTERN=TILES for each parameter, as mlp/up/kernel=16, or one "
                                 "size, as 512MiB, above which a gathered copy is made in tiles, and at least 2 tiles.")
            if pattern in tiles:
                raise UsageError(f"tiling: {pattern} is given twice.")
            tiles[pattern] = int(count)
        patterns("tiling", tuple(tiles), "mlp/up/kernel")
        return tiles


@dataclasses.dataclass(frozen=True)
class MicrobatchOptions:
    """Into how many parts a batch is cut, and how often each device sends for them."""

    accumulate: Count = 1
    """Microbatches of a step, one after another: only one's activations are in memory at a time."""

    reduce: Literal["every", "once", "auto"] = "auto"
    """Reduce-scatter every microbatch's gradient and sum the shards, or sum on each device and reduce once. auto: what
    a formula predicts as fastest, with gather=auto, and to fit in 80 % of a known device's memory."""

    gather: Literal["use", "forward", "step", "auto"] = "auto"
    """At stage 3: gather parameters at each use, in forward alone, which keeps them for backward, or once a step into a
    copy that all microbatches read; auto: as with reduce=auto."""

    loss_chunks: Count = 1
    """The loss of the next token in so many parts, so that logits (tokens x vocabulary) never exist whole; they are
    computed once more for the backward pass."""

    def with_microbatches(self, gather: str = "use", reduce: str = "every") -> Self:
        """These options with these in place of "auto"; raises UsageError where they do not go together."""
        return dataclasses.replace(self, gather=gather if self.gather == "auto" else self.gather,
                                   reduce=reduce if self.reduce == "auto" else self.reduce)


@dataclasses.dataclass(frozen=True)
class ParallelOptions:
    """Over which groups of devices a model, its sequences and its activations are split."""

    replica: Count = 1
    """Hybrid sharding: the number of device groups, each of which stores a complete set of shards."""

    tensor: Count = 1
    """Devices over which the model's tensor_rules split it (tensor parallelism); they share their sequences."""

    context: Count = 1
    """Devices over which each sequence is split."""

    hpz: Count = 1
    """At stage 3: the devices, best those of a node, that together keep a copy of what forward gathers, from which
    backward gathers (ZeRO++'s hpZ). 1: none do."""

    sequence_parallel: bool = False
    """Split activations between tensor-parallel products along the sequence."""

    partition_activations: Literal["no", "yes", "cpu"] = "no"
    """Split checkpointed activations over the tensor axis (P_a); cpu: also offload them to host memory."""

    def data_sizes(self, devices: int) -> int | tuple[int, int]:
        """Sizes of ZeRO's axes on so many devices, as `make_mesh` takes them: with `hpz` two, the second is it.

        Raises UsageError for an `hpz` that leaves none, or does not divide.
        """
        if self.hpz == 1:
            return -1
        data = devices // (self.replica * self.tensor * self.context)
        if data % self.hpz or data == self.hpz:
            raise UsageError(f"hpz={self.hpz}: {data} devices shard the parameters, each with its groups of tensor, "
                             "context and replica: give a divisor of that which is less, or leave it out.")
        return data // self.hpz, self.hpz


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Which kernel computes attention."""

    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    """The kernel of attention: cudnn (GPU), splash (TPU) or xla; auto: the devices' own where it takes the arrays."""

    def check_attention(self, choice: ModelChoice, platform: str | None) -> None:
        """Raises UsageError where a kernel is asked for that the model cannot take, or that the devices do not have.

        platform: of the devices: "cuda", "tpu" or "cpu"; None: not known before JAX starts.
        """
        if self.attention == "auto":
            return
        if not hasattr(choice.config, "attention"):
            raise UsageError(f"attention={self.attention}: {choice.name} has no field 'attention' in its config: leave "
                             "it out.")
        if self.attention != "xla" and getattr(choice.config, "attention_softcap", None) is not None:
            raise UsageError(f"attention={self.attention}: {choice.name} caps its scores, which only XLA's attention "
                             "does: give auto or xla.")
        check_kernel(self, platform)


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """Which optimizer updates the parameters, and how it stores its state."""

    optimizer: Optimizer = "adamw"
    """AdamW's state is 8 bytes per parameter, that of the others less. muon: of kernels, by Muon, each whole on the
    device that owns it, and of the rest by AdamW. schedule-free: AdamW with an average of its own in place of a decay
    of the learning rate; evaluation, generate and export take that average."""

    moments: Literal[8, 16] | None = None
    """Bits of each number of the optimizer's moments, which are rounded at random: 16 is bfloat16, 8 has a scale for
    each block of 128. None: as the optimizer stores them, in 32 where it does not say otherwise."""

    betas: tuple[Annotated[float, Within(0, 1 - 1e-9)], ...] = ()
    """Decays of the averages of gradients and of their squares, as 0.9,0.95. Empty: the optimizer's own."""

    eps: Annotated[float | None, Within(0, 1)] = None
    """What is added to what Adam divides by. None: the optimizer's own, 1e-8 or with lamb 1e-6."""

    def check_optimizer(self, schedule: str) -> None:
        """Raises UsageError for betas that are not two, and for a schedule that schedule-free is in place of."""
        if len(self.betas) not in (0, 2):
            raise UsageError(f"betas={self.betas}: give two, as 0.9,0.95.")
        if self.optimizer != "schedule-free":
            return
        if self.betas and not self.betas[0]:
            raise UsageError(f"betas={self.betas}: schedule-free divides by the first: give one above 0, as 0.9,0.95.")
        if schedule != "constant":
            raise UsageError(f"optimizer=schedule-free with schedule={schedule}: its average is in place of a decay: "
                             "give schedule=constant.")


@dataclasses.dataclass(frozen=True)
class SharedOptions(AttentionOptions, TilingOptions, CommunicationOptions, LoraOptions, ParallelOptions,
                    MicrobatchOptions, OptimizerOptions, StepOptions):
    """What a run, its inspection and a plan of it share."""

    def settle_shared(self, *, simulated: bool, schedule: str = "constant") -> None:
        """Puts in place of no precision that of the devices, and checks all options, each alone and together."""
        if self.precision is None:
            object.__setattr__(self, "precision", "fp32" if simulated else "bf16")
        settle(self)
        for name in ("lora_targets", "lora_trainable"):
            object.__setattr__(self, name, patterns(name, getattr(self, name), "attn/[qv]"))
        if len(self.quantize_gradients) > 2:
            raise UsageError(f"quantize_gradients={' '.join(self.quantize_gradients)}: give one format, or two: inside "
                             "a node and across nodes.")
        self.tiles  # noqa: B018 (raises)
        self.check_optimizer(schedule)
        check_combinations(self)
