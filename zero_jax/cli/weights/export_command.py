"""The command `export`: parameters of a checkpoint, or its adapters, as safetensors; or programs to serve it with."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.checkpoint.manifest import Manifest
from zero_jax.checkpoint.outer_params import slices_in
from zero_jax.checkpoint.plain_params import export_orbax
from zero_jax.cli.environment import simulates
from zero_jax.cli.model_lookup import ModelChoice, find_model, is_folder, short_name
from zero_jax.cli.step_from_config import abstract_batch, step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.resume import LORA
from zero_jax.cli.weights.file_configs import ExportConfig
from zero_jax.cli.weights.serving_programs import model_programs, weights_of
from zero_jax.cli.weights.tokenizer_files import check_tokenizer, tokenizer_files, write_files
from zero_jax.errors import CheckpointError, UsageError
from zero_jax.interop.lora_files import export_lora, export_merged, merge_lora
from zero_jax.interop.model_config import write_config
from zero_jax.interop.naming import Names
from zero_jax.interop.params_io import export_params, export_tree
from zero_jax.interop.programs import export_programs
from zero_jax.sharding.mesh import simulate_devices
from zero_jax.state import ZeroState
from zero_jax.step.step import ZeroTrainStep
from zero_jax.tree import named_leaves

NEEDED = ("precision", "optimizer", "ema", "seq_len", "weight_decay", "grad_clip_norm")
"""The options of a run, beside its model, that say how its state is stored. Runs of version 0.1 have them, too."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "stored": None}


def export_command(config: ExportConfig, *, devices: Sequence[jax.Device] | None = None) -> list[Path]:
    """Writes the files and returns their paths; the state is restored on `devices` (default: all, or one CPU).

    Raises ValueError for a checkpoint that is missing, damaged or was not saved by `train`, for a model that does not
    fit it, for files that cannot be written, and for options that cannot take effect.
    """
    config.check()
    checkpoints = Checkpoints(config.checkpoint, read_only=True)
    manifest = checkpoints.manifest(config.at)
    number = manifest.step
    run = saved_run(config.checkpoint, config.model, manifest.config)
    if config.ema and run.ema is None:
        raise UsageError("ema: the run kept no average: leave it out.")
    choice = find_model(run.model)
    adapters = run.lora_rank is not None and not config.merge
    config.check_adapter() if adapters else config.check_whole(run.lora_rank)
    if config.seq_len is not None:
        choice.check(seq_len=config.seq_len, vocab_size=None)
    names = _names("huggingface" if adapters else config.names, choice)
    if devices is None and simulates():
        simulate_devices(1)
    devices = list(devices or jax.devices())
    step = step_of(run, choice, devices)
    batch = abstract_batch(choice, len(devices) * run.accumulate, run.seq_len)
    if adapters:
        state = restored(checkpoints, step, batch, at=number, ema=config.ema)
        source = manifest.config.get("init_from") if isinstance(manifest.config, dict) else None
        return export_lora(config.out, step, state, names=names, base=source)
    if config.format != "safetensors":
        trees = whole_model(checkpoints, step, batch, at=number, ema=config.ema, merge=config.merge)
        return export_for_serving(config, choice, *trees, number)
    files, ids = {}, {}
    options: dict[str, Any] = {
        "names": names, "dtype": DTYPES[config.dtype], "max_file_bytes": config.max_file_bytes}
    if config.to_folder:
        if choice.file_config is None:
            raise UsageError(f"out={config.out}: the module of {choice.name} has no function "
                             "huggingface_config(config), which a folder for transformers needs: name a file, "
                             "*.safetensors.")
        assert isinstance(manifest.config, dict)
        files, ids = tokenizer_files(manifest.config, config.tokenizer, choice.file_config(choice.config))
        check_tokenizer(config.out, files)
        config.out.mkdir(parents=True, exist_ok=True)
        choice.check_weights(config.out, {})
    if run.lora_rank is not None:
        state = restored(checkpoints, step, batch, at=number, ema=config.ema)
        written = export_merged(config.file, step, state, **options)
    elif config.ema:
        state = checkpoints.restore(step, batch, at=number).state
        written = export_params(config.file, state, step.layout(batch), ema=True, **options)
    else:
        params, variables = checkpoints.load_params(step, batch, at=number)
        written = export_tree(config.file, params, variables, **options)
    if config.to_folder and choice.file_config is not None:
        dtype = DTYPES[config.dtype] or "float32"  # master weights are stored in float32, but for bf16-stochastic
        file = write_config(config.out, {**choice.file_config(choice.config), **ids}, dtype)
        written += [*([] if file is None else [file]), *write_files(config.out, files)]
    return written


