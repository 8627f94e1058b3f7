"""Values of the options that `train` and `plan` share, and what goes together among them. No JAX."""

from typing import Literal

from zero_jax.errors import UsageError

PrecisionName = Literal["fp32", "bf16", "fp16", "bf16-stochastic"]

Reduce = Literal["every", "once"]
Gather = Literal["use", "step", "auto"]

Offloaded = Literal["no", "optimizer"]

RematName = Literal["model", "no", "yes", "full", "dots", "sqrt"]

Optimizer = Literal[
    "adamw", "adamw-bf16-momentum", "adafactor", "lion", "lion-bf16-momentum", "sgd-momentum", "lamb"]


def check_gather(gather: Gather, stage: int, accumulate: int) -> None:
    """Raises UsageError where a step has no parameters to gather, or gathers them once already."""
    if gather == "use":
        return
    if stage < 3:
        raise UsageError(f"gather={gather} at stage {stage}: its parameters are whole on every device all the time: "
                         "leave it out, or give stage=3.")
    if accumulate == 1:
        raise UsageError(f"gather={gather} without accumulate: the one batch of a step gathers parameters where it "
                         "reads them: give accumulate=4, say, or leave it out.")
