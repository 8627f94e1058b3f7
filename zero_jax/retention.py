"""A folder of checkpoints: which are in it, which of them are good, and which go when a newer one is complete."""

import contextlib
import logging
import time
from typing import Any

from zero_jax import storage
from zero_jax.integrity import changed_files, note_sizes, read_manifest
from zero_jax.manifest import CheckpointError, DamagedCheckpointError
from zero_jax.processes import all_or_none, is_first, told_by_first

LOG = logging.getLogger("zero_jax")


class Folder:
    """The checkpoints at a path. `damaged`: what is wrong with those that were found to be, by number.

    What is damaged counts for nothing. It goes when as many good ones as are kept are newer, or when a new checkpoint
    of its number takes its place.
    """

    def __init__(self, path: Any, keep_last: int | None, keep_every: int | None):
        if not str(path):
            raise ValueError("The path of checkpoints is empty: give a folder.")
        self.path = storage.folder(path)
        self.damaged: dict[int, str] = {}
        self._keep_last, self._keep_every = keep_last, keep_every

    def at(self, number: int) -> Any:
        """The path of a checkpoint."""
        return self.path / str(number)

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints that are not known to be damaged, in order."""
        try:
            found = all_or_none(lambda: storage.committed(self.path) if is_first() else [])
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error}): allow it, or name another folder.") from error
        return told_by_first([number for number in found if number not in self.damaged])

    def existing(self, at: int | None) -> int:
        """The checkpoint `at`, or the latest one for None; raises CheckpointError where there is none."""
        steps = self.steps()
        if not steps or at is not None and at not in steps:
            known = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            broken = f"; damaged: {', '.join(map(str, self.damaged))}" if self.damaged else ""
            raise CheckpointError(
                f"{self.path} has no checkpoint{'' if at is None else f' {at}'}: {known}{broken}. Give the folder that "
                "Checkpoints.save wrote to, and a number of those.")
        return steps[-1] if at is None else at

    def make_room(self, number: int) -> None:
        """Clears what unfinished saves left, and a damaged checkpoint in the place of the new one `number`.

        Raises CheckpointError if there is a good one.
        """
        def clear() -> None:
            self.clear_unfinished()
            if number in storage.committed(self.path):
                if self._is_good(number):
                    raise CheckpointError(
                        f"{self.path} has a checkpoint {number} already: save to another folder, or remove it first.")
                LOG.warning("%s The new checkpoint %d takes its place.", self.damaged[number], number)
                storage.remove(self.at(number))

        all_or_none(lambda: clear() if is_first() else None)

    def clear_unfinished(self) -> None:
        """Removes what saves and removals left that did not come to their end. None may be under way."""
        for _ in range(10):
            found = storage.unfinished(self.path)
            if not found:
                return
            with contextlib.suppress(OSError):  # threads of a save that failed may still write, and bring it back
                for path in found:
                    path.rmtree()
            time.sleep(0.1)
        for path in storage.unfinished(self.path):
            path.rmtree()

    def complete(self, number: int) -> None:
        """What is done when the checkpoint `number` is there: the older ones that need not be kept are removed."""
        self.damaged.pop(number, None)
        if is_first():
            note_sizes(self.at(number))
            self._remove_old()

    def unwritten(self, number: int, error: Exception) -> CheckpointError:
        """The error for a checkpoint that could not be written; what there is of it is removed."""
        kept = ""
        with contextlib.suppress(OSError):
            if is_first():
                self.clear_unfinished()
            kept = ", ".join(map(str, storage.committed(self.path)))
        said = " ".join(str(error).split())[:500] or type(error).__name__
        return CheckpointError(
            f"Checkpoint {number} could not be written to {self.path} ({said}): make room, allow writing, or choose "
            f"another folder. Checkpoints before it are as they were: {kept or 'none'}.")

    def _remove_old(self) -> None:
        if self._keep_last is None:
            return
        kept = 0
        for number in reversed(storage.committed(self.path)):
            if kept < self._keep_last:
                kept += self._is_good(number)
            elif not (self._keep_every and number % self._keep_every == 0):
                try:
                    storage.remove(self.at(number))
                except OSError as error:
                    LOG.warning("%s need not be kept and cannot be removed (%s).", self.at(number), error)

    def _is_good(self, number: int) -> bool:
        """Whether its manifest and the sizes of its files are as they were saved; the arrays are not read."""
        if number not in self.damaged:
            try:
                read_manifest(self.at(number))
                if changed := changed_files(self.at(number)):
                    raise DamagedCheckpointError(f"{self.at(number)} is damaged: {changed}.")
            except CheckpointError as error:
                self.damaged[number] = str(error)
                LOG.warning("%s", error)
        return number not in self.damaged
