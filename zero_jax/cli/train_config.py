"""The configuration of training. Nothing here imports JAX, so that bad input is refused at once."""

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import Literal, get_args

from zero_jax.arguments import check_path
from zero_jax.checkpoint.object_store import check_scheme, is_remote, numbers_in
from zero_jax.cli.attention_options import AttentionOptions
from zero_jax.cli.choices import Gather, Offloaded, Optimizer, PrecisionName, Reduce, RematName, check_gather
from zero_jax.cli.communication_options import CommunicationOptions
from zero_jax.cli.data_options import DataOptions, check_eval_data
from zero_jax.cli.environment import check_folder, check_no_checkpoints, simulates
from zero_jax.cli.evaluation_options import EvaluationOptions
from zero_jax.cli.model_lookup import ModelChoice, find_model, nearest, with_remat
from zero_jax.cli.renamed import takes_old_names
from zero_jax.cli.report_options import ReportOptions
from zero_jax.cli.schedule_options import ScheduleOptions
from zero_jax.distributed.launch import COORDINATOR
from zero_jax.errors import UsageError
from zero_jax.interop.safetensors_file import find_tensors
from zero_jax.xla.targets import target_of

SIMULATED_DEVICES, MAX_SIMULATED_DEVICES = 8, 1024
"""CPU devices to simulate where there is no accelerator, and how many there may be."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What is trained, on what, and how it is divided."""

    stage: Literal[0, 1, 2, 3] = 3
    """What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""

    model: str = "gpt2:bytes"
    """MODULE:PRESET. One of ours (gpt2, llama, ...), or any module on the path or in this folder that has PRESETS
    and build(config)."""

    devices: int | None = None
    """How many to use, over all processes. None: all accelerators, or 8 simulated CPU devices where there are none."""

    distributed: bool = False
    """This is one of several processes, and JAX finds the others: under Slurm, Open MPI, Kubernetes, or on a TPU pod.
    `launch`, or ZERO_JAX_COORDINATOR, _NUM_PROCESSES and _PROCESS_ID in the environment, need no option."""

    heartbeat: int = 100
    """Seconds without a heartbeat of another process after which it counts as failed, and this one ends."""

    replica: int = 1
    """Hybrid sharding: the number of device groups, each of which stores a complete set of shards."""

    tensor: int = 1
    """Devices over which the model's tensor_rules split it (tensor parallelism); they share their sequences."""

    context: int = 1
    """Devices over which each sequence is split."""

    sequence_parallel: bool = False
    """Split activations between tensor-parallel products along the sequence."""

    partition_activations: Literal["no", "yes", "cpu"] = "no"
    """Split checkpointed activations over the tensor axis (P_a); cpu: also offload them to host memory."""

    offload: Offloaded = "no"
    """optimizer: the optimizer's states, the moving average and, with bf16, the fp32 master weights are in host memory
    (ZeRO-Offload); the update streams them through the device."""

    overlap: bool = False
    """On TPU v5p and v6e: gather and reduce on the SparseCores while the TensorCores compute, at a cost in memory."""

    prefetch_weights: bool = False
    """On GPUs at stage 3: each layer of a loop gathers the parameters of the next one while it computes."""

    remat: RematName = "model"
    """Activation checkpointing. model: as the preset does it; no, yes: the model's own, off or on; full, dots, sqrt:
    from outside, saving each block's input, also its products, or the input of every sqrt-th block."""

    precision: PrecisionName = "fp32"
    """Of computation and communication. bf16 and fp16 store fp32 master weights, fp16 scales its loss; bf16-stochastic
    stores all state in bf16 and rounds updates stochastically. For accelerators: half the communication, faster
    arithmetic."""

    optimizer: Optimizer = "adamw"
    """AdamW's state is 8 bytes per parameter, that of the others less."""

    batch_size: int = 16
    """Sequences per step, over all devices and microbatches, which it must divide over."""

    accumulate: int = 1
    """Microbatches of a step, one after another: only one's activations are in memory at a time."""

    reduce: Reduce = "every"
    """Reduce-scatter every microbatch's gradient and sum the shards, or sum on each device and reduce once."""

    gather: Gather = "use"
    """With microbatches at stage 3: gather parameters at each use, or once a step into a copy that all microbatches
    read; auto: once a step where that takes at most half of a device's memory."""

    ema: float | None = None
    """Decay of a moving average of the parameters, which validation then uses. None: no average."""

    max_bad_steps: int = 0
    """Consecutive steps that may be skipped because their loss or gradient is not finite; one more ends the run."""

    seq_len: int = 128
    """Tokens per sequence, at most the model's max_length."""

    steps: int = 700
    """Optimizer steps."""

    weight_decay: float = 0.1
    """Decoupled, per unit of learning rate."""

    grad_clip_norm: float = 1.0
    """Largest global norm of the gradient. inf: no clipping."""

    seed: int = 0
    """Of initialisation, batch order and generated text."""

    check_replicas: int = 0
    """Steps between comparisons of what several devices have copies of, which finds devices that compute wrongly; also
    before each save. For stages 0 to 2, or with replica. 0: never."""

    hang_after: float | None = None
    """Seconds after which an unfinished step makes each process print the stacks of its threads. None: never."""

    hang_exit: bool = False
    """Also end that process, with status 124."""

    init_from: Path | None = None
    """Start from the parameters in a safetensors file (or an index of such files, or a folder with one), by the names
    of zero_jax or of Hugging Face. None: random initialisation."""

    save_every: int = 200
    """Steps between checkpoints; the last step is saved, too. 0: nothing is saved."""

    max_to_keep: int = 2
    """The number of newest checkpoints to keep."""

    resume: bool = False
    """Continue from the last intact checkpoint in out, if there is one, with the losses of an uninterrupted run."""

    out: Path = Path("runs/train")
    """Folder for train.jsonl and loss.png, which a later run in the same folder overwrites, and for checkpoints, which
    it does not."""

    save_to: str | None = None
    """Folder of the checkpoints: local, or gs://bucket/folder with the extra gcs. None: checkpoints in out."""

    local_checkpoints: Path | None = None
    """Folder on a disk of each host, or in its memory, for copies of the state between checkpoints: a restart on the
    same devices, with --resume, continues from the last copy. None: none are made."""

    local_every: int | None = None
    """Steps between two such copies."""


