"""The options of `plan` by itself: for which target, of which step, and what it prints. No JAX."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from zero_jax.cli.options.choices import Count, Offloaded, OnOffAuto, Optimizer, PrecisionName, RematName, Within

MAX_DEFAULT_LENGTH = 8192
"""Tokens of a sequence where none are given: some models take far more, which few train with."""


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What is compiled, for which target, and what is shown."""

    target: str = "h100:8"
    """h100:16x8 (hosts x GPUs per host), v5p:8x8x16 (a torus), ...; 8xH100, p5.48xlarge and v5p-256 do as well; or a
    file of your own, ./mychip.toml:4x8."""

    model: str = "gpt2:1.5b"
    """A preset, as gpt2:124m (zero-jax models lists them), or a folder with a config.json of Hugging Face's.
    Or MODULE:PRESET of any module on the path or in this folder that has PRESETS and build(config)."""

    stage: Literal[0, 1, 2, 3] = 3
    """What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""

    batch_per_device: Count = 1
    """Sequences on each device, or each group of tensor x context devices that share them, over all microbatches."""

    batch_size: Count | None = None
    """Sequences per step, over all devices and microbatches, as of train. None: as batch_per_device says."""

    seq_len: Count | None = None
    """Tokens per sequence. None: the model's max_length, at most 8,192, as the report says."""

    precision: PrecisionName = "bf16"
    """Of computation and communication; master weights are fp32, except with bf16-stochastic."""

    optimizer: Optimizer = "adamw"
    """The report says how much state it saves against AdamW."""

    remat: RematName = "model"
    """Activation checkpointing. model: as the preset does it; no, yes: the model's own, off or on; full, dots, sqrt:
    from outside, saving each block's input, also its products, or the input of every sqrt-th block."""

    mesh: tuple[Count, ...] = ()
    """Sizes of ZeRO's mesh axes; with the others their product is the number of devices. Empty: one, or a torus."""

    vocab_size: Count | None = None
    """Of the model, in place of the preset's: tensor parallelism needs one that divides. None: as the preset says."""

    offload: Offloaded = "no"
    """optimizer: the optimizer's states, the moving average and, with bf16, the fp32 master weights are in host memory
    (ZeRO-Offload); the update streams them through the device. parameters: at stage 3 also what the model reads
    (ZeRO-Infinity). gradients: these, and the gradients of stacked layers as they are made. disk: what optimizer puts
    there is in files. auto: compiles each, and takes the one that fits with the least predicted time; gradients only
    where nothing that moves less fits, files only where the host's memory is not enough, on a target whose hosts have
    disks."""

    offload_fraction: Annotated[float, Within(1e-9, 1)] = 1.0
    """With offload=optimizer: the share of these states that is in host memory, all of a parameter's or none; the rest
    stays on the devices. auto finds the least that fits."""

    overlap: OnOffAuto = "auto"
    """On TPU v5p and v6e: gather and reduce on the SparseCores while the TensorCores compute; on v5e, at stages 1 to 3,
    within matrix products and elementwise work. It costs memory and time to compile. auto: on those; no: never; yes: an
    error on others, and the step is compiled without it, too, to say what it changes."""

    prefetch_weights: bool = False
    """On GPUs, TPU v5p and v6e at stage 3: each layer of a loop gathers the parameters of the next one while it
    computes. The step is compiled without it, too, to say what it changes."""

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
