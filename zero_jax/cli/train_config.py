"""The configuration of training. Nothing here imports JAX, so that bad input is refused at once."""

import dataclasses
import math
import os
import re
from pathlib import Path

from zero_jax.arguments import check_path
from zero_jax.checkpoint.object_store import check_scheme, check_target, is_remote, numbers_in
from zero_jax.cli.environment import check_folder, checkpoint_folder, simulates
from zero_jax.cli.model_lookup import ModelChoice, find_model, is_folder, with_remat
from zero_jax.cli.options.data import DataOptions, check_eval_data, is_tokens
from zero_jax.cli.options.diloco import DiLoCoOptions
from zero_jax.cli.options.of_step import SIMULATED_LENGTH, SharedOptions
from zero_jax.cli.options.run import EvaluationOptions, ObjectiveOptions, ReportOptions, RunOptions, ScheduleOptions
from zero_jax.data.tokenizer import TOKENIZERS
from zero_jax.disk import generations
from zero_jax.distributed.launch import COORDINATOR
from zero_jax.errors import UsageError
from zero_jax.interop.safetensors_file import find_tensors
from zero_jax.xla.targets import target_of

SIMULATED_DEVICES, MAX_SIMULATED_DEVICES = 8, 1024
"""CPU devices to simulate where there is no accelerator, and how many there may be."""


