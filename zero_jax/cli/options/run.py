"""The options of what is trained, for how long, by which schedule, how it is evaluated and reported. No JAX."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from zero_jax.cli.options.choices import FRACTION, MAX_COUNT, Count, Within
from zero_jax.data.objectives import MASKED, NOISE, SPAN
from zero_jax.errors import UsageError
from zero_jax.xla.chip import named_chip
from zero_jax.xla.targets import target_of


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What is trained, on what, and how it is divided."""

    devices: Count | None = None
    """How many to use, over all processes. None: all accelerators, or 8 simulated CPU devices where there are none."""

    distributed: bool = False
    """This is one of several processes, and JAX finds the others: under Slurm, Open MPI, Kubernetes, or on a TPU pod.
    `launch`, or ZERO_JAX_COORDINATOR, _NUM_PROCESSES and _PROCESS_ID in the environment, need no option."""

    heartbeat: Annotated[int, Within(1, 86400)] = 100
    """Seconds without a heartbeat of another process after which it counts as failed, and this one ends."""

    offload_disk: Path | None = None
    """With offload=disk or auto: a folder on a local disk of each host, for nothing else; twice the states must fit.
    auto compares files where the host's memory is not enough, and without a folder says what they would take."""

    offload_gib: Annotated[float | None, Within(1e-9, 2**20)] = None
    """With offload=auto: GiB of each device that a step may use. None: what the devices say, or those of the target of
    a dry run; simulated devices say nothing."""

    batch_size: Count = 16
    """Sequences per step, over all devices and microbatches, which it must divide over."""

    ema: Annotated[float | None, Within(0, 1 - 1e-9)] = None
    """Decay of a moving average of the parameters, which validation then uses. None: no average."""

    max_bad_steps: Annotated[int, Within(0, MAX_COUNT)] = 0
    """Consecutive steps that may be skipped because their loss or gradient is not finite; one more ends the run."""

    steps: Count = 700
    """Optimizer steps."""

    epochs: Count | None = None
    """Passes over the part of the data to train on, in whole batches, in place of --steps. None: as --steps says."""

    weight_decay: Annotated[float, Within(0, 10)] = 0.1
    """Decoupled, per unit of learning rate."""

    grad_clip_norm: Annotated[float, Within(1e-9)] = 1.0
    """Largest global norm of the gradient. inf: no clipping."""

    seed: Annotated[int, Within(0, 2**32 - 1)] = 0
    """Of initialisation, batch order and generated text."""

    check_replicas: Annotated[int, Within(0)] = 0
    """Steps between comparisons of what several devices have copies of, which finds devices that compute wrongly; also
    before each save. For stages 0 to 2, or with --replica. 0: never."""

    hang_after: Annotated[float | None, Within(0.01, 86400)] = None
    """Seconds after which an unfinished step makes each process print the stacks of its threads. None: never."""

    hang_exit: bool = False
    """Also end that process, with status 124."""

    init_from: Path | None = None
    """Start from the parameters in a safetensors file (or an index of such files, or a folder with one), by our names
    or Hugging Face's, or from the latest checkpoint in the folder of a run. None: random initialisation."""

    save_every: Annotated[int, Within(0)] = 200
    """Steps between checkpoints; the last step is saved, too. 0: nothing is saved."""

    max_to_keep: Count = 2
    """The number of newest checkpoints to keep."""

    resume: bool = False
    """Continue from the last intact checkpoint in --out, if there is one, with the losses of an uninterrupted run; or
    with more steps, another schedule, learning rate, clipping, weight decay, batch size or data, which is said."""

    out: Path = Path("runs/train")
    """Folder for train.jsonl and loss.png, which a later run in the same folder overwrites, and for checkpoints, which
    it does not."""

    save_to: str | None = None
    """Folder of the checkpoints: local, or gs://bucket/folder with the extra gcs. None: checkpoints in --out."""

    local_checkpoints: Path | None = None
    """Folder on a disk of each host, or in its memory, for copies of the state between checkpoints: a restart on the
    same devices, with --resume, continues from the last copy. None: none are made."""

    local_every: Count | None = None
    """Steps between two such copies."""


