"""Continues a run from its last intact checkpoint, if it is the same run."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from zero_jax.checkpoint.checkpoint import Checkpoints, Restored
from zero_jax.checkpoint.local_copies import LocalCopies
from zero_jax.checkpoint.manifest import Manifest
from zero_jax.checkpoint.outer_params import slices_in
from zero_jax.cli.options.diloco import DiLoCoOptions
from zero_jax.cli.options.lora import LoraOptions
from zero_jax.cli.train_config import TrainConfig
from zero_jax.data.positions import NumberedBatches
from zero_jax.diloco.step import DiLoCoStep
from zero_jax.distributed.agreement import from_first
from zero_jax.errors import CheckpointError, DamagedCheckpointError

LORA, DILOCO = (tuple(field.name for field in dataclasses.fields(options)) for options in (LoraOptions, DiLoCoOptions))

FIXED = ("model", "objective", "mask_fraction", "noise_fraction", "span_length", "image_shift", "image_flip",
         "image_warp", "dpo_beta",
         "data", "data_weights", "eval_data", "eval_fraction", "tokenizer", "text_field",
         "documents", "max_bytes", "precision", "optimizer", "quantize_weights", "quantize_gradients", "batch_size",
         "ema", "seq_len",
         "steps", "schedule", "learning_rate", "warmup", "decay", "final_rate",
         "weight_decay", "grad_clip_norm", "seed", "init_from", *LORA, *DILOCO)
"""The options that determine the losses of a run. Stage, mesh, devices, and what is printed and saved may change."""


def fixed(config: TrainConfig) -> dict[str, Any]:
    """The options of a run that must not change when it is resumed, as plain JSON."""
    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, Path):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    return {name: plain(getattr(config, name)) for name in FIXED}


def differences(saved: Any, config: TrainConfig) -> list[str]:
    """Each option of FIXED that differs between a saved run and `config`, with both values, as text.

    An option that the saving version did not have counts as its default, which is what was done then.
    """
    asked = fixed(config)
    was = fixed(TrainConfig()) | (saved if isinstance(saved, dict) else {})
    return [f"{name}={was.get(name)!r} saved but {name}={asked[name]!r} given"
            for name in FIXED if was.get(name) != asked[name]]


def resumed(config: TrainConfig, checkpoints: Checkpoints, copies: LocalCopies | None, step: Any,
            batches: NumberedBatches, console: Console, accepted: Callable[[Manifest], Any]) -> Restored | None:
    """The last intact checkpoint in the layout of `step`, with `batches` at its position; None where there is none.

    Local copies that are newer go first; those that the run does not continue from are removed. step: a `ZeroTrainStep`
    or a `DiLoCoStep`, which goes on from a checkpoint of another number of slices, too. accepted: called with what is
    known of a checkpoint before its state is read.

    Raises ValueError where the checkpoint belongs to another run, with each option that differs and both values.
    """
    if copies is not None:
        if restored := copies.restore(step, batches[0], heads=checkpoints.heads()):
            batches.restore(restored.data)
            console.print(f"Resumed after step {restored.step} of {config.steps} from the copies in "
                          f"{config.local_checkpoints}.", soft_wrap=True)
            return restored
    # Of those that lost the file which says that they are complete there are heads, and no steps: not nothing.
    head = checkpoints.heads()[-1]
    if not checkpoints.steps() and not from_first(lambda: [head is not None])[0]:
        if copies is not None:
            copies.clear()
        console.print(f"{config.checkpoints} has no checkpoint yet: the run starts from the beginning.", soft_wrap=True)
        return None
    def check(manifest: Manifest) -> None:
        if wrong := differences(manifest.config, config):
            raise CheckpointError(
                f"{config.checkpoints} belongs to another run: {'; '.join(wrong)}. Give the options of that run, or "
                "another out for a new one.")
        accepted(manifest)

    saved_by: Any = _step_of_slices(step, checkpoints)
    restored = checkpoints.restore(saved_by or step, batches[0], fallback=True, accept=check)
    if copies is not None:
        copies.clear()  # not before: where these options are not the run's, those with which it is continued want them
    if saved_by is not None:
        restored = dataclasses.replace(restored, state=step.resized(restored.state, saved_by))
        console.print(_resized_text(saved_by, step, restored.step), soft_wrap=True)
    batches.restore(restored.data)
    for message in restored.damaged:
        console.print(message, soft_wrap=True)
    console.print(f"Resumed after step {restored.step} of {config.steps}, which was saved at stage "
                  f"{restored.run['stage']} on {restored.run['devices']} devices.", soft_wrap=True)
    return restored


def _step_of_slices(step: Any, checkpoints: Checkpoints) -> DiLoCoStep | None:
    """What stored the latest checkpoint, where that is of another number of slices than `step`; else None."""
    if isinstance(step, DiLoCoStep):
        with contextlib.suppress(DamagedCheckpointError):  # then an earlier one is restored, which says what is wrong
            if (number := slices_in(checkpoints.manifest())) not in (None, step.num_slices):
                return step.of_slices(number)
    return None


def _resized_text(before: DiLoCoStep, after: DiLoCoStep, number: int) -> str:
    outer, text = after.outer, f"{before.num_slices} slices were saved, and {after.num_slices} go on"
    is_averaged = not outer.overlap and outer.fragments == 1 and number % outer.every == 0
    if after.num_slices > before.num_slices:
        return f"{text}; the new ones are copies."
    return text + ("." if is_averaged else f"; what the others learned since they were last averaged, at most "
                   f"{outer.every} steps before step {number}, is lost.")
