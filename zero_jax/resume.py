"""Going on with a run from its last good checkpoint, if it is the same run."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console

from zero_jax.checkpoint import Checkpoints, Restored
from zero_jax.config import TrainConfig
from zero_jax.data import Batches
from zero_jax.manifest import CheckpointError
from zero_jax.step import ZeroTrainStep

FIXED = ("model", "data", "max_bytes", "precision", "optimizer", "batch_size", "ema", "length", "steps",
         "learning_rate", "warmup", "weight_decay", "clip", "seed", "init_from")
"""What decides the losses of a run. Where the state lies, and what is shown and saved of it, may change."""


def fixed(config: TrainConfig) -> dict[str, Any]:
    """The options of a run that may not change when it goes on, as plain JSON."""
    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, Path):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    return {name: plain(getattr(config, name)) for name in FIXED}


def resumed(config: TrainConfig, checkpoints: Checkpoints, step: ZeroTrainStep, batches: Batches, console: Console
            ) -> Restored | None:
    """The last good checkpoint as `step` takes it, `batches` at its place; None where nothing was saved yet.

    Raises ValueError where the checkpoint is that of another run, with each option that differs and both values.
    """
    if not checkpoints.steps():
        console.print(f"{config.checkpoints} has no checkpoint yet: the run begins anew.", soft_wrap=True)
        return None
    asked = fixed(config)

    def check(saved: Any) -> None:
        saved = saved if isinstance(saved, dict) else {}
        wrong = [f"{name}={saved.get(name)!r} saved but {name}={asked[name]!r} asked for"
                 for name in FIXED if saved.get(name) != asked[name]]
        if wrong:
            raise CheckpointError(
                f"{config.checkpoints} belongs to another run: {'; '.join(wrong)}. Give the options of that run, or "
                "another out for a new one.")

    restored = checkpoints.restore(step, batches[0], fallback=True, accept=lambda manifest: check(manifest.config))
    batches.restore(restored.data)
    for message in restored.damaged:
        console.print(message, soft_wrap=True)
    console.print(f"Resumed after step {restored.step} of {config.steps}, which was saved at stage "
                  f"{restored.run['stage']} on {restored.run['devices']} devices.", soft_wrap=True)
    return restored
