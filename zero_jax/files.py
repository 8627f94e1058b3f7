"""Opens the files that a user names, none of which can block a process or fill its memory; errors of files."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from zero_jax.errors import CheckpointError, UsageError

T = TypeVar("T")

WAITS = (0.1, 0.3, 1.0, 3.0)
"""Seconds before each further try of a read that failed."""

PATIENCE = 30.0
"""Seconds after which a read is not tried again: those of servers wait and try again themselves."""

_MISSING = FileNotFoundError, NotADirectoryError, IsADirectoryError
_FINAL = errno.EACCES, errno.EPERM, errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENAMETOOLONG


def is_transient(error: BaseException) -> bool:
    """Whether the same read may succeed later: an OSError of the device, server or system, or too little memory.

    It proves nothing of what is stored. What is missing, forbidden or no regular file stays so.
    """
    is_final = isinstance(error, _MISSING) or isinstance(error, OSError) and error.errno in _FINAL
    return isinstance(error, OSError | MemoryError) and not is_final


def retried(read: Callable[[], T], *, what: object) -> T:
    """The result of `read()`, called again after each of `WAITS` while its error `is_transient`.

    Raises CheckpointError, that `what` cannot be read, for other OSErrors and for that of the last try.
    FileNotFoundError and its like, and what is no OSError, as of a parser, are raised at once as they are.
    """
    start, waits = time.monotonic(), list(WAITS)
    while True:
        try:
            return read()
        except _MISSING:
            raise
        except (OSError, MemoryError) as error:
            if not is_transient(error) or not waits or time.monotonic() - start > PATIENCE:
                raise CheckpointError(f"{what} cannot be read ({str(error) or type(error).__name__}): mend or allow "
                                      "it, or name another folder.") from error
            time.sleep(waits.pop(0))


def open_regular(path: Any) -> BinaryIO:
    """The file at `path` opened to be read; raises OSError for a pipe, a socket or a device, which could block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # with which a pipe without a writer is opened at once
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe, a socket or a device", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Any, most: int) -> bytes:
    """The bytes of a file; raises OSError as `open_regular`, and for more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and such a file has at most {most:,}", str(path))
        return file.read()


@contextlib.contextmanager
def writing(path: Any) -> Iterator[None]:
    """Raises UsageError, that `path` cannot be written, for an OSError, as of a full disk."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): free space, or give another place.") from error
