"""Opens the files that a user names, none of which can block a process or fill its memory; errors of files.

`checksum`, `sealed` and `unsealed` are how every file of ours that is read again is known to be as it was written.
"""

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash

from zero_jax.errors import CheckpointError, DamagedCheckpointError, UsageError

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


def retried(read: Callable[[], T], *, what: object, agreed: Callable[[bool], bool] = bool) -> T:
    """The result of `read()`, called again after each of `WAITS` while its error `is_transient`.

    Raises CheckpointError, that `what` cannot be read, for other OSErrors and for that of the last try.
    FileNotFoundError and its like, and what is no OSError, as of a parser, are raised at once as they are.
    agreed: makes of "the time is over" what all processes take it for, where all of them call this.
    """
    start, waits = time.monotonic(), list(WAITS)
    while True:
        try:
            return read()
        except _MISSING:
            raise
        except (OSError, MemoryError) as error:
            if not is_transient(error) or not waits or agreed(time.monotonic() - start > PATIENCE):
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


def write_text(path: Path, text: str) -> None:
    """Writes a file, which has all of `text` or what it had before, whenever the process ends; errors as `writing`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def checksum(data: Any) -> str:
    """XXH3 of the bytes of a buffer, or of the JSON of another value, as 16 hexadecimal digits.

    Of states in files it takes less time than the disk: 13 GB/s on one core (xxhash 4.1), where CRC-32 of zlib has 3.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        data = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    return xxhash.xxh3_64_hexdigest(data)


def sealed(form: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """`body` as a record with a checksum, to be written as JSON; form: the name of its format, and its version."""
    record = {"format": form, **body}
    return {**record, "checksum": checksum(record)}


def unsealed(record: Any, form: str, where: object) -> dict[str, Any]:
    """The body of a record of the format `form`, or of the JSON of one; where: the file, in messages.

    Raises DamagedCheckpointError where it is not as `sealed` made it, and CheckpointError where another version did.
    """
    try:
        body = dict(json.loads(record) if isinstance(record, (str, bytes)) else record)
        given, found = body.pop("checksum", None), checksum(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where} is damaged: it is no {form.rpartition(' ')[0]} ({error}).") from error
    known = body.pop("format", None)
    is_other = given == found and known != form or given != found and {"sha256", "version"} & body.keys()
    if is_other and isinstance(known, str):
        raise CheckpointError(f"{where} was written by another version of zero_jax, as {known[:50]!r}, and this one "
                              f"reads {form!r}: use the version that wrote it.")
    if is_other or given != found:
        raise DamagedCheckpointError(f"{where} is damaged: its checksum is {str(given)[:50]} and not {found}.")
    return body
