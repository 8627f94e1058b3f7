"""What a run is told: the configuration of training.

Nothing here imports JAX, so that a mistake is answered at once.
"""

import dataclasses
import glob
import math
import os
from pathlib import Path
from typing import Literal, get_args

from zero_jax.launch import COORDINATOR
from zero_jax.model_choice import ModelChoice, find_model, nearest
from zero_jax.safetensors_file import find_tensors
from zero_jax.surroundings import check_folder, check_no_checkpoints, simulates

SIMULATED_DEVICES = 8
"""CPU devices to simulate where no accelerator is present."""

BYTES = 256
"""Size of the vocabulary of text."""

PrecisionName = Literal["fp32", "bf16", "fp16", "bf16-stochastic"]

Reduce = Literal["every", "once"]

Optimizer = Literal[
    "adamw", "adamw-bf16-momentum", "adafactor", "lion", "lion-bf16-momentum", "sgd-momentum", "lamb"]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a language model at a ZeRO stage."""

    stage: Literal[0, 1, 2, 3] = 3
    """What lies sharded: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."""

    model: str = "models.gpt2:bytes"
    """MODULE:PRESET. Any module on the path or in this folder that has PRESETS and build(config)."""

    data: tuple[str, ...] = ("python",)
    """Text files, folders and globs, read as bytes; or one token file (.bin, .npy); or "python", its own library."""

    max_bytes: int | None = None
    """Read no more text than this, in bytes. None: all."""

    devices: int | None = None
    """How many to use, in several processes of all of them. None: all accelerators; 8 simulated CPU devices where there
    are none."""

    distributed: bool = False
    """This is one of several processes, and JAX finds the others: under Slurm, Open MPI, Kubernetes, or on a TPU pod.
    `launch`, or ZERO_JAX_COORDINATOR, _NUM_PROCESSES and _PROCESS_ID in the environment, need no option."""

    heartbeat: int = 100
    """Seconds without a sign of life after which another process counts as dead, and this one ends."""

    replica: int = 1
    """Hybrid sharding: this many groups of devices, each with a whole set of shards."""

    tensor: int = 1
    """Devices over which the model's tensor_rules split it (tensor parallelism); they share their sequences."""

    context: int = 1
    """Devices over which each sequence is split."""

    sequence_parallel: bool = False
    """Split what lies between tensor-parallel products along the sequence."""

    partition_activations: Literal["no", "yes", "cpu"] = "no"
    """Split checkpoints over the tensor axis (P_a); cpu: and keep them in the host's memory."""

    recompute: Literal["model", "full", "dots", "sqrt"] = "model"
    """What blocks keep for backward: as the model does, their input, products too, or the input of every sqrt-th."""

    precision: PrecisionName = "fp32"
    """Of computation and wire. bf16 and fp16 keep an fp32 master copy, fp16 scales its loss; bf16-stochastic keeps all
    of the state in bf16 and rounds updates at random. They are for accelerators: half the wire, faster arithmetic."""

    optimizer: Optimizer = "adamw"
    """Whose state the devices hold: AdamW's is 8 bytes for each parameter, others' are less."""

    batch_size: int = 16
    """Sequences per step, over all devices and microbatches, which it must divide over."""

    accumulate: int = 1
    """Microbatches of a step, one after another: only one's activations are held at a time."""

    reduce: Reduce = "every"
    """Reduce every microbatch's gradient and hold shards of the sum, or sum on each device and reduce once."""

    ema: float | None = None
    """Decay of a moving average of the parameters, which validation then uses. None: no average."""

    skip: int = 0
    """Steps in a row that may be skipped because their loss or gradient is not finite; one more ends the run."""

    length: int = 128
    """Tokens per sequence, at most the model's max_length."""

    steps: int = 700
    """Optimizer steps."""

    learning_rate: float = 3e-3
    """Peak of the schedule: linear warmup, then a cosine down to a tenth."""

    warmup: float = 0.1
    """Share of the steps that warm up, since early gradients are large."""

    weight_decay: float = 0.1
    """Decoupled, per unit of learning rate."""

    clip: float = 1.0
    """Largest global norm of the gradient. inf: as it is."""

    seed: int = 0
    """Of initialisation, batch order and generated text."""

    samples: int = 2
    """Continuations of held-out text to show at the end."""

    hang_after: float | None = None
    """Seconds after which a step that is not done makes each process print the stacks of its threads. None: never."""

    hang_exit: bool = False
    """End a process that hangs so, with status 124."""

    eval_every: int = 100
    """Steps between validations, each on the same held-out batches, at most 16."""

    init_from: Path | None = None
    """Start from the parameters in a safetensors file (or an index of such files, or a folder with one), by the names
    of zero_jax or of Hugging Face. None: from new ones."""

    save_every: int = 200
    """Steps between checkpoints; the last step is saved, too. 0: nothing is saved."""

    keep: int = 2
    """How many of the newest checkpoints stay."""

    resume: bool = False
    """Go on from the last good checkpoint in out, if there is one, with the same losses as if nothing had been."""

    out: Path = Path("runs/train")
    """Folder for train.jsonl and loss.png, which a later run to the same folder overwrites, and for checkpoints, which
    it does not."""

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage={self.stage!r} is not a ZeRO stage: give 0, 1, 2 or 3.")
        for name, kind in (("precision", PrecisionName), ("optimizer", Optimizer), ("reduce", Reduce)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name}={value!r} is unknown{nearest(value, [*get_args(kind)])}")
        if self.reduce == "once" and self.accumulate == 1:
            raise ValueError("reduce=once without accumulate: the gradient of one batch is reduced once anyhow.")
        for name in ("accumulate", "devices", "replica", "tensor", "context",
                     "batch_size", "length", "steps", "eval_every", "max_bytes",
                     "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give at least 1.")
        for name, low, high in (("learning_rate", 0, 10), ("warmup", 0, 1), ("weight_decay", 0, 10),
                                ("clip", 1e-9, math.inf), ("seed", 0, 2**32 - 1), ("skip", 0, 2**31 - 1),
                                ("save_every", 0, math.inf), ("heartbeat", 1, 86400), ("hang_after", 0.01, 86400),
                                ("samples", 0, 64), ("ema", 0, 1 - 1e-9)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}={value} is not within {low} to {high}.")
        if self.hang_exit and self.hang_after is None:
            raise ValueError("hang_exit without hang_after: say after how many seconds.")
        if not self.data:
            raise ValueError('data is empty: name files, or "python".')
        object.__setattr__(self, "data", (self.data,) if isinstance(self.data, str) else tuple(self.data))
        object.__setattr__(self, "out", Path(self.out))
        if self.devices is not None:
            self.check_devices(self.devices)

    def check(self) -> "ModelChoice":
        """The model; raises ValueError for what can be seen to be wrong before any device is touched.

        Data that is not there, an output folder that cannot be written, a batch that does not divide over the devices
        where their number is known, and only then, since it imports the model's module, a model that is not there or
        too small for `length`, or for bytes.
        """
        self._check_files()
        self._check_checkpoints()
        if self.init_from is not None:
            find_tensors(self.init_from)
        if self.devices is None and simulates() and not (self.distributed or COORDINATOR in os.environ):
            self.check_devices(SIMULATED_DEVICES)
        choice = find_model(self.model)
        choice.check(length=self.length, vocab_size=None if self.token_file else BYTES)
        choice.tensor_rules(self.tensor)
        return choice

    def check_devices(self, devices: int) -> None:
        """Raises ValueError unless the batch, with its microbatches, and the mesh's axes divide over `devices`."""
        axes = {name: getattr(self, name) for name in ("replica", "tensor", "context") if getattr(self, name) > 1}
        if devices % math.prod(axes.values()):
            raise ValueError(", ".join(f"{name}={size}" for name, size in axes.items())
                             + f" does not divide the {devices} devices.")
        parts = devices // (self.tensor * self.context) * self.accumulate
        if self.batch_size % parts:
            near = max(parts, round(self.batch_size / parts) * parts)
            many = f" and {self.accumulate} microbatches" * (self.accumulate > 1)
            raise ValueError(f"batch_size={self.batch_size} does not divide over {parts // self.accumulate} "
                             f"devices{many}: give a multiple, say {near}.")
        if self.length % self.context:
            raise ValueError(f"length={self.length} does not divide over context={self.context} devices.")

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.out / "checkpoints"

    @property
    def token_file(self) -> bool:
        """Whether the data are ids of some tokenizer, and not text read as bytes."""
        return Path(self.data[0]).suffix in (".bin", ".npy")

    def _check_files(self) -> None:
        for name in self.data:
            path = Path(name).expanduser()
            if self.data != ("python",) and not path.exists() and not glob.glob(str(path), recursive=True):
                raise ValueError(f"data: {name}: no such file, folder or glob match.")
        check_folder("out", self.out)

    def _check_checkpoints(self) -> None:
        if not self.resume:
            check_no_checkpoints(self.checkpoints)


class InspectConfig(TrainConfig):
    """Report on the step that `train` would run with the same options: its layout, memory and wire, as compiled."""

    def _check_checkpoints(self) -> None:
        pass  # it writes none
