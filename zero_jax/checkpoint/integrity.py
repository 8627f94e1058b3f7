"""Whether a checkpoint's files and leaves are as they were saved, and the message where they are not."""

import contextlib
import errno
import itertools
import json
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import tensorstore
from etils import epath

from zero_jax.checkpoint import orbax_store as storage
from zero_jax.checkpoint.manifest import Leaf, Manifest, parse
from zero_jax.checkpoint.object_store import contents
from zero_jax.checkpoint.orbax_files import quiet
from zero_jax.checkpoint.orbax_store import ARRAYS
from zero_jax.distributed.agreement import all_or_none, is_first, on_any
from zero_jax.errors import DamagedCheckpointError
from zero_jax.files import is_transient, retried

T = TypeVar("T")

FALLBACK = ("restore(..., fallback=True) restores the last intact checkpoint; generate and export take the number of "
            "one as --at.")


def read_manifest(path: Any) -> Manifest:
    """The manifest of the checkpoint at `path`, a folder whose name is its number; raises CheckpointError."""
    file = storage.manifest_path(path)
    text = contents(file)
    if text is None:
        raise DamagedCheckpointError(f"{path} is damaged: {file} is gone. {FALLBACK}")
    manifest = parse(text, str(file))
    if not storage.is_committed(path):
        raise DamagedCheckpointError(f"{path} is damaged: {storage.commit_path(path)} is gone. {FALLBACK}")
    if str(manifest.step) != path.name:
        raise DamagedCheckpointError(f"{path} holds checkpoint {manifest.step}: give the folder that name again.")
    return manifest


def proven(read: Callable[[], T], path: Any) -> T:
    """The result of `read()`, of the checkpoint at `path`; all processes call this, and try again together.

    It raises DamagedCheckpointError only where it finds the same again after every file of the checkpoint was found,
    and CheckpointError where reading fails in another way.
    """
    def attempt() -> T:
        with contextlib.suppress(DamagedCheckpointError):
            return all_or_none(read)
        all_or_none(lambda: _find_files(path) if is_first() else None)
        return all_or_none(read)

    return retried(attempt, what=path, agreed=on_any)


def _store(path: Any) -> Any:
    """A folder, as TensorStore reads it."""
    folder = f"{str(path).rstrip('/')}/"
    return tensorstore.KvStore.open(
        folder if storage.is_remote(folder) else {"driver": "file", "path": folder}).result()


def _find_files(path: Any) -> None:
    """Raises OSError where a file that is listed cannot be read, by what reads the arrays: it takes one for empty."""
    store = _store(path)
    for name, size in storage.sizes(path).items():
        try:
            state = store.read(name, byte_range=slice(max(size - 1, 0), size)).result().state
        except Exception as error:
            raise _of_reading([error]) or OSError(_cause([error])) from error
        if state == "missing":
            raise OSError(f"{path / name} is listed and not found")


