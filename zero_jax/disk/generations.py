"""Two generations of a process's states in files, and a commit by which the newer one becomes valid at once.

A generation is written whole into the file of the last but one; then the file is synced, and a commit record with the
checksum of every record of it replaces the old record of that file, which is atomic. Whenever the process is killed,
the newest commit record names a file that nothing has written to since.
"""

import dataclasses
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_jax.arguments import shown
from zero_jax.disk.durable_files import make_folder, replace_json
from zero_jax.disk.record_file import AlignedFile, Record, RecordLayout, unwritten
from zero_jax.disk.run_lock import RunLock
from zero_jax.errors import CheckpointError, DamagedCheckpointError, UsageError, few
from zero_jax.files import read_regular, retried, sealed, unsealed

FORMAT = "zero_jax states on disk 2"

RECORDS = "commit-0.json", "commit-1.json"
"""The files of a process's commit records, each of the generation file of its number."""

_MAX_COMMIT_BYTES = 2**28

_open: "weakref.WeakValueDictionary[str, Generations]" = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True)
class Commit:
    """What a commit record says of its generation.

    Attributes:
        generation: its number, from 1 on; it is in file `generation % 2`.
        session: drawn when the folder was opened by the process that committed: the same number of another session is
            another generation.
        step: the number of steps that the state has taken.
        checksums: of each record.
        fingerprint, leaves: `RecordLayout.fingerprint` and `leaves` of what was written.
        note: what its writer said beside the state; plain JSON.
    """

    generation: int
    session: int
    step: int
    checksums: tuple[str, ...]
    fingerprint: str
    leaves: dict[str, Any]
    note: Any = None

    @property
    def token(self) -> tuple[int, int]:
        """What tells this generation from all others."""
        return self.session, self.generation


