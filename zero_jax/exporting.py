"""The command `export`: parameters of a checkpoint as safetensors."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.checkpoint import Checkpoints
from zero_jax.config import TrainConfig
from zero_jax.export_config import ExportConfig
from zero_jax.interop import export_params, export_tree
from zero_jax.manifest import CheckpointError
from zero_jax.mesh import simulate_devices
from zero_jax.model_choice import ModelChoice, find_model
from zero_jax.resume import FIXED
from zero_jax.surroundings import simulates
from zero_jax.tensor_names import OWN, Names
from zero_jax.train import step_of

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "stored": None}


def export_command(config: ExportConfig, *, devices: Sequence[jax.Device] | None = None) -> list[Path]:
    """Writes what `config` says and returns the paths; `devices` (default: all, or a CPU) hold the state meanwhile.

    Raises ValueError for a checkpoint that is not there, is damaged or was not saved by `train`, for a model that does
    not fit it, and for what cannot be written.
    """
    config.check()
    checkpoints = Checkpoints(config.checkpoint)
    manifest = checkpoints.manifest(config.at)
    number = manifest.step
    run = _run(config, manifest.config)
    choice = find_model(run.model)
    names = _names(config, choice)
    if devices is None and simulates():
        simulate_devices(1)
    devices = list(devices or jax.devices())
    step = step_of(run, choice, devices)
    shape = (len(devices) * run.accumulate, run.length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
    options: dict[str, Any] = {
        "names": names, "dtype": DTYPES[config.dtype], "max_file_bytes": config.max_file_bytes}
    if config.ema:
        state = checkpoints.restore(step, batch, at=number).state
        return export_params(config.out, state, step.layout(batch), ema=True, **options)
    params, variables = checkpoints.load_params(step, batch, at=number)
    return export_tree(config.out, params, variables, **options)


def _run(config: ExportConfig, saved: Any) -> TrainConfig:
    """The options of the run that saved, at stage 3, where each device holds the least."""
    if not isinstance(saved, dict) or not saved.keys() >= set(FIXED):
        raise CheckpointError(f"{config.checkpoint} was not saved by the command train: it does not tell the options "
                              "of a run. Export it from Python with zero_jax.export_params.")
    model = config.model or str(saved["model"])
    if config.model is None and not model.startswith("models."):
        raise ValueError(f"model: {config.checkpoint} names the model {model!r}, whose module would run when it is "
                         f"imported: give --model {model} if you trust it.")
    options = {name: saved[name] for name in ("precision", "optimizer", "ema", "length", "weight_decay", "clip")}
    options["clip"] = math.inf if options["clip"] == "inf" else options["clip"]
    return TrainConfig(model=model, stage=3, **options)


def _names(config: ExportConfig, choice: ModelChoice) -> Names:
    if config.names == "own":
        return OWN
    if choice.names is None:
        raise ValueError(f"names=huggingface: the module of {choice.name} has no function huggingface(config), which "
                         "tells them. Give names=own.")
    return Names(**choice.names(choice.config))