DECAY, FINAL_RATE = 0.2, 0.1
"""Fraction of the steps in which wsd decays, and the last rate as a fraction of the peak, where none is given."""


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """The learning rate by step."""

    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Of the learning rate after its warmup: cosine or linear, down to final_rate; wsd: constant, then linear in the
    last steps; or constant."""

    learning_rate: Annotated[float, Within(0, 10)] = 3e-3
    """Peak of the schedule."""

    warmup: Annotated[float, Within(0, 1)] = 0.1
    """Fraction of the steps that warm up linearly, since early gradients are large."""

    decay: Annotated[float | None, Within(0, 1)] = None
    """With wsd: fraction of the steps that decay, at the end. None: 0.2."""

    final_rate: Annotated[float | None, Within(0, 1)] = None
    """Learning rate at the end, as a fraction of its peak. None: 0.1, or 1 where the schedule is constant."""

    def check_schedule(self) -> None:
        """Raises ValueError for parts that are more than the whole."""
        if self.schedule == "wsd" and self.warmup + self._decay > 1:
            raise UsageError(f"warmup={self.warmup} and decay={self._decay} are more than all steps: give fractions "
                             "whose sum is at most 1.")

    @property
    def _decay(self) -> float:
        return DECAY if self.decay is None else self.decay

    def schedule_arguments(self, steps: int) -> dict[str, Any]:
        """The arguments of `zero_jax.optim.presets.make_schedule` for a run of so many steps, but for its name."""
        warmup = min(round(self.warmup * steps), steps - 1)
        final = FINAL_RATE if self.final_rate is None else self.final_rate
        return {"peak": self.learning_rate, "final": final * self.learning_rate, "steps": steps, "warmup": warmup,
                "decay": min(round(self._decay * steps), steps - warmup)}


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """On what the model is evaluated, and how often."""

    eval_data: tuple[str, ...] = ()
    """A separate evaluation set, as data. None: a part of data is held out."""

    eval_fraction: Annotated[float, FRACTION] = 0.05
    """The part of data that is held out, where there is no eval_data: its end, or that of each of several sources."""

    eval_every: Count = 100
    """Steps between evaluations (loss, perplexity, accuracy), each on the same batches."""

    eval_batches: Count = 16
    """Batches of an evaluation, at most."""

    samples: Annotated[int, Within(0, 64)] = 2
    """Continuations of held-out text to print at the end."""


USED_BY = {"mask_fraction": "masked", "noise_fraction": "span", "span_length": "span", "image_shift": "classify",
           "image_flip": "classify", "image_warp": "classify", "num_classes": "classify",
           "image_crop": "classify", "dpo_beta": "preferences"}
"""Which objective an option belongs to."""

WITH_RESPONSES = ("instruct", "preferences")
"""The objectives whose data are JSON lines or Parquet with responses."""


@dataclasses.dataclass(frozen=True)
class ObjectiveOptions:
    """What the model is trained to predict."""

    objective: Literal["causal", "masked", "span", "classify", "instruct", "preferences"] | None = None
    """causal: the next token; masked: tokens that are hidden from the model (BERT); span: spans that are cut out (T5);
    classify: the class of an image; instruct: responses to prompts, of .jsonl or .parquet; preferences: which of two
    responses is better (DPO). None: what the model is made for."""

    mask_fraction: Annotated[float, FRACTION] = MASKED
    """masked: the fraction of the tokens that is predicted. Of these 80 % are masked, 10 % another token, 10 % stay."""

    noise_fraction: Annotated[float, FRACTION] = NOISE
    """span: the fraction of the tokens that is cut out."""

    span_length: Annotated[float, Within(1, 1000)] = SPAN
    """span: tokens that are cut out in one place, on average."""

    num_classes: Count | None = None
    """classify: of the model, in place of its own number. A head of --init-from that has another number is not read: it
    is initialised anew, which is said. None: the model's own; of a folder as the model, on a folder of pictures for
    each class, as many as these."""

    image_crop: Annotated[float | None, Within(1e-4, 1)] = None
    """classify: random resized crops, which ImageNet is trained with at 0.08: of each training image a rectangle of at
    least this share of its area, with an aspect ratio from 3/4 to 4/3, resized to what the model takes, another each
    time. None: the largest square in the middle."""

    image_shift: Annotated[int, Within(0, 1000)] = 0
    """classify: the most pixels by which a training image is moved, up or down and to a side, at random each time."""

    image_flip: bool = False
    """classify: half of the training images are mirrored, others each time."""

    image_warp: Annotated[float, Within(0, 0.5)] = 0.0
    """classify: training images are turned, scaled, sheared and moved at random, others each time: in coordinates from
    -1 to 1 by an affine map whose six numbers are within so much of those of no change. 0.15 is little."""

    dpo_beta: Annotated[float, Within(1e-4, 100)] = 0.1
    """preferences: how strongly the model is held to the one that the run starts from."""

    def check_used(self, objective: str) -> None:
        """Raises ValueError for an option that `objective` does not use."""
        defaults = {field.name: field.default for field in dataclasses.fields(ObjectiveOptions)}
        for name, owner in USED_BY.items():
            if owner != objective and getattr(self, name) != defaults[name]:
                raise UsageError(f"{name}={getattr(self, name)}: it is of objective={owner}, and this run has "
                                 f"objective={objective}: leave it out.")


PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""What a writer imports; the extra of zero-jax that brings it has the writer's name."""


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """What is reported beside train.jsonl."""

    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also write metrics for TensorBoard (tensorboard/ in --out) or Weights & Biases; needs the extra of that name."""

    html: bool = True
    """Write report.html at the end: curves, memory, communication, options, versions."""

    profile: str | None = None
    """FIRST:LAST: trace these steps with JAX's profiler, into profile/ in --out, and say where their time goes."""

    dry_run: bool = False
    """Compile the step and report memory, communication and time; train nothing and write nothing. Whether the data
    are enough is not seen: they are not read."""

    target: str | None = None
    """With dry_run: a target topology to compile for, such as h100:8, as for plan. None: the devices that are here."""

    chip: str | None = None
    """What the devices that are here are, for the predicted time of a step: a chip file, as of zero-jax calibrate, or a
    chip of zero-jax targets. None: known from what they call themselves; of simulated devices no time is predicted."""

    def check_reports(self) -> None:
        """Raises ValueError for an unknown target or chip, a profile of no steps, and what takes no effect."""
        if self.target is not None:
            target_of(self.target)
        if self.chip is not None:
            if self.target is not None:
                raise UsageError(f"chip={self.chip} with target={self.target}, whose chip is another: give "
                                 "--target CHIP_FILE:DEVICES, or leave one of them out.")
            named_chip(self.chip)
        if self.profile is not None and self.profile_steps[1] < self.profile_steps[0]:
            raise UsageError(f"profile={self.profile} has no step: give the first and the last, as in 10:15.")

    @property
    def profile_steps(self) -> tuple[int, int]:
        """The first and the last step to trace; (0, 0) for none."""
        if self.profile is None:
            return 0, 0
        if not (match := re.fullmatch(r"(?:steps=)?([1-9]\d{0,8}):([1-9]\d{0,8})", self.profile)):
            raise UsageError(f"profile={self.profile}: write FIRST:LAST, as in 10:15.")
        return int(match[1]), int(match[2])

    def check_packages(self) -> None:
        """Raises ValueError where the package of a writer is not installed; nothing is imported."""
        for name in self.log_to:
            package = PACKAGES[name]
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:  # a folder `wandb`, as its runs leave, is no package
                raise UsageError(f"log_to={name}: the package {package} is not installed: pip install "
                                 f"'zero-jax[{name}]', or leave it out (train.jsonl has all metrics).")