@dataclasses.dataclass(frozen=True)
class TrainConfig(DiLoCoOptions, ReportOptions, EvaluationOptions, ScheduleOptions, ObjectiveOptions, DataOptions,
                  RunOptions, SharedOptions):
    """Train a model of text or images at a ZeRO stage. --config run.toml: options from a file; flags win."""

    def __post_init__(self) -> None:
        check_path("out", self.out)
        if self.documents is None:
            object.__setattr__(self, "documents", "pack" if self.objective == "instruct" else "concatenate")
        self.settle_shared(simulated=self.is_simulated, schedule=self.schedule)
        if self.offload_disk is not None:
            generations.check_folder(self.offload_disk)
        self.check_diloco()
        self.check_schedule()
        if self.epochs is not None and self.steps != TrainConfig.steps:
            raise UsageError(f"steps={self.steps} and epochs={self.epochs} both say when the run ends: give one.")
        if self.objective is not None:
            self.check_used(self.objective)
        if "" in self.eval_data:
            raise UsageError('eval_data is empty: name files, or "python".')
        self.check_reports()
        self.check_data_options()
        if re.match(r"[a-z][a-z0-9]{1,9}:/", str(self.out)):
            raise UsageError(f"out={self.out}: give a local folder, and --save-to for checkpoints in an object store.")
        if self.save_to is not None:
            check_path("save_to", self.save_to)
            check_scheme(self.save_to)
        if self.tokenizer is None and is_folder(self.model) and not self.reads_images and not any(
                map(is_tokens, self.data)) and any((Path(self.model) / name).is_file() for name in TOKENIZERS):
            object.__setattr__(self, "tokenizer", Path(self.model))  # ids of another would mean other texts to it
        if self.devices is not None:
            self.check_devices(self.devices)

    @property
    def is_simulated(self) -> bool:
        """Whether the devices are simulated, and none of a target."""
        return self.target is None and simulates()

    def check(self) -> "ModelChoice":
        """The model; raises ValueError for what is wrong and can be known before any device is used.

        Missing data, an output folder that cannot be written, a batch that does not divide over the devices where their
        number is known, and only then, since it imports the model's module, a model that does not exist. What its
        objective makes of the data is checked by `objectives.choose.objective_of`.
        """
        self.check_packages()
        self.check_data()
        check_eval_data(self, self.eval_data)
        check_folder("out", self.out)
        if self.local_checkpoints is not None:
            check_folder("local_checkpoints", self.local_checkpoints)
        self._check_checkpoints()
        folder = self.offload_disk
        if folder is not None and not self.resume and not self.dry_run and generations.records_in(folder):
            raise UsageError(f"offload_disk={folder} has the states of a run: --resume goes on from them; for a new "
                             "run remove the folder, or name another one.")
        file = self.init_from if self.init_from is None or checkpoint_folder(self.init_from) is None else None
        if file is not None:
            find_tensors(file)
        if self.epochs is None:
            self._check_profile()
        elif self.dry_run:
            raise UsageError(f"epochs={self.epochs}: a dry run reads no data: give steps.")
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
        choice = self.find_model()
        self.settle_length(choice, self.is_simulated)
        if self.seq_len is None:  # which texts without a longest, and images, take as they always did
            object.__setattr__(self, "seq_len", SIMULATED_LENGTH)
        self._check_context()
        platform = target_of(self.target).chip.platform if self.target else "cpu" if simulates() else None
        self.check_attention(choice, platform)
        choice.tensor_rules(self.tensor)
        if file is not None:
            choice.check_weights(file, find_tensors(file))
        self.check_adapters(choice)
        return choice

    def find_model(self) -> "ModelChoice":
        """The model, with what options change in its config. Raises ValueError where there is none."""
        choice = with_remat(find_model(self.model), self.remat)
        return choice if self.num_classes is None else choice.with_change("num_classes", self.num_classes)

    def settled(self, batches_per_epoch: int) -> "TrainConfig":
        """With the number of steps in place of the number of epochs; raises ValueError where they are too many."""
        if self.epochs is None:
            return self
        config = dataclasses.replace(self, epochs=None, steps=self.epochs * batches_per_epoch)
        config._check_profile()
        return config

    def _check_profile(self) -> None:
        if self.profile_steps[1] > self.steps:
            raise UsageError(f"profile={self.profile} ends after the last of steps={self.steps}: give an earlier step.")

    def check_devices(self, devices: int) -> None:
        """Raises ValueError unless the batch, with its microbatches, and the mesh's axes divide over `devices`."""
        axes = {name: getattr(self, name) for name in ("replica", "tensor", "context") if getattr(self, name) > 1}
        if devices % math.prod(axes.values()):
            raise UsageError(", ".join(f"{name}={size}" for name, size in axes.items())
                             + f" does not divide the {devices} devices.")
        self.data_sizes(devices)
        parts = devices // (self.tensor * self.context) * self.accumulate
        if self.batch_size % parts:
            near = max(parts, round(self.batch_size / parts) * parts)
            many = f" and {self.accumulate} microbatches" * (self.accumulate > 1)
            raise UsageError(f"batch_size={self.batch_size} does not divide over {parts // self.accumulate} "
                             f"devices{many}: give a multiple, say {near}.")
        self._check_context()

    def _check_context(self) -> None:
        if self.seq_len is not None and self.seq_len % self.context:
            raise UsageError(f"seq_len={self.seq_len} does not divide over context={self.context} devices.")

    @property
    def checkpoints(self) -> Path | str:
        """The folder of the run's checkpoints; text for one in an object store."""
        if self.save_to is None:
            return self.out / "checkpoints"
        return self.save_to if is_remote(self.save_to) else Path(self.save_to)

    def next_command(self, options: str = "") -> str:
        """The command that goes on with this run, with further options: that of make where make has started this."""
        file = self.out / "config.toml"
        args = (f"--config {file} " if file.is_file() else "") + f"--resume{options}"
        return f'make train ARGS="{args}"' if "MAKELEVEL" in os.environ else f"python -m zero_jax train {args}"

    def _check_checkpoints(self) -> None:
        if self.dry_run:
            return  # it writes none
        if self.save_every:
            check_target(self.checkpoints)
        if not self.resume:
            if numbers := numbers_in(self.checkpoints):  # a new run must not mix its own with them
                more = f" --steps {2 * max(numbers)}" if self.epochs is None and max(numbers) >= self.steps else ""
                raise UsageError(
                    f"{self.checkpoints} has checkpoints of an earlier run, up to step {max(numbers)}: --resume "
                    f"continues from there, as in {self.next_command(more)}; for a new run give another out, or remove "
                    "that folder.")
        elif isinstance(self.checkpoints, str):
            numbers_in(self.checkpoints)  # which says what is wrong with it before JAX is imported


class InspectConfig(TrainConfig):
    """Report on the step that `train` would run with the same options: compiled layout, memory and communication."""

    def check_reports(self) -> None:
        """As for a run, and raises ValueError for what only a run does."""
        super().check_reports()
        for name in ("log_to", "profile", "dry_run", "epochs"):
            if getattr(self, name):
                raise UsageError(f"{name}: inspect trains nothing: leave it out, or give it to train.")

    def _check_checkpoints(self) -> None:
        pass  # it writes none
