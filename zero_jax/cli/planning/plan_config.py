"""The configuration of `plan`. Nothing here imports JAX, so that bad input is refused at once."""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Literal

from zero_jax.cli.environment import check_folder
from zero_jax.cli.model_lookup import ModelChoice, find_model, with_remat
from zero_jax.cli.options.choices import Count, Within
from zero_jax.cli.options.of_step import SharedOptions
from zero_jax.cli.planning.prices import price_of
from zero_jax.errors import UsageError
from zero_jax.xla.targets import Target, target_of


@dataclasses.dataclass(frozen=True)
class PlanConfig(SharedOptions):
    """Compile a train step for a target topology, no accelerator needed: does it fit, and what does it send."""

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
    """Draw the model states at every stage, stacked as in the paper's Figure 1, into this file: by formula, before
    anything is compiled."""

    def __post_init__(self) -> None:
        self.settle_shared(simulated=False)
        if self.batch_size is not None:
            if self.batch_per_device != 1:
                raise UsageError(f"batch_size={self.batch_size} and batch_per_device={self.batch_per_device} both say "
                                 "how large the batch is: give one.")
            if self.search in ("fit", "layers"):
                raise UsageError(f"batch_size={self.batch_size} with search={self.search}, which varies sizes: give "
                                 "batch_per_device, or search=mesh.")
            if self.search == "no" and self.batch_size % (self.groups * self.accumulate):
                raise UsageError(f"batch_size={self.batch_size} does not divide over {self.groups} groups of devices "
                                 f"and {self.accumulate} microbatches: give a multiple of "
                                 f"{self.groups * self.accumulate}.")
        elif self.batch_per_device % self.accumulate:
            raise UsageError(f"batch_per_device={self.batch_per_device} does not divide into {self.accumulate} "
                             "microbatches: give a multiple.")
        for name, value in {"prices": self.prices, "deadline": self.deadline}.items():
            if value is not None and self.tokens is None:
                raise UsageError(f"{name}={value} without tokens: give tokens=1e12, say, or leave it out.")
        if self.png is not None and self.png.suffix != ".png":
            raise UsageError(f"png={self.png} does not end in .png.")

    def check(self) -> "tuple[Target, ModelChoice]":
        """The target and the model; raises ValueError for what is wrong and can be known before JAX is imported."""
        target = target_of(self.target)
        others = self.tensor * self.context * self.replica
        if self.mesh and math.prod(self.mesh) * others != target.num_devices or target.num_devices % others:
            with_others = f" x tensor, context, replica {self.tensor}, {self.context}, {self.replica}" * (others > 1)
            raise UsageError(f"mesh={self.mesh}{with_others} is of {math.prod(self.mesh) * others} devices, and "
                             f"{self.target} has {target.num_devices}: give sizes whose product is that.")
        if self.mesh and self.hpz > 1:
            raise UsageError(f"hpz={self.hpz} with mesh={self.mesh}: that has the axes already: leave one of them out.")
        self.data_sizes(target.num_devices)
        if self.prices is not None:
            price_of(self.prices, self.target, target)
        if self.png is not None:
            check_folder("png", self.png.parent)
        choice = with_remat(find_model(self.model), self.remat)
        self.check_attention(choice, target.chip.platform)
        if self.vocab_size is not None:
            choice = choice.with_change("vocab_size", self.vocab_size)
        if self.search == "layers":
            choice.check_field("num_layers")
        if self.seq_len is None and not hasattr(choice.config, "max_length") and choice.batch_shapes is None:
            raise UsageError(f"{self.model} has no max_length in its config: give seq_len=....")
        if self.seq_len is not None and not hasattr(choice.config, "max_length") and choice.batch_shapes is not None:
            raise UsageError(f"seq_len={self.seq_len}: {self.model} takes no sequences: leave it out.")
        self.settle_length(choice, simulated=False)
        choice.check(seq_len=self.seq_len or 1, vocab_size=None)
        choice.tensor_rules(self.tensor)
        self.check_adapters(choice)
        return target, choice

    @property
    def sequences(self) -> int:
        """Of each group of devices, over all microbatches."""
        return self.batch_per_device if self.batch_size is None else self.batch_size // self.groups

    @property
    def groups(self) -> int:
        """Groups of devices that share no sequence."""
        return target_of(self.target).num_devices // (self.tensor * self.context)
