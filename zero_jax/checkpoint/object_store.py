"""Where checkpoints are, a local disk or an object store: which paths are refused, and the two reads of all others.

Orbax writes arrays through tensorstore to local folders and to gs:// (its 0.12 has no other), and small files through
etils.epath and fsspec, which needs gcsfs. `listed` and `contents` say what is stored, or raise: that something is
missing is known from a listing that succeeded, and from nothing else. JAX is not imported here.
"""

import errno
import importlib.util
import logging
import os
import re
from typing import Any

from zero_jax.errors import UsageError
from zero_jax.files import read_regular, retried

SCHEME, PACKAGE, EXTRA = "gs", "gcsfs", "gcs"
"""The scheme that works, the package that it needs, and the extra of zero-jax that brings it."""

ANSWER_SECONDS = 60.0
"""How long a server of an object store is waited for."""

_MISSING = FileNotFoundError, NotADirectoryError


def is_remote(path: Any) -> bool:
    """Whether `path` is in an object store, where nothing is synced, renamed or locked."""
    return "://" in str(path)


def check_scheme(path: Any) -> None:
    """Raises UsageError for a path in a store that does not work, or that lacks its package; no network is used."""
    text = os.fspath(path)
    if broken := re.match(r"([a-z][a-z0-9]{1,9}):/(?!/)", text):
        raise UsageError(f"{text} was {broken[1]}:// before pathlib.Path removed a slash: give it as text.")
    if not is_remote(text):
        return
    scheme = text.partition("://")[0]
    if scheme != SCHEME:
        raise UsageError(
            f"{text}: Orbax 0.12 writes arrays to local folders and to {SCHEME}:// only: give one of those, as a file "
            f"system that is mounted on all hosts" + (
                " (it must rename folders: s3fs-fuse and JuiceFS do, Mountpoint for Amazon S3 does not)."
                if scheme == "s3" else "."))
    if not text.partition("://")[2].strip("/"):
        raise UsageError(f"{text} names no bucket: give {SCHEME}://bucket/folder.")
    if set(text) & set("*?[]"):
        raise UsageError(f"{text}: {PACKAGE} takes *, ? and brackets for a pattern: give a name without them.")
    if importlib.util.find_spec(PACKAGE) is None:
        raise UsageError(f"{text} needs the package {PACKAGE}: pip install 'zero-jax[{EXTRA}]'.")
    from fsspec.config import conf  # which gcsfs brings

    conf.setdefault(SCHEME, {}).setdefault("use_listings_cache", False)  # others change what is in a bucket, too
    logging.getLogger(PACKAGE).setLevel(logging.CRITICAL)  # it logs the traceback of each error that it raises
    for name in ("CONNECT_TIMEOUT", "LOW_SPEED_TIME"):  # without which tensorstore waits for an answer without end
        os.environ.setdefault(f"TENSORSTORE_CURL_{name}_SECONDS", f"{ANSWER_SECONDS:.0f}")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")


def check_target(path: Any) -> None:
    """Raises UsageError for a local folder that Orbax writes arrays to which it does not read again.

    It looks for them with the whole path as a pattern, and TensorStore takes a backslash for a slash.
    """
    if not is_remote(path) and (found := sorted(set(full := os.path.abspath(os.path.expanduser(path))) & set("*?[\\"))):
        raise UsageError(f"{full}: what Orbax writes to a path with {' and '.join(found)} cannot be read again: give a "
                         "folder whose whole path has no *, ?, [ or backslash.")


def listed(path: Any) -> dict[str, int | None]:
    """What a folder has, by name: the bytes of a file, None for a folder; empty where there is no such folder.

    Raises CheckpointError where it cannot be listed.
    """
    local = os.path.abspath(os.path.expanduser(path))
    return retried(lambda: _objects(str(path)) if is_remote(path) else _entries(local), what=path)


def contents(path: Any) -> bytes | None:
    """The bytes of a file, of at most 256 MiB where it is local; None where there is none.

    Raises CheckpointError where it cannot be read.
    """
    folder, _, name = str(path).rpartition("/")

    def read() -> bytes | None:
        try:
            return _call("cat_file", str(path)) if is_remote(path) else read_regular(path, 1 << 28)
        except (*_MISSING, IsADirectoryError) as error:
            if listed(folder).get(name) is not None:
                raise OSError(errno.ESTALE, "it is listed and not found", str(path)) from error
            return None

    return retried(read, what=path)


def numbers_in(path: Any) -> list[int]:
    """The names that are numbers of what a folder has; raises UsageError where it cannot be listed."""
    check_scheme(path)
    return [int(name) for name in listed(path) if re.fullmatch("[0-9]{1,18}", name)]


def _entries(path: str) -> dict[str, int | None]:
    try:
        with os.scandir(path) as entries:
            return {each.name: _size(each) for each in entries}
    except _MISSING:
        if _is_folder(path):
            raise OSError(errno.ESTALE, "it is listed and not found", path) from None
        return {}


def _size(entry: "os.DirEntry[str]") -> int | None:
    if entry.is_dir():
        return None
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        if entry.is_symlink():
            return 0  # it leads nowhere
        raise OSError(errno.ESTALE, "it is listed and not found", entry.path) from None


def _is_folder(path: str) -> bool:
    """Whether the folder above has it, if that may be listed."""
    parent, name = os.path.split(path)
    try:
        with os.scandir(parent) as entries:
            return any(each.name == name and each.is_dir() for each in entries)
    except PermissionError:
        return False
    except _MISSING:
        if parent != path and _is_folder(parent):
            raise OSError(errno.ESTALE, "it is listed and not found", parent) from None
        return False


def _objects(path: str) -> dict[str, int | None]:
    bucket, _, key = path.partition("://")[2].partition("/")
    prefix, token, found = f"{key.rstrip('/')}/" if key else "", None, {}
    while True:
        try:
            page = _call("call", "GET", "b/{}/o", bucket, prefix=prefix, delimiter="/", pageToken=token, json_out=True)
        except FileNotFoundError as error:
            raise OSError(f"the server does not know the bucket {bucket}") from error
        if not isinstance(page, dict) or page.get("kind") != "storage#objects":
            raise OSError(f"the server's answer is no listing: {str(page)[:100]}")
        found |= {name[len(prefix):].rstrip("/"): None for name in page.get("prefixes", [])}
        found |= {each["name"][len(prefix):]: int(each["size"]) for each in page.get("items", [])}
        token = page.get("nextPageToken")
        if not token:
            return {name: size for name, size in found.items() if name}


def _call(method: str, *args: Any, **options: Any) -> Any:
    """The result of a method of gcsfs, which tries again itself; every error but FileNotFoundError is an OSError."""
    import fsspec

    try:
        return getattr(fsspec.filesystem(SCHEME), method)(*args, timeout=ANSWER_SECONDS, **options)
    except FileNotFoundError:
        raise
    except Exception as error:  # of gcsfs, aiohttp, requests, google.auth
        text = " ".join(str(error).split())[:300] or f"no answer in {ANSWER_SECONDS:.0f} s"
        raise OSError(f"{type(error).__name__}: {text}") from error
