"""The command `export`: parameters of a checkpoint as safetensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.checkpoint.manifest import CheckpointError
from zero_jax.cli.environment import simulates
from zero_jax.cli.export_config import ExportConfig
from zero_jax.cli.model_lookup import ModelChoice, find_model, short_name
from zero_jax.cli.renamed import current_options
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError
from zero_jax.interop.model_config import write_config
from zero_jax.interop.naming import OWN, Names
from zero_jax.interop.params_io import export_params, export_tree
from zero_jax.sharding.mesh import simulate_devices

NEEDED = ("precision", "optimizer", "ema", "seq_len", "weight_decay", "grad_clip_norm")
"""The options of a run, beside its model, that say how its state is stored. Runs of version 0.1 have them, too."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "stored": None}


def export_command(config: ExportConfig, *, devices: Sequence[jax.Device] | None = None) -> list[Path]:
    """Writes the files and returns their paths; the state is restored on `devices` (default: all, or one CPU).

    Raises ValueError for a checkpoint that is missing, damaged or was not saved by `train`, for a model that does not
    fit it, and for files that cannot be written.
    """
    config.check()
    checkpoints = Checkpoints(config.checkpoint, read_only=True)
    manifest = checkpoints.manifest(config.at)
    number = manifest.step
    run = saved_run(config.checkpoint, config.model, manifest.config)
    choice = find_model(run.model)
    names = _names(config, choice)
    if devices is None and simulates():
        simulate_devices(1)
    devices = list(devices or jax.devices())
    step = step_of(run, choice, devices)
    shape = (len(devices) * run.accumulate, run.seq_len)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
    options: dict[str, Any] = {
        "names": names, "dtype": DTYPES[config.dtype], "max_file_bytes": config.max_file_bytes}
    if config.to_folder:
        if choice.file_config is None:
            raise UsageError(f"out={config.out}: the module of {choice.name} has no function "
                             "huggingface_config(config), which a folder for transformers needs: name a file, "
                             "*.safetensors.")
        config.out.mkdir(parents=True, exist_ok=True)
        choice.check_weights(config.out)
    if config.ema:
        state = checkpoints.restore(step, batch, at=number).state
        written = export_params(config.file, state, step.layout(batch), ema=True, **options)
    else:
        params, variables = checkpoints.load_params(step, batch, at=number)
        written = export_tree(config.file, params, variables, **options)
    if config.to_folder and choice.file_config is not None:
        dtype = DTYPES[config.dtype] or "float32"  # master weights are stored in float32, but for bf16-stochastic
        file = write_config(config.out, choice.file_config(choice.config), dtype)
        written += [] if file is None else [file]
    return written


def saved_run(checkpoint: str, given: str | None, saved: Any) -> TrainConfig:
    """The options of the run that saved, at stage 3, where a device stores the least; given: its model, if said.

    Raises ValueError for what `train` did not save, and for a model that is not ours and was not given.
    """
    saved = current_options(saved) if isinstance(saved, dict) else {}
    if not saved.keys() >= {"model", *NEEDED}:
        raise CheckpointError(f"{checkpoint} was not saved by the command train: it lacks the options of a "
                              "run. Export it from Python with zero_jax.export_params.")
    model = given or str(saved["model"])
    if given is None and short_name(model.partition(":")[0]) is None:
        raise UsageError(f"model: {checkpoint} names the model {model!r}, whose module would run when it is "
                         f"imported: give --model {model} if you trust it.")
    options = {name: saved[name] for name in NEEDED}
    options["grad_clip_norm"] = float(options["grad_clip_norm"])
    return TrainConfig(model=model, stage=3, **options)


def _names(config: ExportConfig, choice: ModelChoice) -> Names:
    if config.names == "own":
        return OWN
    if choice.names is None:
        raise UsageError(f"names=huggingface: the module of {choice.name} has no function huggingface(config), which "
                         "defines them. Give names=own.")
    return Names(**choice.names(choice.config))
