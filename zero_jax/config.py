"""What a run is told: the configuration of a training run, and the model that its name stands for.

Nothing here imports JAX, so that a mistake is answered at once.
"""

import dataclasses
import difflib
import glob
import importlib
import importlib.util
import math
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from zero_jax.targets import Target, target_of

SIMULATED_DEVICES = 8
"""CPU devices to simulate where no accelerator is present."""

BYTES = 256
"""Size of the vocabulary of text."""

Optimizer = Literal[
    "adamw", "adamw-bf16-momentum", "adafactor", "lion", "lion-bf16-momentum", "sgd-momentum", "lamb"]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a language model at a ZeRO stage."""

    stage: Literal[0, 1, 2, 3] = 3
    """What lies sharded: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."""

    model: str = "models.gpt2:bytes"
    """MODULE:PRESET. Any module on the path or in this folder that has PRESETS and build(config)."""

    data: tuple[str, ...] = ("python",)
    """Text files, folders and globs, read as bytes; or one token file (.bin, .npy); or "python", its own library."""

    max_bytes: int | None = None
    """Read no more text than this, in bytes. None: all."""

    devices: int | None = None
    """How many to use. None: all accelerators; 8 simulated CPU devices where there are none."""

    replica: int = 1
    """Hybrid sharding: this many groups of devices, each with a whole set of shards."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Of computation and wire; the master copy is fp32. bf16 is for accelerators: half the wire, faster arithmetic."""

    optimizer: Optimizer = "adamw"
    """Whose state the devices hold: AdamW's is 8 bytes for each parameter, others' are less."""

    batch_size: int = 16
    """Sequences per step, over all devices, which it must divide over."""

    length: int = 128
    """Tokens per sequence, at most the model's max_length."""

    steps: int = 700
    """Optimizer steps."""

    learning_rate: float = 3e-3
    """Peak of the schedule: linear warmup, then a cosine down to a tenth."""

    warmup: float = 0.1
    """Share of the steps that warm up, since early gradients are large."""

    weight_decay: float = 0.1
    """Decoupled, per unit of learning rate."""

    clip: float = 1.0
    """Largest global norm of the gradient. inf: as it is."""

    seed: int = 0
    """Of initialisation, batch order and generated text."""

    eval_every: int = 100
    """Steps between validations, each on the same held-out batches, at most 16."""

    out: Path = Path("runs/train")
    """Folder for train.jsonl and loss.png, which a later run to the same folder overwrites."""

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage={self.stage!r} is not a ZeRO stage: give 0, 1, 2 or 3.")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision={self.precision!r} is unknown: give fp32 or bf16.")
        if self.optimizer not in get_args(Optimizer):
            known = list(get_args(Optimizer))
            raise ValueError(f"optimizer={self.optimizer!r} is unknown" + _nearest(self.optimizer, known))
        for name in ("devices", "replica", "batch_size", "length", "steps", "eval_every", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give at least 1.")
        for name, low, high in (("learning_rate", 0, 10), ("warmup", 0, 1), ("weight_decay", 0, 10),
                                ("clip", 1e-9, math.inf), ("seed", 0, 2**32 - 1)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value} is not within {low} to {high}.")
        if not self.data:
            raise ValueError('data is empty: name files, or "python".')
        object.__setattr__(self, "data", (self.data,) if isinstance(self.data, str) else tuple(self.data))
        object.__setattr__(self, "out", Path(self.out))
        if self.devices is not None:
            self.check_devices(self.devices)

    def check(self) -> "ModelChoice":
        """The model; raises ValueError for what can be seen to be wrong before any device is touched.

        Data that is not there, an output folder that cannot be written, a batch that does not divide over the devices
        where their number is known, and only then, since it imports the model's module, a model that is not there or
        too small for `length`, or for bytes.
        """
        self._check_files()
        if self.devices is None and simulates():
            self.check_devices(SIMULATED_DEVICES)
        choice = find_model(self.model)
        choice.check(length=self.length, vocab_size=None if self.token_file else BYTES)
        return choice

    def check_devices(self, devices: int) -> None:
        """Raises ValueError unless the batch and the replicas divide over `devices`."""
        if devices % self.replica:
            raise ValueError(f"replica={self.replica} does not divide the {devices} devices.")
        if self.batch_size % devices:
            near = max(devices, round(self.batch_size / devices) * devices)
            raise ValueError(
                f"batch_size={self.batch_size} does not divide over {devices} devices: give a multiple, say {near}.")

    @property
    def token_file(self) -> bool:
        """Whether the data are ids of some tokenizer, and not text read as bytes."""
        return Path(self.data[0]).suffix in (".bin", ".npy")

    def _check_files(self) -> None:
        for name in self.data:
            path = Path(name).expanduser()
            if self.data != ("python",) and not path.exists() and not glob.glob(str(path), recursive=True):
                raise ValueError(f"data: {name}: no such file, folder or glob match.")
        _check_folder("out", self.out)


class InspectConfig(TrainConfig):
    """Report on the step that `train` would run with the same options: its layout, memory and wire, as compiled."""


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
    """Sequences on each device."""

    length: int | None = None
    """Tokens per sequence. None: the model's max_length."""

    precision: Literal["fp32", "bf16"] = "bf16"
    """Of computation and wire; the master copy is fp32."""

    optimizer: Optimizer = "adamw"
    """Whose state the devices hold; the report tells what it saves against AdamW."""

    remat: bool | None = None
    """Recompute each block in the backward pass. None: as the preset says. Needs a config with a field `remat`."""

    mesh: tuple[int, ...] = ()
    """Sizes of ZeRO's mesh axes; their product is the number of devices. Empty: one axis, or a TPU's torus."""

    search: Literal["no", "fit", "layers"] = "no"
    """fit: the smallest stage, largest batch and least rematerialisation that fit; layers: the deepest model."""

    json: bool = False
    """Print JSON instead of tables."""

    png: Path | None = None
    """Draw the memory of every stage, stacked as in the paper's Figure 1, into this file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", tuple(self.mesh))
        for name, value in (("batch_per_device", self.batch_per_device), ("length", self.length),
                            *(("mesh", size) for size in self.mesh)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give at least 1.")
        if self.png is not None and self.png.suffix != ".png":
            raise ValueError(f"png={self.png} does not end in .png.")

    def check(self) -> "tuple[Target, ModelChoice]":
        """The target and the model; raises ValueError for what can be seen to be wrong before JAX starts."""
        target = target_of(self.target)
        if self.mesh and math.prod(self.mesh) != target.num_devices:
            raise ValueError(f"mesh={self.mesh} is of {math.prod(self.mesh)} devices, and {self.target} has "
                             f"{target.num_devices}: give sizes whose product is that.")
        if self.png is not None:
            _check_folder("png", self.png.parent)
        choice = find_model(self.model)
        for name, asked in (("remat", self.remat is not None), ("num_layers", self.search == "layers")):
            if asked and not hasattr(choice.config, name):
                raise ValueError(f"{self.model} has no field {name!r} in its config, which this option changes.")
        if self.length is None and not hasattr(choice.config, "max_length"):
            raise ValueError(f"{self.model} has no max_length in its config: give length=....")
        choice.check(length=self.length or 1, vocab_size=None)
        return target, choice


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """A preset of a module of models: `build(config)` makes the Flax model."""

    name: str
    config: Any
    build: Callable[[Any], Any]

    def check(self, *, length: int, vocab_size: int | None) -> None:
        """Raises ValueError for sequences or token ids that the model's config has no room for."""
        longest, known = getattr(self.config, "max_length", None), getattr(self.config, "vocab_size", None)
        if longest is not None and length > longest:
            raise ValueError(f"length={length} is longer than max_length={longest} of {self.name}.")
        if known is not None and vocab_size is not None and vocab_size > known:
            raise ValueError(f"The data's vocabulary of {vocab_size} is larger than vocab_size={known} of {self.name}.")


def find_model(name: str) -> ModelChoice:
    """The model that MODULE:PRESET stands for, of any importable module with `PRESETS` and `build`.

    The current folder is searched too. Raises ValueError for one that is not there, with the nearest that is; an
    error inside the module is its own.
    """
    module_name, _, preset = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not _exists(module_name):
        raise ValueError(
            f"model={name!r}: there is no module {module_name!r}" + _nearest(module_name, _modules_beside(module_name)))
    module = importlib.import_module(module_name)
    presets, build = getattr(module, "PRESETS", None), getattr(module, "build", None)
    if not isinstance(presets, Mapping) or not callable(build):
        raise ValueError(
            f"model={name!r}: {module_name} lacks PRESETS (configs by name) or build(config) (a Flax model)"
            + _nearest(module_name, _modules_beside(module_name)))
    if preset not in presets:
        wrong = f"{module_name} has no preset {preset!r}" if preset else f"name a preset, as in {module_name}:PRESET"
        raise ValueError(f"model={name!r}: {wrong}" + _nearest(preset, list(presets)))
    return ModelChoice(name, presets[preset], build)


def _check_folder(name: str, path: Path) -> None:
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{name}={path} cannot be written: {existing} is not a folder that allows it.")


def simulates() -> bool:
    """Whether to simulate devices: JAX_PLATFORMS says cpu, or says nothing and there is no accelerator's file."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms == "cpu"
    files = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")
    return not any(glob.glob(pattern) for pattern in files)


def _exists(module: str) -> bool:
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its package is not there; a name such as "a..b"
        return False


def _modules_beside(module: str) -> list[str]:
    """Names of modules in the same package; in `models` where there is no such package."""
    for package in (module.rpartition(".")[0], "models"):
        if _exists(package):
            spec = importlib.util.find_spec(package)
            folders = spec.submodule_search_locations if spec else None
            return [f"{package}.{found.name}" for found in pkgutil.iter_modules(folders)]
    return []


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    hint = f". Did you mean {close[0]!r}?" if close else "."
    return hint + (f" There are: {', '.join(known)}." if known else "")
