"""A scratch file with the threads that read and write it: made when a step first needs it, and kept until the end."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from zero_jax.disk.records import RecordLayout
from zero_jax.disk.scratch import ScratchFile
from zero_jax.disk.streaming import Streaming


class StreamedScratch:
    """The records of one layout, which hold something for the time of a step."""

    def __init__(self, layout: RecordLayout, after_damage: str):
        """after_damage: what to say of the state where a record is not as it was written. Opens nothing yet."""
        self.layout, self._after_damage = layout, after_damage
        self._streaming: Streaming | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return self.layout.num_bytes

    @property
    def streaming(self) -> Streaming:
        """What reads and writes the records; `open` before."""
        assert self._streaming is not None
        return self._streaming

    def open(self, folder: Path) -> None:
        """Makes the file in `folder`, if it is not open; raises CheckpointError where the disk has too little space.

        Where there are no records there is no file.
        """
        if self._streaming is None and self.layout.records:
            self._streaming = Streaming(ScratchFile(folder, self.layout, self._after_damage))

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        """In it, records can be written and read; by an error what was written is forgotten."""
        self.open(folder)
        with contextlib.nullcontext() if self._streaming is None else self._streaming.abandoned_by_errors():
            yield

    def close(self) -> None:
        """Ends the threads and gives the space back."""
        if self._streaming is not None:
            self._streaming.close()
            self._streaming = None
