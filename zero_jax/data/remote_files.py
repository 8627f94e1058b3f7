"""Parquet files in an object store, gs:// through gcsfs, of which parts are read: a footer, and columns of a row group.

Nothing is copied to a disk. Reads go out as pyarrow asks for them, so that a file is never whole in memory.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from zero_jax.data import extras
from zero_jax.errors import UsageError, printable

SCHEME, ANSWER_SECONDS = "gs", 60.0
"""The object store that works; how long its server is waited for."""


def is_remote(name: Any) -> bool:
    """Whether `name` is in an object store."""
    return "://" in str(name)


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file in an object store, with what is asked of a `pathlib.Path`. url: as gs://bucket/file. size: in bytes."""

    url: str
    size: int

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the url."""
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        """Of the name."""
        return PurePosixPath(self.url).suffix

    def resolve(self) -> "RemoteFile":
        """The file itself: an object store has no links."""
        return self

    def opened(self) -> Any:
        """A file object whose reads are requests of just these bytes. Raises OSError."""
        return _store().open(self.url, "rb", cache_type="none")


@functools.lru_cache(maxsize=64)
def remote_files(name: str) -> tuple[RemoteFile, ...]:
    """The Parquet files of gs://bucket/ a file, a folder or a pattern, in order, as they are when first asked for.

    Raises UsageError for another store, a missing package, a bucket or files that are not there or may not be read.
    """
    scheme, _, key = name.partition("://")
    if scheme != SCHEME:
        raise UsageError(f"data: {name}: of object stores {SCHEME}:// alone is read: give that, or a file system that "
                         "is mounted on all hosts.")
    if not key.strip("/"):
        raise UsageError(f"data: {name} names no bucket: give {SCHEME}://bucket/folder.")
    extras.check_installed("gcsfs", name)
    with readable(name):
        store, files = _store(), dict[str, Any]()
        if set(key) & set("*?["):
            files = store.glob(name, detail=True)
        elif not (files := store.find(name, detail=True)):
            files = {key: store.info(name)}
    found = [RemoteFile(f"{SCHEME}://{path}", int(each["size"])) for path, each in sorted(files.items())
             if path.endswith(".parquet") and each["type"] == "file" and each["size"]]
    if not found:
        raise UsageError(f"data: {name}: no .parquet file, which alone is read from an object store: name others, or "
                         "copy the data to a disk.")
    return tuple(found)


@contextlib.contextmanager
def readable(what: Any) -> Iterator[None]:
    """Raises UsageError, of one line, in place of what a store's packages raise; of a local file nothing else."""
    if not is_remote(what):
        yield
        return
    try:
        yield
    except UsageError:
        raise
    except FileNotFoundError as error:
        raise UsageError(f"data: {what}: there is no such bucket or file, or it is hidden without credentials (gcloud "
                         "auth application-default login): name another.") from error
    except Exception as error:  # of gcsfs, aiohttp, google.auth
        if isinstance(error, extras.load("pyarrow", str(what)).ArrowException):
            raise  # of what was read
        text = printable(" ".join(str(error).split())[:200]) or f"no answer in {ANSWER_SECONDS:.0f} s"
        raise UsageError(f"data: {what} cannot be read ({type(error).__name__}: {text}): allow it to these credentials "
                         "(gcloud auth application-default login), or name another.") from error


def _store() -> Any:
    import fsspec

    for name in ("gcsfs", "google.auth"):  # which log what they then raise, and each way to credentials that they try
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return fsspec.filesystem(SCHEME, timeout=ANSWER_SECONDS, use_listings_cache=False)
