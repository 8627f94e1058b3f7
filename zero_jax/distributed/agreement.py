"""Agreement between the processes of a run; with one process nothing is sent."""

import collections
import hashlib
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.errors import (
    MAX_MESSAGE,
    CheckpointError,
    DamagedCheckpointError,
    UnwrittenCheckpointError,
    UsageError,
    few,
)
from zero_jax.files import is_transient

T = TypeVar("T")

_KINDS: tuple[type[Exception], ...] = (
    DamagedCheckpointError, OSError, UnwrittenCheckpointError, CheckpointError, UsageError, RuntimeError)
"""Kinds of errors that processes agree upon: OSError for what `is_transient`, RuntimeError for what is none of them."""


def is_first() -> bool:
    """Whether this is process 0, which does what only one process may do."""
    return jax.process_index() == 0


def broadcast_from_first(numbers: Sequence[int]) -> list[int]:
    """The `numbers` of process 0, on every process."""
    if jax.process_count() == 1:
        return list(numbers)
    (count,), *_ = gather(np.array([len(numbers)], np.int32))
    mine = np.zeros((int(count), 2), np.uint32)
    if not mine.size:
        return []
    if is_first():
        mine[:] = [(number >> 32, number & 0xFFFFFFFF) for number in numbers]
    return [(int(high) << 32) + int(low) for high, low in gather(mine)[0]]


def gather(array: np.ndarray) -> np.ndarray:
    """The `array` of every process, stacked by process; of one process a view of its own.

    One device of each process takes part: JAX's `process_allgather` needs as many devices in each.
    """
    if jax.process_count() == 1:
        return array[None]
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), "process")
    own = jax.device_put(array[None], first[jax.process_index()])
    parts = jax.make_array_from_single_device_arrays(
        (len(first), *array.shape), NamedSharding(mesh, P("process")), [own])
    return np.asarray(jax.jit(_same, out_shardings=NamedSharding(mesh, P()))(parts).addressable_data(0))


def _same(value: jax.Array) -> jax.Array:
    return value


def spans_processes(mesh: Mesh) -> bool:
    """Whether the mesh has devices of every process, of several."""
    return jax.process_count() > 1 and {device.process_index for device in mesh.devices.flat} == {
        *range(jax.process_count())}


def check_same(what: str, value: str | bytes, advice: str) -> None:
    """Raises UsageError on every process where `value` is not the same on all of them; what: its name, in a message.

    All processes call this.
    """
    content = value.encode() if isinstance(value, str) else value
    digests = gather(np.frombuffer(hashlib.sha256(content).digest(), np.uint8))
    others = np.flatnonzero((digests != digests[0]).any(axis=1))
    if others.size:
        raise UsageError(f"{what} of process {others[0]} is another than that of process 0: {advice}.")


def check_same_numbers(what: str) -> None:
    """Raises UsageError where processes have different numbers of devices; what: that cannot be, in a message."""
    numbers = collections.Counter(device.process_index for device in jax.devices())
    if len(set(numbers.values())) > 1:
        raise UsageError(f"{what} by processes with different numbers of devices, and these have "
                         f"{few(numbers[process] for process in sorted(numbers))}: start each with the same "
                         "number, as by CUDA_VISIBLE_DEVICES.")


def devices_on_host(mesh: Mesh) -> int:
    """How many devices of the mesh are on this machine: of this process, and of others of the run that share it."""
    mine = np.frombuffer(hashlib.sha256(_machine().encode()).digest()[:8], np.uint32)
    here = set(np.flatnonzero((gather(mine) == mine).all(axis=1)).tolist()) if jax.process_count() > 1 else {0}
    return sum(device.process_index in here for device in mesh.devices.flat)


def _machine() -> str:
    """One text for all processes of a machine, in containers of it too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


def all_or_none(do: Callable[[], T]) -> T:
    """The result of `do()`. Raises on every process if it raises on any, so that none continues alone.

    All raise an error of one kind, so that an `except` around this, or a further try, is the same on all of them. That
    is the last of `_KINDS` that any process met: damage, which a fallback may answer, only where none met another.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = do()
    except Exception as raised:
        error = raised
    if jax.process_count() > 1:
        own = -1 if error is None else _KINDS.index(_kind_of(error))
        kinds = gather(np.array(own)).tolist()
        if (worst := max(kinds)) >= 0:
            process, text = kinds.index(worst), np.zeros(4 * MAX_MESSAGE, np.uint8)
            message = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            encoded = message.encode(errors="replace")[:text.size]
            text[:len(encoded)] = np.frombuffer(encoded, np.uint8)
            message = gather(text)[process].tobytes().rstrip(b"\0").decode(errors="replace")
            if own != worst:
                raise _KINDS[worst](f"Process {process} failed: {message}") from error
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _kind_of(error: Exception) -> type[Exception]:
    if is_transient(error):
        return OSError
    return next((kind for kind in _KINDS if kind is not OSError and isinstance(error, kind)), RuntimeError)


def on_any(condition: bool) -> bool:
    """Whether it holds on any process, on every process."""
    return bool(gather(np.array(condition)).any())


def from_first(do: Callable[[], Sequence[int]]) -> list[int]:
    """The numbers that `do()` returns on process 0, on every process: for what processes may see differently.

    A condition before anything that all processes do together is agreed upon so. `do` runs on process 0 alone, and
    calls nothing of that kind itself. Raises as `all_or_none`.
    """
    return broadcast_from_first(all_or_none(lambda: do() if is_first() else []))
