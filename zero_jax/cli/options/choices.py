"""Values of the options that `train` and `plan` share, and what goes together among them. No JAX."""

from typing import Literal, get_args

from zero_jax.errors import UsageError

PrecisionName = Literal["fp32", "bf16", "fp16", "bf16-stochastic"]

Reduce = Literal["every", "once"]
Gather = Literal["use", "forward", "step", "auto"]

Offloaded = Literal["no", "optimizer", "parameters", "gradients", "disk", "auto"]
"""auto: of these the one that fits with the least predicted time."""


def check_offload(offload: str, stage: int) -> None:
    """Raises ValueError for another value than `Offloaded` has, and for one that this stage does not have."""
    if offload not in get_args(Offloaded):
        raise UsageError(f"offload={offload!r} is unknown: give one of {', '.join(get_args(Offloaded))}.")
    if offload in ("parameters", "gradients") and stage < 3:
        raise UsageError(f"offload={offload} at stage {stage}: its parameters are whole on every device: take stage "
                         "3, or offload=optimizer.")


OnOffAuto = Literal["auto", "yes", "no"]

RematName = Literal["model", "no", "yes", "full", "dots", "sqrt"]

Optimizer = Literal[
    "adamw", "adamw-bf16-momentum", "adafactor", "lion", "lion-bf16-momentum", "sgd-momentum", "lamb"]


def check_gather(gather: Gather, stage: int, accumulate: int) -> None:
    """Raises UsageError where a step has no parameters to gather, or gathers them once already."""
    if gather == "use":
        return
    if stage < 3:
        raise UsageError(f"gather={gather} at stage {stage}: its parameters are whole on every device all the time: "
                         "leave it out, or give stage=3, which with gather=forward sends as little as stages 1 and 2.")
    if accumulate == 1 and gather != "forward":
        raise UsageError(f"gather={gather} without accumulate: a step of one batch gathers parameters where it reads "
                         "them: give accumulate=4, say, gather=forward, or leave it out.")
