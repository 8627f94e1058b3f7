"""Copies of the state on a disk of each host, between the saves to the shared folder.

Each process writes the shards of its own devices as they are stored: nothing is sent, converted or synced. When a
process dies, a restart on the same devices goes on from the last copy that all processes have. A copy that is damaged,
of another run, of other devices, or older than the last checkpoint is passed over, and so are all when one host is
gone: the shared folder is then what there is.
"""

import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zero_jax.checkpoint.checkpoint import Restored
from zero_jax.distributed.agreement import all_or_none, broadcast_from_first, gather, is_first
from zero_jax.errors import CheckpointError, DamagedCheckpointError, UsageError
from zero_jax.files import checksum, retried, sealed, unsealed
from zero_jax.state import ZeroState
from zero_jax.step.step import ZeroTrainStep
from zero_jax.tree import as_numbers, is_key, key_impl, named_leaves

LOG = logging.getLogger("zero_jax")
FORMAT, KEPT = "zero_jax local copy 2", 2

_MAX_HEADER_BYTES = 2**28

Heads = list[tuple[int, int] | None]
"""What `Checkpoints.heads` returns."""


class LocalCopies:
    """The copies of one run in a folder of each host; each process has a folder of its own in it, for nothing else.

    All processes call every method. Two copies are kept: processes may die between writing the same one.
    """

    def __init__(self, path: str | Path, config: Any):
        """Nothing is read or written yet.

        Args:
          path: a folder on a local disk or in memory (tmpfs), on every host.
          config: the options that make this run what it is; plain JSON. Copies with others are passed over.
        """
        self._folder = Path(path) / f"process-{jax.process_index()}-of-{jax.process_count()}"
        self._config = json.loads(json.dumps(config))
        self._token = broadcast_from_first([int.from_bytes(os.urandom(4), "big")])[0]
        self._writing: threading.Thread | None = None
        self._error: OSError | None = None

    def save(self, step: ZeroTrainStep, state: ZeroState, *, at: int, data: Any, heads: Heads) -> None:
        """Copies the shards of this process to the host's memory, and to a file while training goes on.

        `state` may be donated as soon as this returns. What cannot be written is logged: the run goes on without.

        Args:
          step: the step that `state` belongs to.
          state: every leaf is saved, the gathered compute parameters, too.
          at: the number of steps taken.
          data: position in the data; plain JSON.
          heads: of the run's `Checkpoints`.
        """
        self.wait()
        leaves, blobs, offset = [], [], 0
        arrays = [(name, as_numbers(leaf)) for name, leaf in named_leaves(state)]
        for _, array in arrays:
            array.copy_to_host_async()
        for name, array in arrays:
            parts: dict[str, dict[str, Any]] = {}
            for shard in array.addressable_shards:
                if (index := _index(shard.index, array.shape)) not in parts:
                    blob = np.array(shard.data, order="C").reshape(-1).view(np.uint8)  # a copy: it may be donated
                    parts[index] = {"offset": offset, "bytes": blob.size}
                    blobs.append(blob)
                    offset += blob.size
            leaves.append({"name": name, "dtype": str(array.dtype), "shape": list(array.shape), "parts": parts})
        header = {"number": at, "token": self._token, "data": data, "config": self._config,
                  "heads": heads, "stage": step.stage.number, "devices": step.mesh.size, "leaves": leaves}
        self._writing = threading.Thread(target=self._write, args=(header, blobs), name="zero_jax local copy")
        self._writing.start()

    def restore(self, step: ZeroTrainStep, batch: Any, *, heads: Heads) -> Restored | None:
        """The last copy that all processes have and that is newer than the last checkpoint; None where there is none.

        Args:
          step: gives the layout, which must be that of the run that saved.
          batch: any batch for it.
          heads: of the run's `Checkpoints`: the last one is its latest checkpoint.
        """
        self.wait()
        template = step.layout(batch).state
        mine = all_or_none(lambda: {
            (header["number"], header["token"]): (path, header) for path in self._files()
            if (header := _read_header(path)) is not None and self._continues(header, heads)})
        table = np.full((KEPT, 3), 2**32 - 1, np.uint32)
        for row, (number, token) in zip(table, mine, strict=False):
            row[:] = number >> 32, number & 0xFFFFFFFF, token
        everyones = [{(int(high) << 32 | int(low), int(token)) for high, low, token in rows}
                     for rows in gather(table)]
        for key in sorted(set.intersection(*everyones) - {(2**64 - 1, 2**32 - 1)}, reverse=True):
            path, header = mine[key]
            try:
                state = all_or_none(functools.partial(_state, path, header, template))
            except UsageError as error:
                if isinstance(error, CheckpointError) and not isinstance(error, DamagedCheckpointError):
                    raise  # it cannot be read
                LOG.warning("The local copy after step %d is passed over: %s", key[0], error)
            else:
                run = {"stage": header["stage"], "devices": header["devices"]}
                return Restored(state, key[0], header["data"], header["config"], run, ())
        return None

    def wait(self) -> None:
        """Waits until the copy that is being written is complete."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._error is not None:
            LOG.warning("A local copy cannot be written (%s): a restart would continue from an earlier one.",
                        self._error)
            self._error = None

    def clear(self) -> None:
        """Removes this process's copies, which a checkpoint has made superfluous, or which are not of this run.

        With them what a killed process left of one, and the copies of runs of another number of processes.
        """
        self.wait()
        count = f"-of-{jax.process_count()}"
        others = [path for path in self._folder.parent.glob("process-*-of-*/*.*")
                  if path.suffix in (".copy", ".tmp") and not path.parent.name.endswith(count)]
        for path in (*self._files(), *self._folder.glob("*.tmp"), *others):
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """This process's copies, newest first."""
        return sorted(self._folder.glob("*.copy"), reverse=True) if self._folder.is_dir() else []

    def _continues(self, header: dict[str, Any], heads: Heads) -> bool:
        """Whether a copy continues from the latest checkpoint. Process 0 alone knows the checkpoints and decides."""
        if not is_first():
            return True
        head = heads[-1]
        known = [tuple(each) if each else None for each in header["heads"]]
        return (header["config"] == self._config and head in known
                and header["number"] > (head[0] if head else 0))

    def _write(self, header: dict[str, Any], blobs: Iterable[np.ndarray]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            rest = iter(blobs := list(blobs))
            for leaf in header["leaves"]:
                for part in leaf["parts"].values():
                    part["checksum"] = checksum(next(rest).data)
            text = json.dumps(sealed(FORMAT, header)).encode() + b"\n"
            files = self._files()
            path = self._folder / f"{int(files[0].stem) + 1 if files else 0:012d}.copy"
            for left in self._folder.glob("*.tmp"):  # by a process that was killed: it may fill the memory
                left.unlink(missing_ok=True)
            temporary = path.with_suffix(".tmp")
            try:
                with temporary.open("wb") as file:
                    file.write(text)
                    file.writelines(blob.data for blob in blobs)
                temporary.rename(path)  # not synced: after a power loss the shared folder is what there is
            finally:
                temporary.unlink(missing_ok=True)
            for old in self._files()[KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            self._error = error


def _index(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """The place of a shard in its array, as text."""
    return " ".join(f"{start}:{stop}" for start, stop, _ in (
        each.indices(size) for each, size in zip(index, shape, strict=True)))


def _read_header(path: Path) -> dict[str, Any] | None:
    """The header of a copy, its first line; None where it is damaged or of an earlier version, which is logged."""
    def line() -> bytes:
        with path.open("rb") as file:
            return file.readline(_MAX_HEADER_BYTES)

    try:
        text = retried(line, what=path)
        return unsealed(text, FORMAT, path) | {"start": len(text)}
    except (FileNotFoundError, DamagedCheckpointError) as error:
        LOG.warning("%s The local copy is passed over.", error)
        return None


def _state(path: Path, header: dict[str, Any], template: ZeroState) -> ZeroState:
    """The state of a copy; raises UsageError where it lacks a shard of this process, or has another one."""
    saved = {leaf["name"]: leaf for leaf in header["leaves"]}
    names = [name for name, _ in named_leaves(template)]
    if list(saved) != names:
        raise UsageError(f"{path} has other leaves than this step.")
    with retried(lambda: path.open("rb", buffering=0), what=path) as file:
        def read(offset: int, size: int) -> np.ndarray:
            data = np.empty(size, np.uint8)
            file.seek(header["start"] + offset)
            done = 0
            while count := file.readinto(data[done:].data):  # a call may read fewer
                done += count
            return data[:done]

        leaves = [_array(path, saved[name], leaf, read) for name, leaf in named_leaves(template)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _array(path: Path, saved: dict[str, Any], leaf: jax.ShapeDtypeStruct, read: Callable[[int, int], np.ndarray]
           ) -> jax.Array:
    plain, sharding = jax.eval_shape(as_numbers, leaf), leaf.sharding
    assert isinstance(sharding, NamedSharding)
    if (tuple(saved["shape"]), saved["dtype"]) != (plain.shape, str(plain.dtype)):
        raise UsageError(f"{path}: {saved['name']} is {saved['dtype']} {saved['shape']}, and in this step "
                              f"{plain.dtype} {list(plain.shape)}.")

    def part(index: Any) -> np.ndarray:
        place = saved["parts"].get(_index(index, plain.shape))
        if place is None:
            raise UsageError(f"{path}: {saved['name']} is sharded in another way.")
        raw = retried(lambda: read(place["offset"], place["bytes"]), what=path)
        if raw.size != place["bytes"] or checksum(raw.data) != place["checksum"]:
            raise DamagedCheckpointError(f"{path} is damaged: {saved['name']} is not as it was saved.")
        shape = [len(range(*each.indices(size))) for each, size in zip(index, plain.shape, strict=True)]
        return raw.view(plain.dtype).reshape(shape)

    array = jax.make_array_from_callback(plain.shape, sharding, part)
    return jax.random.wrap_key_data(array, impl=key_impl(leaf)) if is_key(leaf) else array
