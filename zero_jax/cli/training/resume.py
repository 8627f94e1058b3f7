"""Continues a run, if it is the same one: from its last intact checkpoint, or from newer states in files."""

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
from zero_jax.cli.options.run import ScheduleOptions
from zero_jax.cli.train_config import TrainConfig
from zero_jax.data.batches import NumberedBatches
from zero_jax.diloco.step import DiLoCoStep
from zero_jax.disk.generations import Commit
from zero_jax.distributed.agreement import from_first
from zero_jax.errors import CheckpointError, DamagedCheckpointError, UsageError
from zero_jax.optim.presets import make_schedule
from zero_jax.state import ZeroState
from zero_jax.step.disk.states import newest_commit
from zero_jax.step.disk.step import DiskTrainStep

LORA, DILOCO, _SCHEDULE = (tuple(field.name for field in dataclasses.fields(options))
                           for options in (LoraOptions, DiLoCoOptions, ScheduleOptions))

DATA = ("data", "data_weights", "eval_data", "eval_fraction", "text_field", "documents", "max_bytes", "seq_len")
"""Options after whose change the data are read from their beginning."""

CHANGEABLE = (*DATA, "batch_size", "steps", "schedule", "learning_rate", "warmup", "decay", "final_rate",
              "weight_decay", "grad_clip_norm")
"""Options that determine the losses of a run, and may change when it goes on: the change is said."""

FIXED = ("model", "objective", "mask_fraction", "noise_fraction", "span_length", "num_classes", "image_crop",
         "image_shift", "image_flip", "image_warp", "dpo_beta", "tokenizer", "precision", "optimizer", "moments",
         "betas", "eps", "quantize_weights", "quantize_gradients", "ema", "seed", "init_from", *LORA, *DILOCO)
"""Options that make a run what it is. Stage, mesh, devices, and what is printed and saved are in neither."""


def fixed(config: TrainConfig) -> dict[str, Any]:
    """The options that determine the losses of a run, as plain JSON: what its checkpoints say of it."""
    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, Path):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    return {name: plain(getattr(config, name)) for name in (*FIXED, *CHANGEABLE)}


def _saved_options(saved: Any) -> dict[str, Any]:
    """The options of a saved run: one that the saving version did not have is its default, which it did."""
    return fixed(TrainConfig()) | (saved if isinstance(saved, dict) else {})


def differences(saved: Any, config: TrainConfig) -> list[str]:
    """Each option of FIXED that differs between a saved run and `config`, with both values, as text."""
    asked, was = fixed(config), _saved_options(saved)
    return [f"{name}={was.get(name)!r} saved but {name}={asked[name]!r} given"
            for name in FIXED if was.get(name) != asked[name]]


def check_same_run(place: Any, saved: Any, number: int, config: TrainConfig, *, other: str) -> None:
    """Raises an error where `config` cannot go on from what a run left in `place` after step `number`.

    other: the option that names another place.
    """
    if wrong := differences(saved, config):
        raise CheckpointError(f"{place} belongs to another run: {'; '.join(wrong)}. Give the options of that run, or "
                              f"another {other} for a new one.")
    if number > config.steps:
        raise UsageError(f"steps={config.steps}: the run in {place} has taken {number} steps already: give more, as "
                         f"steps={2 * number}, or leave it as it is.")