@takes_old_names
@dataclasses.dataclass(frozen=True)
class TrainConfig(AttentionOptions, CommunicationOptions, ReportOptions, EvaluationOptions, ScheduleOptions,
                  DataOptions, RunOptions):
    """Train a language model at a ZeRO stage. --config run.toml: options from a file, by the same names; flags win."""

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise UsageError(f"stage={self.stage!r} is not a ZeRO stage: give 0, 1, 2 or 3.")
        for name, kind in (("precision", PrecisionName), ("optimizer", Optimizer), ("reduce", Reduce),
                           ("gather", Gather), ("remat", RematName), ("offload", Offloaded)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise UsageError(f"{name}={value!r} is unknown{nearest(value, [*get_args(kind)])}")
        if self.reduce == "once" and self.accumulate == 1:
            raise UsageError("reduce=once without accumulate: the gradient of one batch is reduced once already.")
        check_gather(self.gather, self.stage, self.accumulate)
        self.check_quantized(self.stage, self.precision, one_hop=self.replica == 1)
        for name in ("accumulate", "devices", "replica", "tensor", "context",
                     "batch_size", "seq_len", "steps", "max_to_keep",
                     "local_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: give at least 1.")
        for name, low, high in (("weight_decay", 0, 10), ("grad_clip_norm", 1e-9, math.inf), ("seed", 0, 2**32 - 1),
                                ("max_bad_steps", 0, 2**31 - 1),
                                ("save_every", 0, math.inf), ("check_replicas", 0, math.inf),
                                ("heartbeat", 1, 86400), ("hang_after", 0.01, 86400),
                                ("ema", 0, 1 - 1e-9)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name}={value} is not within {low} to {high}.")
        self.check_schedule()
        self.check_evaluation()
        self.check_reports()
        if self.check_replicas and self.stage == 3 and self.replica == 1:
            raise UsageError("check_replicas at stage 3: each device stores a shard of its own, and there are no "
                             "copies to compare: give replica=2 or more, a lower stage, or leave it out.")
        if self.hang_exit and self.hang_after is None:
            raise UsageError("hang_exit without hang_after: say after how many seconds.")
        if (self.local_checkpoints is None) != (self.local_every is None):
            raise UsageError("local_checkpoints and local_every belong together: give both, or neither.")
        check_path("out", self.out)
        self.check_data_options()
        if re.match(r"[a-z][a-z0-9]{1,9}:/", str(self.out)):
            raise UsageError(f"out={self.out}: give a local folder, and --save-to for checkpoints in an object store.")
        if self.save_to is not None:
            check_path("save_to", self.save_to)
            check_scheme(self.save_to)
        object.__setattr__(self, "out", Path(self.out))
        if self.devices is not None:
            self.check_devices(self.devices)

    def check(self) -> "ModelChoice":
        """The model; raises ValueError for what is wrong and can be known before any device is used.

        Missing data, an output folder that cannot be written, a batch that does not divide over the devices where their
        number is known, and only then, since it imports the model's module, a model that does not exist or whose limits
        `seq_len` or bytes exceed.
        """
        self.check_packages()
        self._check_files()
        self._check_checkpoints()
        if self.init_from is not None:
            find_tensors(self.init_from)
        if self.profile_steps[1] > self.steps:
            raise UsageError(f"profile={self.profile} ends after the last of steps={self.steps}: give an earlier step.")
        if self.target is not None:
            devices = target_of(self.target).num_devices
            if self.devices not in (None, devices):
                raise UsageError(f"devices={self.devices}, but target={self.target} has {devices}: leave devices out.")
            self.check_devices(devices)
        elif simulates() and (self.devices or 0) > MAX_SIMULATED_DEVICES:
            raise UsageError(f"devices={self.devices}: there is no accelerator, and at most {MAX_SIMULATED_DEVICES} "
                             "devices are simulated on the CPU.")
        elif self.devices is None and simulates() and not (self.distributed or COORDINATOR in os.environ):
            self.check_devices(SIMULATED_DEVICES)
        choice = with_remat(find_model(self.model), self.remat)
        platform = target_of(self.target).chip.platform if self.target else "cpu" if simulates() else None
        self.check_attention(choice, platform)
        choice.check(seq_len=self.seq_len, vocab_size=self.data_vocab_size())
        choice.tensor_rules(self.tensor)
        choice.check_predicts_text("train")
        if self.init_from is not None:
            choice.check_weights(self.init_from)
        return choice

    def check_devices(self, devices: int) -> None:
        """Raises ValueError unless the batch, with its microbatches, and the mesh's axes divide over `devices`."""
        axes = {name: getattr(self, name) for name in ("replica", "tensor", "context") if getattr(self, name) > 1}
        if devices % math.prod(axes.values()):
            raise UsageError(", ".join(f"{name}={size}" for name, size in axes.items())
                             + f" does not divide the {devices} devices.")
        parts = devices // (self.tensor * self.context) * self.accumulate
        if self.batch_size % parts:
            near = max(parts, round(self.batch_size / parts) * parts)
            many = f" and {self.accumulate} microbatches" * (self.accumulate > 1)
            raise UsageError(f"batch_size={self.batch_size} does not divide over {parts // self.accumulate} "
                             f"devices{many}: give a multiple, say {near}.")
        if self.seq_len % self.context:
            raise UsageError(f"seq_len={self.seq_len} does not divide over context={self.context} devices.")

    @property
    def checkpoints(self) -> Path | str:
        """The folder of the run's checkpoints; text for one in an object store."""
        if self.save_to is None:
            return self.out / "checkpoints"
        return self.save_to if is_remote(self.save_to) else Path(self.save_to)

    def _check_files(self) -> None:
        self.check_data()
        check_eval_data(self, self.eval_data)
        check_folder("out", self.out)
        if self.local_checkpoints is not None:
            check_folder("local_checkpoints", self.local_checkpoints)

    def _check_checkpoints(self) -> None:
        if self.dry_run:
            return  # it writes none
        if not self.resume:
            check_no_checkpoints(self.checkpoints)
        elif isinstance(self.checkpoints, str):
            numbers_in(self.checkpoints)  # which says what is wrong with it before JAX is imported


class InspectConfig(TrainConfig):
    """Report on the step that `train` would run with the same options: compiled layout, memory and communication."""

    def check_reports(self) -> None:
        """As for a run, and raises ValueError for what only a run does."""
        super().check_reports()
        for name in ("log_to", "profile", "dry_run"):
            if getattr(self, name):
                raise UsageError(f"{name}: inspect trains nothing: leave it out, or give it to train.")

    def _check_checkpoints(self) -> None:
        pass  # it writes none