def restored(checkpoints: Checkpoints, step: ZeroTrainStep, batch: Any, *, at: int, ema: bool) -> ZeroState:
    """The state of a checkpoint; ema: with the moving average as its parameters."""
    state = checkpoints.restore(step, batch, at=at).state
    return dataclasses.replace(state, params=state.ema) if ema else state


def saved_state(checkpoints: Checkpoints, step: ZeroTrainStep, batch: Any, manifest: Manifest) -> ZeroState:
    """A new state with the parameters and variables of a checkpoint, of slices the outer ones; nothing else is read.

    Where `step` has adapters or keeps an average, it is the state that was saved.
    """
    if slices_in(manifest) is None and (step.options.ema is not None or getattr(step, "lora", None) is not None):
        return checkpoints.restore(step, batch, at=manifest.step).state
    params, variables = checkpoints.load_params(step, batch, at=manifest.step)
    return step.init(jax.random.key(0), batch, params={**dict(named_leaves(params)), **dict(named_leaves(variables))})


def whole_model(checkpoints: Checkpoints, step: ZeroTrainStep, batch: Any, *, at: int, ema: bool, merge: bool
                ) -> tuple[Any, Any]:
    """(parameters, variables) of a checkpoint in logical shapes; ema: their average; merge: with its adapters added."""
    if not (ema or merge):
        return checkpoints.load_params(step, batch, at=at)
    state = restored(checkpoints, step, batch, at=at, ema=ema)
    return merge_lora(step, state, dtype="float32") if merge else step.params(state), state.variables


def export_for_serving(config: ExportConfig, choice: ModelChoice, params: Any, variables: Any, number: int
                       ) -> list[Path]:
    """Writes `config.format`, which is no safetensors, of the checkpoint `number`."""
    dtype, weights = DTYPES[config.dtype], weights_of(params, variables)
    if config.format == "orbax":
        return [export_orbax(config.out, weights, dtype=dtype)]
    limits = {name: getattr(choice.config, name, None) for name in ("vocab_size", "max_length")}
    about = {"name": choice.name, "checkpoint": number, **{name: size for name, size in limits.items() if size}}
    programs = model_programs(choice, params, variables, batch=config.batch_size, length=config.seq_len, dtype=dtype)
    return export_programs(config.out, programs, weights, platforms=config.platforms, dtype=dtype,
                           weights=config.weights, model=about, max_file_bytes=config.max_file_bytes)


def saved_run(checkpoint: str, given: str | None, saved: Any) -> TrainConfig:
    """The options of the run that saved, at stage 3, where a device stores the least; given: its model, if said.

    Raises ValueError for what `train` did not save, and for a model that is not ours and was not given.
    """
    saved = saved if isinstance(saved, dict) else {}
    if not saved.keys() >= {"model", *NEEDED}:
        raise CheckpointError(f"{checkpoint} was not saved by the command train: it lacks the options of a "
                              "run. Export it from Python with zero_jax.export_params.")
    model = given or str(saved["model"])
    if given is None and os.sep in model and not is_folder(model):
        raise UsageError(f"model: {checkpoint} names the folder {model!r}, which is not there: give --model and the "
                         "folder that has its config.json.")
    if given is None and not is_folder(model) and short_name(model.partition(":")[0]) is None:
        raise UsageError(f"model: {checkpoint} names the model {model!r}, whose module would run when it is "
                         f"imported: give --model {model} if you trust it.")
    options = {name: saved[name] for name in NEEDED}
    options["grad_clip_norm"] = float(options["grad_clip_norm"])
    options |= {name: tuple(saved[name]) if isinstance(saved[name], list) else saved[name]
                for name in LORA if name in saved}
    return TrainConfig(model=model, stage=3, **options)


def _names(names: str, choice: ModelChoice) -> Names:
    if names == "own":
        return choice.own_names
    if (found := choice.tensor_names()) is None:
        raise UsageError(f"names=huggingface: the module of {choice.name} has no function huggingface(config), which "
                         "defines them. Give names=own (and --merge for a run of adapters).")
    return found
