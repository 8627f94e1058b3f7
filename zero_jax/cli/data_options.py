"""The options of the data of a run. Nothing here imports JAX."""

import dataclasses
import glob
from pathlib import Path

from zero_jax.errors import UsageError

BYTES = 256
"""Vocabulary size of text, which is read as bytes."""


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """What a run reads, and how."""

    data: tuple[str, ...] = ("python",)
    """Text files, folders and globs, read as bytes; or one token file (.bin, .npy); or "python", its own library."""

    max_bytes: int | None = None
    """Read no more text than this, in bytes. None: all."""

    prefetch: int = 2
    """Batches that a thread reads and puts on the devices ahead of the step. 0: none."""

    def check_data_options(self) -> None:
        """Raises ValueError for values that are wrong whatever the files hold; makes a tuple of one name."""
        if not self.data or "" in self.data:
            raise UsageError('data is empty: name files, or "python".')
        object.__setattr__(self, "data", (self.data,) if isinstance(self.data, str) else tuple(self.data))
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UsageError(f"max_bytes={self.max_bytes}: give at least 1.")
        if not 0 <= self.prefetch <= 1024:
            raise UsageError(f"prefetch={self.prefetch} is not within 0 to 1024.")

    def check_data(self) -> None:
        """Raises ValueError for data that are not there, or empty."""
        check_data_files("data", self.data)

    def data_vocab_size(self) -> int | None:
        """The size of the data's vocabulary, where it is known before they are read."""
        return None if self.token_file else BYTES

    @property
    def token_file(self) -> bool:
        """Whether the data are ids of some tokenizer, and not text read as bytes."""
        return is_token_file(self.data)


def is_token_file(data: tuple[str, ...]) -> bool:
    """Whether these are ids of some tokenizer, and not text."""
    return Path(data[0]).suffix in (".bin", ".npy")


def check_data_files(option: str, data: tuple[str, ...]) -> None:
    """Raises ValueError for files of `option` that are not there, cannot be read as data, or are empty."""
    for name in data:
        path = Path(name).expanduser()
        if data != ("python",) and not path.exists() and not glob.glob(str(path), recursive=True):
            raise UsageError(f"{option}: {name}: no such file, folder or glob match.")
        if path.exists() and not path.is_dir():
            if not path.is_file():
                raise UsageError(f"{option}: {name}: it is a pipe, a socket or a device: give a file.")
            if not path.stat().st_size:
                raise UsageError(f"{option}: {name}: the file is empty: give one with text or tokens.")
