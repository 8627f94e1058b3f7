"""Checkpoints in object stores: which paths are refused, and why; before JAX is imported.

Orbax writes arrays through tensorstore to local folders and to gs:// (its 0.12 has no other), and small files through
etils.epath and fsspec, which needs gcsfs.
"""

import importlib.util
import os
import re
from typing import Any

from zero_jax.errors import UsageError

SCHEME, PACKAGE, EXTRA = "gs", "gcsfs", "gcs"
"""The scheme that works, the package that it needs, and the extra of zero-jax that brings it."""


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


def check_target(path: Any) -> None:
    """Raises UsageError for a local folder that Orbax writes arrays to which it does not read again.

    It looks for them with the whole path as a pattern, and TensorStore takes a backslash for a slash.
    """
    if not is_remote(path) and (found := sorted(set(full := os.path.abspath(os.path.expanduser(path))) & set("*?[\\"))):
        raise UsageError(f"{full}: what Orbax writes to a path with {' and '.join(found)} cannot be read again: give a "
                         "folder whose whole path has no *, ?, [ or backslash.")


def numbers_in(path: str) -> list[int]:
    """The names that are numbers of what a folder in an object store has; UsageError where it cannot be read."""
    check_scheme(path)
    from etils import epath  # slow to import, and needed for this alone

    try:
        folder = epath.Path(path)
        return [int(each.name) for each in folder.iterdir() if each.name.isdecimal()] if folder.is_dir() else []
    except Exception as error:  # of gcsfs, aiohttp, google.auth
        raise UsageError(f"{path} cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:300]}): allow "
                         "it (gcloud auth application-default login), or name another bucket.") from error
