"""A folder of checkpoints: which it has, which are intact, and which to remove when a newer one is complete."""

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from zero_jax.checkpoint import orbax_store as storage
from zero_jax.checkpoint.history import PLACE, History
from zero_jax.checkpoint.integrity import changed_files, read_manifest
from zero_jax.checkpoint.object_store import check_target, is_remote, numbers_in
from zero_jax.disk.durable_files import make_folder, replace_json
from zero_jax.disk.run_lock import RunLock
from zero_jax.distributed.agreement import all_or_none, check_same_numbers, from_first, is_first
from zero_jax.errors import CheckpointError, DamagedCheckpointError, UnwrittenCheckpointError, UsageError

LOG = logging.getLogger("zero_jax")


@dataclasses.dataclass
class _InProcess:
    """What all objects of this process for one folder share. saving: the save that was begun last, by any of them."""

    threads: Any = dataclasses.field(default_factory=threading.RLock)
    saving: Any = None


_FOLDERS: dict[str, _InProcess] = {}


class Folder:
    """The checkpoints at a path. `damaged`: what is wrong with those known to be damaged, by number.

    A damaged checkpoint does not count as one of the last. It is removed when enough newer ones are intact, or when a
    new checkpoint of its number replaces it. One that a restore to an earlier one has abandoned is removed when as many
    have been saved since, or when a new checkpoint of its number replaces it. Only what a checksum, a parser or a
    listing proves is damage: where something cannot be read, CheckpointError is raised, and nothing is removed.
    """

    def __init__(self, path: Any, keep_last: int | None, keep_every: int | None):
        if not str(path):
            raise UsageError("The path of checkpoints is empty: give a folder.")
        self.path = storage.folder(path)
        self.damaged: dict[int, str] = {}
        self._lock = None if is_remote(self.path) else RunLock(self.path)
        if self._lock is not None:
            weakref.finalize(self, self._lock.release)
        self._heads: list[tuple[int, int] | None] = []
        self._known: set[int] = set()  # those that this object saved, or that were there when it restored
        where = str(self.path).rstrip("/")
        self._in_process = _FOLDERS.setdefault(where if is_remote(where) else os.path.realpath(where), _InProcess())
        self.threads = self._in_process.threads
        self._keep_last, self._keep_every, self._has_warned = keep_last, keep_every, False

    def at(self, number: int) -> Any:
        """The path of a checkpoint."""
        return self.path / str(number)

    def lock(self) -> str:
        """Claims the folder for this run; raises CheckpointError while another has it.

        Returns a message, on process 0, where the folder is taken over from a dead process, and the first time where it
        is in an object store, which has no locks. Raises UsageError for a path or processes of which Orbax saves none.
        """
        check_target(self.path)
        check_same_numbers(f"{self.path}: Orbax saves nothing")
        if self._lock is None:
            has_warned, self._has_warned = self._has_warned, True
            return "" if has_warned or not is_first() else (
                f"{self.path} is in an object store, which has no lock: see to it that one run at a time saves there.")
        return all_or_none(lambda: self._lock.acquire() if self._lock is not None and is_first() else "")

    def unlock(self) -> None:
        """Gives the folder back."""
        if self._lock is not None:
            self._lock.release()

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints that are not known to be damaged, ascending."""
        return self._undamaged(lambda: storage.committed(self.path))

    def latest(self) -> int | None:
        """The last of `steps()` that was saved or restored; None where there is none."""
        steps = self.steps()
        return next((number for number in self._candidates(None) if number in steps), None)

    def candidates(self, at: int | None) -> list[int]:
        """The checkpoint `at`, or the latest one for None, and then those to fall back to, in this order.

        Raises CheckpointError where there is none, and UsageError for `at` that is no integer.
        """
        if at is not None and (isinstance(at, bool) or not hasattr(at, "__index__")):
            raise UsageError(f"at={at!r} is not a checkpoint number: give an integer, one of {self.steps()}.")
        candidates = self._candidates(at)
        if not candidates or at is not None and candidates[0] != at:
            steps = self.steps()
            known = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            broken = f"; damaged: {', '.join(map(str, self.damaged))}" if self.damaged else ""
            advice = "Give the folder that Checkpoints.save wrote to, and a number of those."
            if not steps and self.path.name.isdecimal() and storage.is_committed(self.path):
                advice = f"It is a checkpoint itself: give {self.path.parent}, and {self.path.name} as the number."
            raise CheckpointError(f"{self.path} has no checkpoint{'' if at is None else f' {at}'}: {known}{broken}. "
                                  f"{advice}")
        return candidates

    def emptied(self, number: int) -> list[str]:
        """A message for each empty folder with a higher number: it may have been a checkpoint."""
        def empty() -> list[int]:
            return [each for each in numbers_in(self.path) if each > number and storage.is_free(self.at(each))]

        return [f"{self.at(each)} is empty: if it was a checkpoint, that is lost." for each in from_first(empty)]

    def _candidates(self, at: int | None) -> list[int]:
        return self._undamaged(lambda: self._history().candidates(at))

    def _undamaged(self, numbers: Callable[[], list[int]]) -> list[int]:
        """Those that are not known to be damaged: to process 0, which alone looks at files that are to be removed."""
        return from_first(lambda: [number for number in numbers() if number not in self.damaged])

    def _history(self) -> History:
        return History({number: storage.place_of(self.at(number)) for number in storage.present(self.path)})

    def heads(self) -> list[tuple[int, int] | None]:
        """(number, count in the history) of the latest checkpoint, None for none; last the one that is being saved.

        A copy of a later state that was made under one of these continues from it (`local_copies`). On process 0.
        """
        return all_or_none(lambda: self._heads or [self._history().position] if is_first() else [None])

    def prepare(self, number: int) -> dict[str, Any] | None:
        """Removes what unfinished saves left. Returns the place of the checkpoint that is about to be saved; process 0.

        Waits for the save of another object in this process. Raises CheckpointError if there is an intact one of that
        number which is not abandoned, and where another run, which this one does not continue, has saved a later one.
        """
        if self._in_process.saving is not None:
            with contextlib.suppress(Exception):  # the object that began it raises it
                self.finish(self._in_process.saving)

        def clear() -> dict[str, Any]:
            if not is_remote(self.path):
                make_folder(self.path)
            self.clear_unfinished()
            history = self._history()
            head = next((each for each in history.candidates(None) if each not in self.damaged), None)
            if head is not None and head > number and head not in self._known:
                raise CheckpointError(
                    f"{self.path} has a checkpoint {head} of another run, which would be removed after {number} is "
                    "saved: restore from there first, or save to another folder.")
            if number in storage.present(self.path):
                if number in history.abandoned():
                    LOG.warning("The new checkpoint %d replaces one of %s that was abandoned.", number, self.path)
                elif self._is_intact(number):
                    raise CheckpointError(
                        f"{self.path} has a checkpoint {number} already: save to another folder, or remove it first.")
                else:
                    LOG.warning("%s The new checkpoint %d replaces it.", self.damaged[number], number)
                if is_remote(self.path):
                    storage.remove(self.at(number))
            elif not storage.is_free(self.at(number)):
                raise CheckpointError(
                    f"{self.at(number)} is no checkpoint of zero_jax and stays as it is: save to another folder.")
            place = history.new_place(number, head)
            self._heads = [history.position, (number, place.last)]
            return place.to_json()

        return all_or_none(lambda: clear() if is_first() else None)

    def note_restored(self, number: int, *, is_wanted: bool) -> None:
        """What is there is known to this run, which may replace it; is_wanted: `number` is the latest from now on.

        Where it is not wanted but what a fallback has left, nothing is written.
        """
        self._heads = []
        if not is_first():
            return
        try:
            history = self._history()
            self._known |= {*history.candidates(None)}
            if history.head == number or not is_wanted:
                return
            if self._lock is not None and (message := self._lock.acquire()):
                LOG.warning(message)
            place, path = history.restored_place(number).to_json(), self.at(number) / PLACE
            if is_remote(path):
                path.write_text(json.dumps(place))
            else:
                replace_json(path, place)
            LOG.warning("Checkpoint %d of %s is restored: %s are abandoned.", number, self.path,
                        ", ".join(map(str, self._history().abandoned())))
        except Exception as error:  # of gcsfs, too
            LOG.warning("That checkpoint %d of %s is restored cannot be noted there (%s): a later start restores the "
                        "one that was saved last.", number, self.path, error)

    def begin(self, write: Callable[[], Any]) -> Any:
        """What `write()` returns, which begins a save: in this process the next one waits for it."""
        self._in_process.saving = response = write()
        return response

    def finish(self, response: Any) -> None:
        """Waits for the end of the save of `begin`; raises what went wrong."""
        try:
            response.result()
        finally:
            if self._in_process.saving is response:
                self._in_process.saving = None

    def clear_unfinished(self) -> None:
        """Removes what interrupted saves and removals left. None may be in progress."""
        for _ in range(10):
            leftovers = storage.unfinished(self.path)
            if not leftovers:
                return
            with contextlib.suppress(Exception):  # threads of a failed save may still write, and recreate the folder
                for path in leftovers:
                    path.rmtree()
            time.sleep(0.1)
        for path in storage.unfinished(self.path):
            path.rmtree()

    def complete(self, number: int) -> None:
        """Called once the checkpoint `number` is complete: removes the older ones that need not stay."""
        self.damaged.pop(number, None)
        self._known.add(number)
        if is_first():
            try:
                self._remove_old()
            except CheckpointError as error:
                LOG.warning("What need not stay in %s stays, since it cannot be read: %s", self.path, error)

    def unwritten(self, number: int, error: Exception) -> CheckpointError:
        """The error for a checkpoint that could not be written; what was written of it is removed."""
        left = ""
        with contextlib.suppress(Exception):  # of gcsfs, too
            if is_first() and self._in_process.saving is None:
                self.clear_unfinished()
            left = ", ".join(map(str, storage.committed(self.path)))
        message = " ".join(str(error).split())[:500] or type(error).__name__
        return UnwrittenCheckpointError(
            f"Checkpoint {number} could not be written to {self.path} ({message}): free space, allow writing, or "
            f"choose another folder. Checkpoints before it are unchanged: {left or 'none'}.")

    def _remove_old(self) -> None:
        for number in self._need_not_stay(self._keep_last) if self._keep_last else []:
            if not (self._keep_every and number % self._keep_every == 0):
                try:
                    storage.remove(self.at(number))
                except Exception as error:  # of gcsfs, too
                    LOG.warning("%s need not stay and cannot be removed (%s).", self.at(number), error)

    def _need_not_stay(self, keep_last: int) -> list[int]:
        """Of the head's branch those before the last `keep_last`, and the abandoned ones, if enough are newer."""
        history, last, old = self._history(), [], []
        for number in history.branch(history.head):
            if len(last) < keep_last:
                last += [number] * self._is_intact(number)
            else:
                old.append(number)
        if abandoned := history.abandoned():
            newer = sum(history.saved(number) > history.saved(abandoned[0]) for number in last)
            if newer >= min(keep_last, max(1, sum(map(self._is_intact, abandoned)))):
                old += abandoned
        return old

    def _is_intact(self, number: int) -> bool:
        """Whether its manifest and the sizes of its files are as they were saved; the arrays are not read."""
        def check() -> None:
            read_manifest(self.at(number))
            if changed := changed_files(self.at(number)):
                raise DamagedCheckpointError(f"{self.at(number)} is damaged: {changed}.")

        if number not in self.damaged:
            with contextlib.suppress(DamagedCheckpointError):
                check()
                return True
            try:
                check()  # of a read that gave other bytes the next one gives those that are there
            except DamagedCheckpointError as error:
                self.damaged[number] = str(error)
                LOG.warning("%s", error)
        return number not in self.damaged