def read_arrays(path: Any, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays, on all processes or on none.

    Raises, for any error of Orbax or TensorStore, DamagedCheckpointError or OSError: the first, with a leaf that cannot
    be read, for what a parser or a checksum says of the bytes.
    """
    with quiet():
        return all_or_none(lambda: _read_here(path, abstract))


def _read_here(path: Any, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    handled = sys.exc_info()[1]  # by the caller: it caused nothing here
    try:
        return storage.read(path, abstract)
    except Exception as error:
        errors = [*itertools.takewhile(lambda each: each is not handled, _chain(error))]
        if failed := _of_reading(errors):
            raise failed from error
        index, changed = storage.broken_index(path), changed_files(path)
        if not index and not changed and isinstance(errors[-1], LookupError | OSError):
            raise OSError(_cause(errors)) from error  # Orbax takes what it cannot look at for missing
        leaf = "" if index else _named(errors, abstract) or _unreadable(path, abstract)
        raise DamagedCheckpointError(
            f"{path} is damaged: {f'leaf {leaf} in ' if leaf else ''}{index or _file(errors) or _files_of(path, leaf)} "
            f"cannot be read{f'; {changed}' if changed else ''} ({_cause(errors)}). {FALLBACK}") from error


_OF_BYTES = "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE"
"""What TensorStore's errors of parsers and checksums begin with, or with none of these words."""


def _of_reading(errors: Sequence[BaseException]) -> OSError | None:
    """The OSError by which a read failed that gave no bytes; else None. It is transient but for what is forbidden."""
    for error in errors:
        status = re.match("[A-Z]+(_[A-Z]+)*(?=: )", str(error))
        if isinstance(error, PermissionError) or status and status[0] == "PERMISSION_DENIED":
            return PermissionError(errno.EACCES, _cause(errors))
        if is_transient(error) or status and status[0] not in _OF_BYTES:
            return OSError(_cause(errors))
    return OSError(_cause(errors)) if isinstance(errors[-1], RuntimeError) else None  # as of threads that do not start


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _named(errors: Iterable[BaseException], names: Iterable[str]) -> str:
    """The leaf of `names` that a quoted path in the messages of `errors` begins with; empty if there is none."""
    quoted = [text for error in errors for text in re.findall(r'"([^"]+/[^"]*)"', _text(error))]
    return max((name for name in names if any(text.startswith(f"{name}/") for text in quoted)), key=len, default="")


def _file(errors: Iterable[BaseException]) -> str:
    """The last file that tensorstore names in its message; empty if there is none."""
    return next((files[-1] for error in errors if (files := re.findall(r'file "([^"]+[^"/])"', _text(error)))), "")


def _files_of(path: Any, leaf: str) -> str:
    """The files that store a leaf's elements, as text; their folder where they are unknown or four and more."""
    files = files_of(path, leaf) if leaf else []
    return ", ".join(str(path / file) for file in files) if 0 < len(files) < 4 else str(path / storage.ARRAYS)


def _cause(errors: Sequence[BaseException]) -> str:
    """The first cause, without tensorstore's specifications."""
    return _text(errors[-1]).partition(" [tensorstore_spec")[0].rpartition('": ')[2][:300]


def _unreadable(path: Any, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> str:
    """The first leaf that cannot be read alone; empty if all can, if none can, and in a run of several processes."""
    def can_be_read(name: str) -> bool:
        with contextlib.suppress(Exception):
            return bool(storage.read(path, {name: abstract[name]}))
        return False

    if jax.process_count() > 1 or not any(map(can_be_read, abstract)):
        return ""
    return next((name for name in abstract if not can_be_read(name)), "")


def verify(path: Any, saved: Mapping[str, Leaf], digests: Mapping[str, str]) -> None:
    """Raises DamagedCheckpointError unless the `digests` of what was read are those that were saved."""
    wrong = [name for name, leaf in saved.items() if leaf.digest != digests[name]]
    if wrong:
        changed = changed_files(path)
        raise DamagedCheckpointError(
            f"{path} is damaged: leaf {wrong[0]} ({saved[wrong[0]]}) in {_files_of(path, wrong[0])} has the digest "
            f"{digests[wrong[0]]}, and {saved[wrong[0]].digest} was saved"
            + (f"; so are {len(wrong) - 1} more leaves" if len(wrong) > 1 else "") + (f"; {changed}" if changed else "")
            + f". {FALLBACK}")


def changed_files(path: Any) -> str:
    """The files that are missing or have another size, as text; empty where their sizes were not recorded."""
    text = contents(path / storage.SIZES)
    try:
        recorded: dict[str, Any] = dict(json.loads(text or b"{}"))
    except (ValueError, TypeError, RecursionError):
        return ""
    sizes = storage.sizes(path)
    changed = [f"{name} has {sizes[name]} bytes and had {size}" if name in sizes else f"{name} is gone"
               for name, size in recorded.items() if sizes.get(name) != size]
    return "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more files" if len(changed) > 3 else "")


def files_of(path: epath.Path, name: str) -> list[str]:
    """The files below `path` with the elements of the array `name`; empty where their index cannot be read."""
    files, prefix = set(), f"{name}/".encode()
    try:
        base = _store(path / ARRAYS)
        root = tensorstore.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
        nodes = [(root, b"")]
        while nodes:
            location, before = nodes.pop()
            for entry in tensorstore.ocdbt.dump(base, location).result()["entries"]:
                key = before + entry.get("subtree_common_prefix", entry["key"])
                if "location" in entry and (key.startswith(prefix) or prefix.startswith(key)):
                    nodes.append((entry["location"], key))
                elif key.startswith(prefix) and not key.endswith(b"/zarr.json"):
                    # A small value is stored in the node itself. A location is kind:folder:file:offset:size.
                    _, *file, _, _ = entry.get("indirect_value", location).split(":")
                    files.add(f"{ARRAYS}/{urllib.parse.unquote(''.join(file))}")
    except Exception:  # a damaged index raises anything at all
        return []
    return sorted(files)
