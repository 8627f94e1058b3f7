"""Values of the options that `train` and `plan` share, and what goes together among them. No JAX."""

from typing import Literal, get_args

from zero_jax.errors import UsageError

PrecisionName = Literal["fp32", "bf16", "fp16", "bf16-stochastic"]

Reduce = Literal["every", "once"]
Gather = Literal["use", "forward", "step", "auto"]

Offloaded = Literal["no", "optimizer", "parameters", "gradients", "disk", "auto"]
"""auto: of these the one that fits with the least predicted time."""


def check_offload(offload: str) -> None:
    """Raises ValueError for another value than `Offloaded` has."""
    if offload not in get_args(Offloaded):
        raise UsageError(f"offload={offload!r} is unknown: give one of {', '.join(get_args(Offloaded))}.")


OnOffAuto = Literal["auto", "yes", "no"]

RematName = Literal["model", "no", "yes", "full", "dots", "sqrt"]

Optimizer = Literal[
    "adamw", "adamw-bf16-momentum", "adafactor", "lion", "lion-bf16-momentum", "sgd-momentum", "lamb"]
