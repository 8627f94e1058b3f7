"""A run whose states are in files goes on from them where they are newer than the last checkpoint."""

from typing import Any

from rich.console import Console

from zero_jax.checkpoint.checkpoint import Checkpoints, Restored
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.resume import differences, fixed
from zero_jax.data.positions import NumberedBatches
from zero_jax.disk.commits import Commit
from zero_jax.distributed.agreement import from_first
from zero_jax.errors import CheckpointError, DamagedCheckpointError, UsageError
from zero_jax.state import ZeroState
from zero_jax.step.disk.states import newest_commit
from zero_jax.step.disk.step import DiskTrainStep


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
        self._batches.restore(note["data"])
        console.print(f"Resumed after step {note['number']} of {self._config.steps} from the files in {folder}.",
                      soft_wrap=True)
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
        if wrong := differences(note["config"], self._config):
            raise CheckpointError(f"{folder} belongs to another run: {'; '.join(wrong)}. Give the options of that "
                                  "run, or another offload_disk for a new one.")
        if head not in [tuple(head) if head else None for head in note["heads"]]:
            raise CheckpointError(
                f"{folder} has the state after step {number} of a run that did not go on from the last checkpoint in "
                f"{self._config.checkpoints}: {self._otherwise(latest)}.")
        return number + 1

    def _otherwise(self, latest: int | None) -> str:
        return (f"to go on from {'the beginning' if latest is None else f'the checkpoint after step {latest}'}, remove "
                f"{self._config.offload_disk}")
