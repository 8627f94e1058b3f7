"""The options of `plan` by itself: for which target, of which step, and what it prints. No JAX."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from zero_jax.cli.options.choices import Count, Within


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What is compiled, for which target, and what is shown."""

    target: str = "h100:8"
    """h100:16x8 (hosts x GPUs per host), v5p:8x8x16 (a torus), ...; 8xH100, p5.48xlarge and v5p-256 do as well; or a
    file of your own, ./mychip.toml:4x8."""

    batch_per_device: Count = 1
    """Sequences on each device, or each group of tensor x context devices that share them, over all microbatches."""

    batch_size: Count | None = None
    """Sequences per step, over all devices and microbatches, as of train. None: as batch_per_device says."""

    mesh: tuple[Count, ...] = ()
    """Sizes of ZeRO's mesh axes; with the others their product is the number of devices. Empty: one, or a torus."""

    vocab_size: Count | None = None
    """Of the model, in place of the preset's: tensor parallelism needs one that divides. None: as the preset says."""

    search: Literal["no", "fit", "layers", "mesh"] = "no"
    """fit: the stage, batch and remat that fit with most predicted tokens/s; layers: the deepest model. mesh: of this
    batch the stage, axes, remat, microbatches and what else is not given, ranked by formula, the best of it compiled.
    """

    tokens: Annotated[int, Within(1)] | None = None
    """How many tokens are trained on, as 1e12: the report says how many days that takes at the predicted speed."""

    prices: Path | None = None
    """With tokens: a TOML file with dollars per device-hour, as h100 = 2.5 below [prices], by chip or by target: the
    report says what the tokens cost."""

    deadline: Annotated[float, Within(1e-9)] | None = None
    """With tokens: the days that they may take. The exit status is 3 where they take more."""

    remedies: bool = True
    """Where the step does not fit: compile what may help, and print what does, for up to two minutes."""

    json: bool = False
    """Print JSON instead of tables."""

    png: Path | None = None
    """Draw the memory of every stage, stacked as in the paper's Figure 1, into this file."""