def records_in(folder: Any) -> list[Path]:
    """The commit records of all processes in `folder`, whole or not; raises CheckpointError where it cannot be read."""
    def entries(path: Path) -> list[Path]:
        try:
            return sorted(path / name for name in retried(lambda: os.listdir(path), what=path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    return [path for own in entries(Path(folder)) if own.name.startswith("process-")
            for path in entries(own) if path.name in RECORDS]


def check_processes(folder: Any, num_processes: int) -> None:
    """Raises CheckpointError where all commits in `folder` are of runs of other numbers of processes."""
    owners = sorted({path.parent.name for path in records_in(folder)})
    if owners and not any(owner.endswith(f"-of-{num_processes:05}") for owner in owners):
        raise CheckpointError(
            f"disk: {folder} has the states of {few(owners)}, and this is a run of {num_processes} processes: start as "
            "many as before, or remove the folder to go on from a checkpoint.")


def process_folder(process: int, num_processes: int) -> str:
    """The name of the folder of a process."""
    return f"process-{process:05}-of-{num_processes:05}"


def sealed_commit(commit: Commit) -> dict[str, Any]:
    """What the record of a commit has."""
    return sealed(FORMAT, dataclasses.asdict(commit))


def read_commits(own: Path) -> tuple[list[Commit | None], list[str]]:
    """(the commit of each file in the folder of a process, None where it has no whole one; what is damaged, as text).

    Raises CheckpointError where a record cannot be read, and where another version of zero_jax wrote it.
    """
    commits: list[Commit | None] = []
    damaged = []
    for path in (own / name for name in RECORDS):
        commits.append(None)
        try:
            text = retried(lambda path=path: read_regular(path, _MAX_COMMIT_BYTES), what=path)
            body = unsealed(text, FORMAT, path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (DamagedCheckpointError, IsADirectoryError) as error:
            damaged.append(str(error))
            continue
        body["checksums"] = tuple(body["checksums"])
        commits[-1] = Commit(**body)
    return commits, damaged


class Generations:
    """The two generations of one process in a folder.

    Attributes:
        damaged: the commit records that `found` came across and that are not as they were written, as text.
    """

    def __init__(self, folder: Any, layout: RecordLayout, *, process: int = 0, num_processes: int = 1):
        """Nothing is read or written yet.

        Raises UsageError where `folder` is no folder, or one that another object of this process uses.
        """
        check_folder(folder)
        self.path = Path(folder) / process_folder(process, num_processes)
        self.layout = layout
        self.committed: Commit | None = None
        self.damaged: list[str] = []
        self._files = [AlignedFile(self.path / f"generation-{slot}.bin") for slot in (0, 1)]
        self._slots: list[Commit | None] = [None, None]
        self._after, self._written = 0, dict[int, str]()
        self._once: list[dict[int, str]] = [{}, {}]
        self._threads, self._lock, self._is_open = threading.Lock(), RunLock(self.path), False

    def lock(self) -> str:
        """Takes the folder for this run; returns a message where it was that of a dead process.

        Raises CheckpointError while another process has it, and UsageError where another object of this one does.
        """
        key = str(self.path.resolve())
        if _open.setdefault(key, self) is not self:
            raise UsageError(f"disk: {self.path} is in use by another step of this process: call its close(), or name "
                             "another folder.")
        try:
            make_folder(self.path.parent)
            return self._lock.acquire()
        except OSError as error:
            raise unwritten(self.path, error, 0) from error

    def found(self) -> list[Commit]:
        """The commits in the folder, newest first, and in `damaged` what might have been some; call `lock` before.

        Raises UsageError where the folder holds something else, or another model's states, with the first difference,
        and CheckpointError where it cannot be read.
        """
        self._slots, self.damaged = [None, None], []
        try:
            names = retried(lambda: os.listdir(self.path), what=self.path)
        except FileNotFoundError:
            return []
        known = {"generation-0.bin", "generation-1.bin", *RECORDS, *(f"{name}.tmp" for name in RECORDS)}
        if others := sorted(set(names) - known):
            raise UsageError(f"disk: {self.path} holds {few(others)}, which are no states of a run: name another "
                             "folder.")
        self._slots, self.damaged = read_commits(self.path)
        commits = sorted(filter(None, self._slots), key=lambda commit: -commit.generation)
        for commit in commits:
            if commit.fingerprint != self.layout.fingerprint():
                raise UsageError(f"disk: {self.path} holds states of another model, optimizer, mesh or buffer_bytes: "
                                 f"{_difference(commit.leaves, self.layout.leaves())}. Name another folder.")
        return commits

    @property
    def newest(self) -> int:
        """The number of the newest generation that `found` came across, or that was committed; 0 where none was."""
        return max((commit.generation for commit in (*self._slots, self.committed) if commit is not None), default=0)

    def create(self, session: int, after: int = 0) -> None:
        """Reserves both files; what was committed before stays until the next commit but one.

        after: the greatest `newest` of all processes, whose next generations have one number.

        Raises CheckpointError where the disk has too little space, before anything is written.
        """
        if not self._is_open:
            self._check_space()
            try:
                make_folder(self.path)
            except OSError as error:
                raise unwritten(self.path, error, 0) from error
            for file in self._files:
                file.open(self.layout.num_bytes, create=True)
            self._is_open = True
        self.session, self._written, self._once, self._after = session, {}, [{}, {}], after

    def resume(self, commit: Commit, session: int, buffer: memoryview) -> None:
        """Goes on from `commit`, one of `found()`, once every byte of it was read and is as it was written.

        Raises DamagedCheckpointError otherwise, and nothing changed.
        """
        slot = commit.generation % 2
        if not self._is_open:
            self._files[slot].open(self.layout.num_bytes)
        for record in self.layout.records:
            self._verified(record, self._files[slot].read(record, buffer), commit)
        if not self._is_open:
            self._check_space()
            self._files[1 - slot].open(self.layout.num_bytes, create=True)
            self._is_open = True
        self.committed = commit
        self._once[slot] = self._once_of(commit)
        self._once[1 - slot] = {}  # nobody has looked at the other file: the next step writes all of it
        self.session, self._written = session, {}

    def read(self, record: Record, buffer: memoryview) -> None:
        """Reads a record of what is committed; raises DamagedCheckpointError where it is not as it was written."""
        assert self.committed is not None
        self._verified(record, self._files[self.committed.generation % 2].read(record, buffer), self.committed)

    def write(self, record: Record, fill: Callable[[], memoryview]) -> None:
        """Writes a record of the next generation from the buffer that `fill` returns.

        What is written `once`, and is there, is neither filled nor written.
        """
        slot = self._next % 2
        value = self._once[slot].get(record.number) or self._files[slot].write(record, fill())
        with self._threads:
            self._written[record.number] = value

    def commit(self, step: int, note: Any = None) -> Commit:
        """Makes the next generation, of which every record was written, the committed one; it is on the disk then."""
        assert len(self._written) == len(self.layout.records)
        slot = self._next % 2
        self._files[slot].sync()
        commit = Commit(self._next, self.session, step, tuple(self._written[i] for i in range(len(self._written))),
                        self.layout.fingerprint(), self.layout.leaves(), note)
        path = self.path / RECORDS[slot]
        try:
            self._check_files()
            self._lock.acquire()  # raises where another process has taken the folder over
            replace_json(path, sealed_commit(commit))
        except OSError as error:
            raise unwritten(path, error, 0) from error
        self.committed, self._slots[slot], self._once[slot] = commit, commit, self._once_of(commit)
        self._written = {}
        return commit

    def abandon(self) -> None:
        """Forgets what was written of the next generation."""
        self._written = {}

    def close(self) -> None:
        """Closes the files and gives the folder back; what is committed stays."""
        for file in self._files:
            file.close()
        self._is_open = False
        self._lock.release()
        key = str(self.path.resolve())
        if _open.get(key) is self:
            del _open[key]

    @property
    def _next(self) -> int:
        # After a fallback to the older generation, the damaged one is written again.
        return 1 + (max(self.newest, self._after) if self.committed is None else self.committed.generation)

    def _once_of(self, commit: Commit) -> dict[int, str]:
        return {record.number: commit.checksums[record.number] for record in self.layout.records if record.once}

    def _check_space(self) -> None:
        there = sum(file.path.stat().st_blocks * 512 for file in self._files if file.path.exists())
        free, needed = shutil.disk_usage(self.path.parent).free, 2 * self.layout.num_bytes
        if needed - there > free:
            raise CheckpointError(
                f"disk: two generations of {self.layout.num_bytes:,} bytes are {needed:,}, and "
                f"{self.path.parent} has {free:,} bytes free: free space there, name a folder on another disk, or give "
                "an optimizer with less state.")

    def _check_files(self) -> None:
        """Raises CheckpointError where what was committed, or is to be, is not in the folder any more."""
        paths = [file.path for file in self._files if not file.is_there()]
        if self.committed is not None and not (path := self.path / RECORDS[self.committed.generation % 2]).exists():
            paths.append(path)
        if paths:
            raise CheckpointError(f"disk: {few(paths)}: removed or replaced while this run uses it. Nothing is "
                                  "committed there from now on: restore a checkpoint, or start again.")

    def _verified(self, record: Record, value: str, commit: Commit) -> None:
        if value != commit.checksums[record.number]:
            path, names = self._files[commit.generation % 2].path, few(dict.fromkeys(p.leaf for p in record.parts), 3)
            raise DamagedCheckpointError(
                f"{path} is damaged: bytes {record.offset:,} to {record.offset + record.num_bytes:,}, which hold "
                f"{names}, have the checksum {value}, and {commit.checksums[record.number]} was committed: "
                "start again from stored_state, which takes the generation before where that is whole, or from a "
                "checkpoint.")


def available_bytes(folder: Any) -> int:
    """Bytes that states in `folder`, which may not exist yet, can take: what is free, and what they take already."""
    there = sum(path.stat().st_blocks * 512 for path in Path(folder).glob("process-*/generation-*.bin"))
    return there + shutil.disk_usage(existing_folder(folder)).free


def check_folder(path: Any) -> None:
    """Raises UsageError for what cannot be a folder of states."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise UsageError(f"disk={shown(path)}: give the path of a folder on a local disk, as \"/mnt/nvme/run\".")
    if os.path.exists(path) and not os.path.isdir(path):
        raise UsageError(f"disk={shown(str(path))} is no folder: name one, on a local disk.")
    parent = existing_folder(path)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"disk={shown(str(path))}: {parent} cannot be written: name a folder that can.")


def existing_folder(path: Any) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(each for each in (Path(path), *Path(path).absolute().parents) if each.exists())


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The first leaf that is not the same in two tables of leaves."""
    for name in (*there, *here):
        if there.get(name) != here.get(name):
            def text(row: Any) -> str:
                return "is not there" if row is None else f"is {row[0]} {row[1]}"
            return f"{name} {text(there.get(name))} in the files, and {text(here.get(name))} in this step"
    return "its blocks are cut otherwise"