def go_on(config: TrainConfig, batches: NumberedBatches, saved: Any, data: Any, number: int) -> list[str]:
    """Moves `batches` to where a run goes on after step `number`; returns what to say: what changed, and what is next.

    saved: its options. data: the position of its batches. Where no option changed it is that position, checked. With
    another batch size it is the same example of the same data, or one that was seen, at most a batch before; other data
    are read from their beginning. The optimizer counts on, so that a schedule goes on where it was.
    """
    was, asked = _saved_options(saved), fixed(config)
    changed = [name for name in CHANGEABLE if was.get(name) != asked[name]]
    lines, how = [], ""
    if not {*DATA}.isdisjoint(changed):
        batches.seek(0)
        how = " The data are read from their beginning."
    elif "batch_size" in changed and batches.state()["fingerprint"] == data["fingerprint"]:
        batches.seek(data["position"] * was["batch_size"] // config.batch_size)
    else:
        batches.restore(data)
    if changed:
        lines.append(f"Changed after step {number}: " + "; ".join(
            f"{name} {was.get(name)!r} -> {asked[name]!r}" for name in changed) + f".{how}")
    if not {"steps", *_SCHEDULE}.isdisjoint(changed) and number < config.steps:
        before = ScheduleOptions(**{name: was[name] for name in _SCHEDULE})
        rates: list[Any] = [make_schedule(options.schedule, **options.schedule_arguments(steps))(number)
                            for options, steps in ((before, was["steps"]), (config, config.steps))]
        lines.append(f"The schedule goes on at step {number + 1}, whose learning rate is {float(rates[1]):.3g}; by the "
                     f"earlier options it would be {float(rates[0]):.3g}.")
    if number == config.steps:
        lines.append(f"All {number} steps of this run are taken. More of them: "
                     f"{config.next_command(f' --steps {2 * number}')}.")
    return lines


def resumed(config: TrainConfig, checkpoints: Checkpoints, copies: LocalCopies | None, step: Any,
            batches: NumberedBatches, console: Console, accepted: Callable[[Manifest], Any]) -> Restored | None:
    """The last intact checkpoint in the layout of `step`, with `batches` at its position; None where there is none.

    Local copies that are newer go first; those that the run does not continue from are removed. step: a `ZeroTrainStep`
    or a `DiLoCoStep`, which goes on from a checkpoint of another number of slices, too. accepted: called with what is
    known of a checkpoint before its state is read.

    Raises ValueError where the checkpoint belongs to another run, with each option that differs and both values. What
    may change, and did, is said.
    """
    if copies is not None:
        if restored := copies.restore(step, batches[0], heads=checkpoints.heads()):
            console.print(f"Resumed after step {restored.step} of {config.steps} from the copies in "
                          f"{config.local_checkpoints}.", *go_on(config, batches, restored.config, restored.data,
                                                                 restored.step), sep="\n", soft_wrap=True)
            return restored
    # Of those that lost the file which says that they are complete there are heads, and no steps: not nothing.
    head = checkpoints.heads()[-1]
    if not checkpoints.steps() and not from_first(lambda: [head is not None])[0]:
        if copies is not None:
            copies.clear()
        console.print(f"{config.checkpoints} has no checkpoint yet: the run starts from the beginning.", soft_wrap=True)
        return None
    def check(manifest: Manifest) -> None:
        check_same_run(config.checkpoints, manifest.config, manifest.step, config, other="out")
        accepted(manifest)

    saved_by: Any = _step_of_slices(step, checkpoints)
    restored = checkpoints.restore(saved_by or step, batches[0], fallback=True, accept=check)
    if copies is not None:
        copies.clear()  # not before: where these options are not the run's, those with which it is continued want them
    if saved_by is not None:
        restored = dataclasses.replace(restored, state=step.resized(restored.state, saved_by))
        console.print(_resized_text(saved_by, step, restored.step), soft_wrap=True)
    lines = go_on(config, batches, restored.config, restored.data, restored.step)
    console.print(*restored.damaged, f"Resumed after step {restored.step} of {config.steps}, which was saved at stage "
                  f"{restored.run['stage']} on {restored.run['devices']} devices.", *lines, sep="\n", soft_wrap=True)
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


class StatesOnDisk:
    """The generations of one run in `config.offload_disk`. All processes call every method; process 0 decides."""

    def __init__(self, config: TrainConfig, step: DiskTrainStep, batches: NumberedBatches, checkpoints: Checkpoints):
        """Nothing is read yet."""
        self._config, self._step, self._batches, self._checkpoints = config, step, batches, checkpoints

    def note(self, number: int, data: Any = None) -> None:
        """The next commit is that of the state after step `number`, at `data` (default: where the batches are)."""
        self._step.note = {
            "number": number, "data": self._batches.state() if data is None else data, "config": fixed(self._config),
            "heads": self._checkpoints.heads()}

    def resumed(self, console: Console) -> Restored | None:
        """The state in the files with the batches at its position; None where a checkpoint is as new, or none is there.

        Raises CheckpointError where the files cannot be read, and where they are newer than the last checkpoint, but do
        not lead on from it, are of another run or were not written by `train`; UsageError where this step cannot read
        them. Nothing is changed. Where they are damaged and there is a checkpoint, that is said, and None returned.
        """
        folder, latest = self._config.offload_disk, self._checkpoints.latest()
        try:
            commit = newest_commit(folder)
            head = self._checkpoints.heads()[-1]
            (newer,) = from_first(lambda: [self._newer(commit, latest, head)])
            if not newer:
                return None
            state = self._stored(newer - 1, latest)
        except DamagedCheckpointError as error:
            if latest is None:
                raise DamagedCheckpointError(f"{error} There is no checkpoint: remove {folder} to start from the "
                                             "beginning, without --resume.") from error
            console.print(f"{error} The run goes on from the checkpoint after step {latest}.", soft_wrap=True)
            return None
        note = self._step.note
        lines = go_on(self._config, self._batches, note["config"], note["data"], note["number"])
        console.print(f"Resumed after step {note['number']} of {self._config.steps} from the files in {folder}.",
                      *lines, sep="\n", soft_wrap=True)
        return Restored(state, note["number"], note["data"], note["config"], {}, ())

    def _stored(self, number: int, latest: int | None) -> ZeroState:
        try:
            return self._step.stored_state(self._batches[0])
        except CheckpointError:  # which says itself what to do
            raise
        except UsageError as error:
            raise UsageError(f"{error} It has the state after step {number}: to go on from it, give the options of "
                             f"that run; {self._otherwise(latest)}.") from error

    def _newer(self, commit: Commit | None, latest: int | None, head: tuple[int, int] | None) -> int:
        """1 more than the number of process 0's `commit`, where that leads on from the last checkpoint; else 0.

        Process 0 alone calls this. head: of the checkpoints.
        """
        folder = self._config.offload_disk
        if commit is None:
            return 0
        note, number, is_ours = commit.note, commit.step, False
        if isinstance(note, dict) and {"number", "data", "config", "heads"} <= note.keys():
            number, is_ours = note["number"], True
        if latest is not None and number <= latest:
            return 0
        if not is_ours:
            raise CheckpointError(f"{folder} has a state after {number} steps that zero-jax train did not write: "
                                  f"name another folder as offload_disk; {self._otherwise(latest)}.")
        check_same_run(folder, note["config"], number, self._config, other="offload_disk")
        if head not in [tuple(head) if head else None for head in note["heads"]]:
            raise CheckpointError(
                f"{folder} has the state after step {number} of a run that did not go on from the last checkpoint in "
                f"{self._config.checkpoints}: {self._otherwise(latest)}.")
        return number + 1

    def _otherwise(self, latest: int | None) -> str:
        return (f"to go on from {'the beginning' if latest is None else f'the checkpoint after step {latest}'}, remove "
                f"{self._config.offload_disk}")
