"""Opens the files that a user names, none of which can block a process or fill its memory; errors of writing them."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

from zero_jax.errors import UsageError


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


def read_file(path: Any, remote: bool) -> bytes:
    """The bytes of a local file, of at most 256 MiB, or of one in an object store, where nothing blocks."""
    return path.read_bytes() if remote else read_regular(path, 1 << 28)


@contextlib.contextmanager
def writing(path: Any) -> Iterator[None]:
    """Raises UsageError, that `path` cannot be written, for an OSError, as of a full disk."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): free space, or give another place.") from error
