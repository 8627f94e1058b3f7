"""What a plan is told. Nothing here imports JAX, so that a mistake is answered at once."""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from zero_jax.config import Optimizer, PrecisionName, Reduce
from zero_jax.model_choice import ModelChoice, find_model
from zero_jax.surroundings import check_folder
from zero_jax.targets import Target, target_of


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Compile a train step for hardware that is not there: does it fit, and what holds the memory and the wire."""

    target: str = "h100:8"
    """h100:16x8 (hosts x GPUs of each), v5p:8x8x16 (a torus), ...; or a file of your own, ./mychip.toml:4x8."""

    model: str = "models.gpt2:1.5b"
    """MODULE:PRESET. Any module on the path or in this folder that has PRESETS and build(config)."""

    stage: Literal[0, 1, 2, 3] = 3
    """What lies sharded: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."""

    batch_per_device: int = 1
    """Sequences on each device, or each group of tensor x context devices that share them, over all microbatches."""

    accumulate: int = 1
    """Microbatches of a step, one after another."""

    reduce: Reduce = "every"
    """Reduce every microbatch's gradient, or the sum of them once."""

    length: int | None = None
    """Tokens per sequence. None: the model's max_length."""

    precision: PrecisionName = "bf16"
    """Of computation and wire; the master copy is fp32, but for bf16-stochastic."""

    optimizer: Optimizer = "adamw"
    """Whose state the devices hold; the report tells what it saves against AdamW."""

    remat: bool | None = None
    """Recompute each block in the backward pass. None: as the preset says. Needs a config with a field `remat`."""

    mesh: tuple[int, ...] = ()
    """Sizes of ZeRO's mesh axes; with the others their product is the number of devices. Empty: one, or a torus."""

    tensor: int = 1
    """Devices over which the model's tensor_rules split it (tensor parallelism); they share their sequences."""

    vocab_size: int | None = None
    """Of the model, in place of the preset's: tensor parallelism needs one that divides. None: as the preset says."""

    context: int = 1
    """Devices over which each sequence is split."""

    replica: int = 1
    """Groups of devices that each hold all shards (hybrid sharding)."""

    sequence_parallel: bool = False
    """Split what lies between tensor-parallel products along the sequence."""

    partition_activations: Literal["no", "yes", "cpu"] = "no"
    """Split checkpoints over the tensor axis (P_a); cpu: and keep them in the host's memory."""

    recompute: Literal["model", "full", "dots", "sqrt"] = "model"
    """What blocks keep for backward: as the model does, their input, products too, or the input of every sqrt-th."""

    search: Literal["no", "fit", "layers"] = "no"
    """fit: the smallest stage, largest batch and least rematerialisation that fit; layers: the deepest model."""

    json: bool = False
    """Print JSON instead of tables."""

    png: Path | None = None
    """Draw the memory of every stage, stacked as in the paper's Figure 1, into this file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", tuple(self.mesh))
        for name, value in (("batch_per_device", self.batch_per_device), ("length", self.length),
                            ("accumulate", self.accumulate), ("tensor", self.tensor), ("context", self.context),
                            ("replica", self.replica),
                            *(("mesh", size) for size in self.mesh)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give at least 1.")
        if self.batch_per_device % self.accumulate:
            raise ValueError(f"batch_per_device={self.batch_per_device} does not divide into {self.accumulate} "
                             "microbatches: give a multiple.")
        if self.png is not None and self.png.suffix != ".png":
            raise ValueError(f"png={self.png} does not end in .png.")

    def check(self) -> "tuple[Target, ModelChoice]":
        """The target and the model; raises ValueError for what can be seen to be wrong before JAX starts."""
        target = target_of(self.target)
        others = self.tensor * self.context * self.replica
        if self.mesh and math.prod(self.mesh) * others != target.num_devices or target.num_devices % others:
            with_others = f" x tensor, context, replica {self.tensor}, {self.context}, {self.replica}" * (others > 1)
            raise ValueError(f"mesh={self.mesh}{with_others} is of {math.prod(self.mesh) * others} devices, and "
                             f"{self.target} has {target.num_devices}: give sizes whose product is that.")
        if self.png is not None:
            check_folder("png", self.png.parent)
        choice = find_model(self.model)
        for name, asked in (("remat", self.remat is not None), ("num_layers", self.search == "layers"),
                            ("vocab_size", self.vocab_size is not None)):
            if asked and not hasattr(choice.config, name):
                raise ValueError(f"{self.model} has no field {name!r} in its config, which this option changes.")
        if self.vocab_size is not None:
            choice = dataclasses.replace(choice, config=dataclasses.replace(choice.config, vocab_size=self.vocab_size))
        if self.length is None and not hasattr(choice.config, "max_length"):
            raise ValueError(f"{self.model} has no max_length in its config: give length=....")
        choice.check(length=self.length or 1, vocab_size=None)
        choice.tensor_rules(self.tensor)
        return target, choice

    @property
    def groups(self) -> int:
        """Groups of devices that share no sequence."""
        return target_of(self.target).num_devices // (self.tensor * self.context)
