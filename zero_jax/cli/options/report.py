"""The options of what a run reports, to whom, and of a run that is only planned. Nothing here imports JAX."""

import dataclasses
import importlib.util
import re
from typing import Literal

from zero_jax.errors import UsageError
from zero_jax.xla.targets import target_of

WriterName = Literal["tensorboard", "wandb"]

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""What a writer imports; the extra of zero-jax that brings it has the writer's name."""


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """What is reported beside train.jsonl."""

    log_to: tuple[WriterName, ...] = ()
    """Also write metrics for TensorBoard (tensorboard/ in out) or Weights & Biases; needs the extra of that name."""

    html: bool = True
    """Write report.html at the end: curves, memory, communication, options, versions."""

    profile: str | None = None
    """steps=10:15: trace steps 10 to 15 with JAX's profiler, into profile/ in out, and say where their time goes."""

    dry_run: bool = False
    """Compile the step and report memory, communication and time; train nothing and write nothing. Whether the data
    are enough is not seen: they are not read."""

    target: str | None = None
    """With dry_run: a target topology to compile for, such as h100:8, as for plan. None: the devices that are here."""

    def check_reports(self) -> None:
        """Raises ValueError for an unknown target, a profile of no steps, and what takes no effect."""
        if self.target is not None:
            target_of(self.target)
        if self.profile is not None and self.profile_steps[1] < self.profile_steps[0]:
            raise UsageError(f"profile={self.profile} has no step: give the first and the last, as in steps=10:15.")

    @property
    def profile_steps(self) -> tuple[int, int]:
        """The first and the last step to trace; (0, 0) for none."""
        if self.profile is None:
            return 0, 0
        if not (match := re.fullmatch(r"steps=([1-9]\d{0,8}):([1-9]\d{0,8})", self.profile)):
            raise UsageError(f"profile={self.profile!r}: write steps=FIRST:LAST, as in steps=10:15.")
        return int(match[1]), int(match[2])

    def check_packages(self) -> None:
        """Raises ValueError where the package of a writer is not installed; nothing is imported."""
        for name in self.log_to:
            package = PACKAGES[name]
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:  # a folder `wandb`, as its runs leave, is no package
                raise UsageError(f"log_to={name}: the package {package} is not installed: pip install "
                                 f"'zero-jax[{name}]', or leave it out (train.jsonl has all metrics).")
