"""The model of a checkpoint that `train` saved, for commands that use it: its run, tokenizer, step and state."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.environment import simulates
from zero_jax.cli.model_lookup import is_folder, short_name
from zero_jax.cli.options.data import is_token_file
from zero_jax.cli.step_from_config import abstract_batch, step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.resume import LORA
from zero_jax.cli.weights.file_configs import SavedModelConfig
from zero_jax.data.documents import is_tokenized
from zero_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from zero_jax.errors import CheckpointError, UsageError
from zero_jax.sharding.mesh import simulate_devices
from zero_jax.state import ZeroState
from zero_jax.step.step import ZeroTrainStep
from zero_jax.tree import named_leaves

NEEDED = ("precision", "optimizer", "ema", "seq_len", "weight_decay", "grad_clip_norm")
"""The options of a run, beside its model, that say how its state is stored. Runs of version 0.1 have them, too."""


class SavedModel:
    """What a checkpoint has; its parameters are read when they are asked for.

    Raises ValueError for a checkpoint that is missing, damaged or was not saved by `train`, for a model that is not
    ours and was not given, and for an average that the run did not keep.

    config: `check`ed. options: those of the run, as its manifest has them. run: those of a step that restores it. at:
    its number. needs_state: whether more than its parameters is read: an average, or adapters. source: where the run
    had its tokenizer; None for bytes, and for ids of a tokenizer that is not known.
    """

    def __init__(self, config: SavedModelConfig):
        self._checkpoints = Checkpoints(config.checkpoint, read_only=True)
        manifest = self._checkpoints.manifest(config.at)
        self.options: Any = manifest.config
        self.at, self.run = manifest.step, _run_of(config, manifest.config)
        if config.ema and self.run.ema is None:
            raise UsageError("ema: the run kept no average: leave it out.")
        self.choice = self.run.find_model()
        self.needs_state = config.ema or self.run.lora_rank is not None or self.run.optimizer == "schedule-free"
        name = config.tokenizer or self.options.get("tokenizer") or next(
            filter(is_tokenized, self.options.get("data") or []), None)
        self.source = None if name is None else Path(name).expanduser()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The run's, or bytes; None where it read ids. Raises ValueError for one that is not where the run had it."""
        if self.source is None:
            return None if any(map(is_token_file, self.options.get("data") or [])) else ByteTokenizer()
        if not self.source.exists():
            raise UsageError(f"the run's tokenizer was {self.source}: give it with --tokenizer.")
        return load_tokenizer(self.source)

    def step_on(self, devices: Sequence[jax.Device] | None = None, **changes: Any) -> tuple[ZeroTrainStep, Any]:
        """(The step of the run, its batch). devices: None: all, or one CPU. changes: of the options of the run."""
        if devices is None and simulates():
            simulate_devices(1)
        devices = list(devices or jax.devices())
        batch = abstract_batch(self.choice, len(devices), self.run.seq_len)
        return step_of(dataclasses.replace(self.run, **changes), self.choice, devices), batch

    def params(self, step: ZeroTrainStep, batch: Any) -> tuple[Any, Any]:
        """(Parameters, variables) in logical shapes; nothing else is read."""
        return self._checkpoints.load_params(step, batch, at=self.at)

    def state(self, step: ZeroTrainStep, batch: Any) -> ZeroState:
        """The state that was saved, with the parameters that evaluation takes."""
        return step.evaluation_state(self._checkpoints.restore(step, batch, at=self.at).state)

    @functools.cached_property
    def loaded(self) -> tuple[ZeroTrainStep, ZeroState, int]:
        """The step and the state, sharded over all devices (of a CPU: one), and their number.

        Of slices that trained by themselves the parameters are the outer ones.
        """
        if self.needs_state:
            step, batch = self.step_on()
            state = self.state(step, batch)
        else:  # only parameters are read: an optimizer with little state
            step, batch = self.step_on(ema=None, optimizer="sgd-momentum", moments=None)
            params, variables = self.params(step, batch)
            state = step.init(jax.random.key(0), batch,
                              params={**dict(named_leaves(params)), **dict(named_leaves(variables))})
        return step, state, step.mesh.size


def _run_of(config: SavedModelConfig, options: Any) -> TrainConfig:
    """The options of the run that saved, at stage 3, where a device stores the least."""
    options = options if isinstance(options, dict) else {}
    if not options.keys() >= {"model", *NEEDED}:
        raise CheckpointError(f"{config.checkpoint} was not saved by the command train: it lacks the options of a "
                              "run. Export it from Python with zero_jax.export_params.")
    model = config.model or str(options["model"])
    if config.model is None and os.sep in model and not is_folder(model):
        raise UsageError(f"model: {config.checkpoint} names the folder {model!r}, which is not there: give --model and "
                         "the folder that has its config.json.")
    if config.model is None and not is_folder(model) and short_name(model.partition(":")[0]) is None:
        raise UsageError(f"model: {config.checkpoint} names the model {model!r}, whose module would run when it is "
                         f"imported: give --model {model} if you trust it.")
    kept: dict[str, Any] = {
        name: tuple(options[name]) if isinstance(options[name], list) else options[name]
        for name in (*NEEDED, *LORA, "moments", "schedule", "num_classes") if name in options}
    kept["grad_clip_norm"] = float(kept["grad_clip_norm"])
    return TrainConfig(model=model, stage=3, **kept)
