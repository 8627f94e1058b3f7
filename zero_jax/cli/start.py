"""The state that a new run starts from: drawn, or read from a file, a folder of Hugging Face's or another run."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.environment import checkpoint_folder
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.step_from_config import abstract_batch, step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.distributed.agreement import from_first
from zero_jax.errors import UsageError
from zero_jax.interop.naming import Names
from zero_jax.interop.params_io import file_leaves, init_from_file, named_tensors, parts_of
from zero_jax.interop.safetensors_file import find_tensors
from zero_jax.state import ZeroState
from zero_jax.step.step import ZeroTrainStep
from zero_jax.tree import named_leaves


def first_state(config: TrainConfig, choice: ModelChoice, step: ZeroTrainStep, batch: Any, console: Console
                ) -> ZeroState:
    """The state of `step` before its first batch, by `config.init_from`.

    What is read goes straight to where it is stored; nothing is drawn for it. With adapters it is the frozen base. A
    head of another number of classes than `config.num_classes` is not read, and `console` says so.
    """
    path, key = config.init_from, jax.random.key(config.seed)
    if path is None:
        return step.init(key, batch)
    if (folder := _run_at(path)) is not None:
        return step.init(key, batch, params=_saved_params(folder, config, choice, step))
    leaves = file_leaves(step, step.layout(batch))
    names, new = _names_in(path, choice, leaves), []
    if config.num_classes is not None:
        classes, *numbers = from_first(lambda: _other_head(path, leaves, names, choice.config.num_classes))
        new = [name for number, name in enumerate(leaves) if number in numbers]
    if new:
        console.print(f"Initialised anew, of {config.num_classes} classes: {', '.join(new)}. {path} has {classes} "
                      "classes; all else is read from it.", soft_wrap=True)
    return init_from_file(path, step, key, batch, names=names, new=[f"^{re.escape(name)}$" for name in new])


def _other_head(path: Path, leaves: Mapping[str, Any], names: Names, classes: int) -> list[int]:
    """[The number of classes in the file, the positions in `leaves` of those of another number].

    They differ from their tensors in one dim alone, which is the number of classes.
    """
    tensors, parts = named_tensors(path, find_tensors(path), names), parts_of(leaves, names)
    found: dict[int, int] = {}
    for number, name in enumerate(leaves):
        if name in parts and (tensor := tensors.get(parts[name].names[0])) is not None:
            shape = parts[name].tensor_shape
            differ = [both for both in zip(tensor.shape, shape, strict=True) if both[0] != both[1]
                      ] if len(tensor.shape) == len(shape) else []
            if len(differ) == 1 and differ[0][1] == classes:
                found[number] = differ[0][0]
    return [found[min(found)], *found] if len({*found.values()}) == 1 else [classes]


def check_start(config: TrainConfig) -> None:
    """Raises UsageError where `config.init_from` is a run that this one cannot start from; no array is read."""
    folder = None if config.init_from is None else _run_at(config.init_from)
    if folder is None:
        return
    saved = Checkpoints(folder, read_only=True).manifest().config
    run = saved if isinstance(saved, dict) else {}
    if (model := str(run.get("model", config.model))) != config.model:
        raise UsageError(f"init_from={config.init_from} is of a run of {model}: give model={model}, or export its "
                         "parameters to a file and start from that.")
    if (classes := run.get("num_classes")) != config.num_classes:
        raise UsageError(f"init_from={config.init_from} is of a run of num_classes={classes}: for another number write "
                         "its parameters with zero-jax export, and start from that file.")
    if run.get("lora_rank") is not None:
        raise UsageError(f"init_from={config.init_from} is of a run of adapters: write the whole model with "
                         "zero-jax export --merge, and start from that.")


def _run_at(path: Path) -> Path | None:
    """`checkpoint_folder(path)` as process 0 sees it: what is read there is read by all processes, or by none."""
    folders = path.expanduser(), path.expanduser() / "checkpoints"
    found = from_first(lambda: [] if (folder := checkpoint_folder(path)) is None else [folders.index(folder)])
    return folders[found[0]] if found else None


def _saved_params(folder: Path, config: TrainConfig, choice: ModelChoice, step: ZeroTrainStep) -> dict[str, Any]:
    """Parameters and variables by name of the latest checkpoint in `folder`, sharded over the devices of `step`."""
    # At stage 3, where a device holds the least, and without adapters.
    base = TrainConfig(model=config.model, stage=3, precision=config.precision, seq_len=config.seq_len)
    devices = list(step.mesh.devices.flat)
    batch = abstract_batch(choice, len(devices), config.seq_len)
    params, variables = Checkpoints(folder, read_only=True).load_params(
        step_of(base, choice, devices), batch, cast=True)
    return {**dict(named_leaves(params)), **dict(named_leaves(variables))}


def _names_in(path: Path, choice: ModelChoice, leaves: Any) -> Names:
    """The naming of a file: ours where a tensor has a name of ours, else that of the model's module (Hugging Face)."""
    names = choice.tensor_names()
    return choice.own_names if names is None or leaves.keys() & find_tensors(path).keys() else names
