"""The rate at which a process reads and writes states in files: measured, beside what is predicted of its disk."""

import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from zero_jax.disk.generations import existing_folder
from zero_jax.disk.record_file import AlignedFile, Record, RecordLayout
from zero_jax.disk.streaming import Streaming
from zero_jax.distributed.agreement import all_or_none, gather
from zero_jax.errors import CheckpointError, UsageError
from zero_jax.planning.host_link import PARTS_BY
from zero_jax.planning.transfers import predicted_disk_rate
from zero_jax.xla.targets import Target

RECORD, RECORDS = 2**22, 32
"""Bytes of a record, and how many the file has: small ones, so that a slow disk ends one soon."""

ROUND_SECONDS, ROUND_BYTES = 1.0, 3 * 2**27
"""After which no more is written at first, and no more moved in what is timed: half a GiB and two seconds in all."""


@dataclasses.dataclass(frozen=True)
class DiskRate:
    """bytes_per_second: of a process, half read and half written at once. is_direct: past the page cache."""

    bytes_per_second: float
    is_direct: bool


class _Measured:
    """The file that is measured, as `RecordFiles`: what is read of it is checked against nothing."""

    def __init__(self, folder: Path, layout: RecordLayout):
        """Reserves the space; raises CheckpointError where the disk has too little of it."""
        self.layout, self.file = layout, AlignedFile(folder / "measured.bin")
        self.file.open(layout.num_bytes, create=True)

    def read(self, record: Record, buffer: memoryview) -> None:
        self.file.read(record, buffer)

    def write(self, record: Record, fill: Callable[[], memoryview]) -> None:
        self.file.write(record, fill())

    def abandon(self) -> None:
        """Nothing is to be forgotten."""

    def close(self) -> None:
        self.file.close()


@functools.cache
def measured_disk(folder: Path) -> DiskRate:
    """How fast this process reads and writes in `folder`: measured once, with what moves the states of a step.

    In a file of 128 MiB that has no name any more before it is written, so that it is gone when the process ends.
    Everything is written once before it is timed: a file system takes longer for what is only reserved.
    Raises CheckpointError where it cannot be written, as on a full disk.
    """
    layout = RecordLayout()
    for number in range(RECORDS):
        layout.add([("measured", number, (0,), (RECORD,), "uint8")])
    with tempfile.TemporaryDirectory(prefix=".zero_jax-", dir=folder) as own:
        files = _Measured(Path(own), layout)
    streaming = Streaming(files)
    try:
        return _measured(streaming, files)
    finally:
        streaming.close()


def _measured(streaming: Streaming, files: _Measured) -> DiskRate:
    block = np.random.default_rng(0).integers(0, 256, RECORD, np.uint8)  # what no file system makes smaller

    def fill(record: Record, buffer: memoryview) -> None:
        record.parts[0].view(buffer)[...] = block

    def write(records: Sequence[Record]) -> int:
        """How many were written before the time was over, two at least."""
        end = time.perf_counter() + ROUND_SECONDS
        for count, record in enumerate(records, start=1):
            streaming.write(record, fill)
            if count > 1 and time.perf_counter() > end:
                break
        streaming.finish()
        files.file.sync()
        return count

    half = write(files.layout.records) // 2
    there, here = files.layout.records[:half], files.layout.records[half:2 * half]
    began, moved = time.perf_counter(), 0
    while moved < ROUND_BYTES and time.perf_counter() < began + ROUND_SECONDS:
        with streaming.read(there, lambda record, buffer: np.array(record.parts[0].view(buffer))) as ahead:
            for record, _ in zip(here, ahead, strict=True):
                streaming.write(record, fill)
        streaming.finish()
        files.file.sync()
        moved, there, here = moved + 2 * half * RECORD, here, there
    return DiskRate(moved / (time.perf_counter() - began), files.file.is_direct)


def agreed_disk(folder: str | os.PathLike[str]) -> DiskRate:
    """`measured_disk` of the slowest process of the run, all at once; `folder` may not exist yet.

    Raises UsageError on every process where one cannot measure it.
    """
    def measured() -> DiskRate:
        try:
            return measured_disk(existing_folder(folder).resolve())
        except (CheckpointError, OSError) as error:
            raise UsageError(f"not compared, since its disk cannot be measured: {error}") from error

    rate = all_or_none(measured)
    rates = gather(np.array([rate.bytes_per_second, rate.is_direct], np.float32))
    return DiskRate(float(rates[:, 0].min()), bool(rates[:, 1].all()))


def used_disk_rate(target: Target, folder: str | os.PathLike[str], rate: DiskRate
                   ) -> tuple[float | None, tuple[str, ...]]:
    """The measured rate where it and the predicted one part, else None; and a sentence that says so."""
    predicted, measured = predicted_disk_rate(target), rate.bytes_per_second
    if predicted and abs(measured / predicted - 1) < PARTS_BY:
        return None, ()
    expected = f"predicted were {predicted / 1e9:.3g}" if predicted else f"{target.text} has no rates of disks"
    cached = "" if rate.is_direct else (
        " That went through the page cache, as its file system has no direct access: states that do not fit the "
        "host's memory may take longer.")
    return measured, (f"Measured: a process reads and writes {measured / 1e9:.3g} GB/s in {os.fspath(folder)}, both "
                      f"together; {expected}: the times above are with what was measured.{cached}",)
