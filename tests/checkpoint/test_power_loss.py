"""A power loss at any point of saving, removing and rolling back loses nothing that was complete.

As ALICE does (Pillai et al., OSDI 2014): the operations of a run on files are recorded and replayed up to a cut. On a
disk model whose files keep their bytes, and whose folders keep their entries, only from a sync on, the states that the
loss may leave are written out and restored from.
"""

import contextlib
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from support.saved import BATCH, step_for, trained

import zero_jax
from zero_jax import Checkpoints


class File:
    """live: what a program reads. durable: what is on the disk."""

    def __init__(self):
        self.live, self.durable = b"", b""

    def sync(self):
        self.durable = self.live

    def left(self, rng):
        """What a power loss leaves; without `rng` the least."""
        if rng is None or self.live == self.durable:
            return self.durable
        return (self.live, self.durable, self.live[: len(self.live) // 2], bytes(len(self.live)))[rng.integers(4)]


class Folder:
    """Entries by name; pending: the changes since the last sync, which reach the disk in their order."""

    def __init__(self):
        self.live, self.durable, self.pending = {}, {}, []

    def change(self, **entries):
        """Sets entries, None deletes one: one change, which is on the disk as a whole or not at all."""
        self.pending.append(entries)
        _apply(self.live, entries)

    def sync(self):
        self.durable, self.pending = dict(self.live), []

    def left(self, rng):
        entries = dict(self.durable)
        for change in self.pending[: 0 if rng is None else rng.integers(len(self.pending) + 1)]:
            _apply(entries, change)
        return {name: entry.left(rng) for name, entry in entries.items()}


def _apply(entries, change):
    for name, entry in change.items():
        entries.pop(name, None)
        if entry is not None:
            entries[name] = entry


class Disk:
    """The model of a folder and what is below it; `run` takes recorded operations."""

    def __init__(self):
        self.root = Folder()

    def at(self, path):
        entry = self.root
        for name in Path(path).parts:
            entry = entry.live[name]
        return entry

    def run(self, kind, path, value=None):
        path = Path(path)
        folder = self.at(path.parent)
        if kind == "write":
            if path.name not in folder.live:
                folder.change(**{path.name: File()})
            folder.live[path.name].live = value
        elif kind == "mkdir":
            folder.change(**{path.name: Folder()})
        elif kind == "remove":
            folder.change(**{path.name: None})
        elif kind == "rename":
            assert Path(value).parent == path.parent
            folder.change(**{path.name: None, Path(value).name: folder.live[path.name]})
        elif kind == "sync":
            self.at(path).sync()


def write_out(tree, path):
    path.mkdir()
    for name, entry in tree.items():
        write_out(entry, path / name) if isinstance(entry, dict) else (path / name).write_bytes(entry)


class Recorder:
    """Records what Python does to files below `root`; what other code does is seen at the next operation."""

    def __init__(self, root, patch):
        self.root, self.operations, self.lock = root, [], threading.RLock()
        self.disk = Disk()
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._recorded(getattr(os, name), self._rename))
        for name in ("unlink", "remove", "rmdir"):
            patch.setattr(os, name, self._recorded(getattr(os, name), self._remove))
        patch.setattr(os, "fsync", self._recorded(os.fsync, self._sync))

    def mark(self, *value):
        with self.lock:
            self.operations.append(("mark", value))

    def _recorded(self, do, record):
        def call(*args, **options):
            with self.lock:
                self._look()
                result = do(*args, **options)
                record(*args, **options)
                return result

        return call

    def _inside(self, path, dir_fd=None):
        path = os.fspath(path)
        path = path if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        return os.path.relpath(path, self.root) if str(path).startswith(f"{self.root}{os.sep}") else None

    def _note(self, kind, path, value=None):
        self.disk.run(kind, path, value)
        self.operations.append((kind, path, value))

    def _rename(self, old, new, **options):
        if self._inside(old):
            self._note("rename", self._inside(old), self._inside(new))

    def _remove(self, path, *, dir_fd=None):
        if self._inside(path, dir_fd):
            self._note("remove", self._inside(path, dir_fd))

    def _sync(self, descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path == str(self.root) or self._inside(path):
            self._note("sync", os.path.relpath(path, self.root))

    def _look(self):
        """Records the files that were written, and those that vanished, since the last operation."""
        def look(folder, path):
            for name in set(folder.live) - set(os.listdir(self.root / path)):
                self._note("remove", path / name)
            for name in sorted(os.listdir(self.root / path)):
                with contextlib.suppress(FileNotFoundError):  # a temporary file of another thread
                    if (self.root / path / name).is_dir():
                        if name not in folder.live:
                            self._note("mkdir", path / name)
                        look(folder.live[name], path / name)
                    else:
                        raw = (self.root / path / name).read_bytes()
                        if name not in folder.live or folder.live[name].live != raw:
                            self._note("write", path / name, raw)

        look(self.disk.root, Path("."))


def run_of_saves(root, recorder, step, state):
    """Two of three checkpoints stay; a restore rolls back; a number is saved anew."""
    checkpoints = Checkpoints(root, keep_last=2)

    def save(number, data):
        checkpoints.save(step, state, at=number, data=data, wait=True)
        recorder.mark(data)

    for number in (10, 20, 30):
        save(number, f"{number}")
    checkpoints.restore(step, BATCH, at=20)
    recorder.mark("20")
    for number in (30, 40):
        save(number, f"{number} anew")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(the step, the operations of `run_of_saves`)."""
    step = step_for(0, 1)
    state, root = trained(step), tmp_path_factory.mktemp("recorded") / "root"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        run_of_saves(root, recorder, step, state)
    for kind, *rest in (operations := recorder.operations):
        assert kind in ("mark", "write", "mkdir", "remove", "rename", "sync"), (kind, rest)
    return step, operations


def left(operations, cut, seed, without=()):
    """What a power loss after `cut` operations leaves; without the operations of the kinds `without`."""
    disk = Disk()
    for kind, path, *value in operations[:cut]:
        if kind == "mark" or kind == "sync" and ("file" if isinstance(disk.at(path), File) else "folder") in without:
            continue
        disk.run(kind, path, *value)
    return disk.root.left(None if seed is None else np.random.default_rng((seed, cut)))


def check(step, operations, cut, seed, root, without=()):
    """An error, or "": what is restored is the last that was complete before the cut, or the one in progress."""
    marks = [(number, row[1][0]) for number, row in enumerate(operations) if row[0] == "mark"]
    before, after = ([data for number, data in marks if (number < cut) == past] for past in (True, False))
    allowed, needed = before[-1:] + after[:1], bool(before)
    write_out(left(operations, cut, seed, without), root)
    try:
        found = Checkpoints(root, keep_last=2).restore(step, BATCH, fallback=True)
    except zero_jax.DamagedCheckpointError as error:
        return f"cut {cut}, {seed}: {error}"
    except zero_jax.CheckpointError as error:
        return f"cut {cut}, {seed}: {error}" if needed else ""
    finally:
        shutil.rmtree(root)
    return "" if found.data in allowed else f"cut {cut}, {seed}: {found.data} and not {allowed}"


def cuts_of(operations, number):
    return np.linspace(1, len(operations), min(number, len(operations))).astype(int)


def test_a_power_loss_loses_nothing(recorded, tmp_path):
    step, operations = recorded
    faults = [check(step, operations, cut, (None, 0)[i % 2], tmp_path / "left")
              for i, cut in enumerate(cuts_of(operations, 24))]
    assert [fault for fault in faults if fault] == []


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_nor_does_it_at_any_other_point(recorded, tmp_path, seed):
    step, operations = recorded
    assert len(operations) >= 200
    faults = [check(step, operations, cut, seed, tmp_path / "left") for cut in range(1, len(operations) + 1)]
    assert [fault for fault in faults if fault] == []


@pytest.mark.parametrize("without", ["file", "folder"])
def test_without_a_sync_something_is_lost(recorded, tmp_path, without):
    """The control: the same operations when files, or folders, are not synced."""
    step, operations = recorded
    cuts = [number + 1 for number, row in enumerate(operations) if row[0] == "mark"][1:]
    assert any(check(step, operations, cut, None, tmp_path / "left", (without,)) for cut in cuts)


def test_the_model_of_a_disk():
    disk = Disk()
    for operation in (("mkdir", "a"), ("write", "a/x", b"old"), ("sync", "a/x"), ("sync", "a"), ("sync", ".")):
        disk.run(*operation)
    for operation in (("write", "a/x", b"new"), ("write", "a/y", b"y"), ("rename", "a", "b")):
        disk.run(*operation)
    assert disk.root.left(None) == {"a": {"x": b"old"}}
    states = {str(disk.root.left(np.random.default_rng(seed))) for seed in range(600)}
    assert str({"b": {"x": b"old", "y": b""}}) in states and str({"a": {"x": b"new", "y": b"y"}}) in states
    disk.run("sync", ".")
    assert disk.root.left(None) == {"b": {"x": b"old"}}
