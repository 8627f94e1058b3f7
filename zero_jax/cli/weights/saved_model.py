"""The model of a checkpoint that `train` saved, for commands that run it: its run, tokenizer, step and state."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax

from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.environment import simulates
from zero_jax.cli.step_from_config import abstract_batch, step_of
from zero_jax.cli.weights.export_command import keeps_average, saved_run, saved_state
from zero_jax.cli.weights.file_configs import SavedModelConfig
from zero_jax.data.documents import is_tokenized
from zero_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from zero_jax.errors import UsageError
from zero_jax.sharding.mesh import simulate_devices
from zero_jax.step.step import ZeroTrainStep


class SavedModel:
    """What a checkpoint has; its parameters are read when they are asked for.

    Raises ValueError for a checkpoint that is missing, damaged or was not saved by `train`, and for an average that the
    run did not keep.

    saved: the options that its manifest has. run: those of a step that restores it. source: where the run had its
    tokenizer; None for bytes. tokenizer: None for a run on files of ids whose tokenizer is not known.
    """

    def __init__(self, config: SavedModelConfig):
        given = config.check()
        self.ema = config.ema
        self._checkpoints = Checkpoints(config.checkpoint, read_only=True)
        self._manifest = self._checkpoints.manifest(config.at)
        self.saved: Any = self._manifest.config
        self.run = saved_run(config.checkpoint, config.model, self.saved)
        self.choice = self.run.find_model()
        if config.ema and self.run.ema is None:
            raise UsageError("ema: the run kept no average: leave it out.")
        self.source = config.tokenizer or _source_of(self.saved)
        self.tokenizer = given or _tokenizer_of(self.saved, self.source)

    @functools.cached_property
    def loaded(self) -> tuple[ZeroTrainStep, Any, int]:
        """The step and the state, sharded over all devices (of a CPU: one), and their number."""
        if simulates():
            simulate_devices(1)
        devices, run = jax.devices(), self.run
        if not (self.ema or run.lora_rank or keeps_average(run)):
            # Only parameters are read: an optimizer with little state.
            run = dataclasses.replace(run, ema=None, optimizer="sgd-momentum", moments=None)
        step = step_of(run, self.choice, devices)
        batch = abstract_batch(self.choice, len(devices), run.seq_len)
        state = saved_state(self._checkpoints, step, batch, self._manifest, average=keeps_average(run))
        return step, state, len(devices)


def _source_of(saved: Any) -> Path | None:
    """Where a run had its tokenizer: the file or folder that it names, or its folder of tokens; None for neither."""
    data = saved.get("data") or []
    name = saved.get("tokenizer") or next((name for name in data if is_tokenized(name)), None)
    return None if name is None else Path(name).expanduser()


def _tokenizer_of(saved: Any, source: Path | None) -> Tokenizer | None:
    """The run's own, or bytes; None where it read ids. Raises ValueError for one that is not where the run had it."""
    if source is not None:
        if not source.exists():
            raise UsageError(f"the run's tokenizer was {source}: give it with --tokenizer.")
        return load_tokenizer(source)
    data = saved.get("data") or ["python"]
    return None if any(str(each).endswith((".bin", ".npy")) for each in data) else ByteTokenizer()
