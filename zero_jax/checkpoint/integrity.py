"""Whether a checkpoint's files and leaves are as they were saved, and the message where they are not."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from zero_jax.checkpoint import orbax_store as storage
from zero_jax.checkpoint.array_files import files_of
from zero_jax.checkpoint.manifest import Leaf, Manifest, parse
from zero_jax.checkpoint.orbax_noise import quiet
from zero_jax.errors import CheckpointError, DamagedCheckpointError
from zero_jax.files import read_file

FALLBACK = ("restore(..., fallback=True) restores the last intact checkpoint; generate and export take the number of "
            "one as --at.")


def read_manifest(path: Any) -> Manifest:
    """The manifest of the checkpoint at `path`, a folder whose name is its number; raises CheckpointError."""
    file = storage.manifest_path(path)
    try:
        text = read_file(file, storage.is_remote(file)).decode()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {file} cannot be read ({error}).") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}): allow it, or name another folder.") from error
    manifest = parse(text, str(file))
    if not storage.is_committed(path):
        raise DamagedCheckpointError(f"{path} is damaged: {storage.commit_path(path)} is gone. {FALLBACK}")
    if str(manifest.step) != path.name:
        raise DamagedCheckpointError(f"{path} holds checkpoint {manifest.step}: give the folder that name again.")
    return manifest


def read_arrays(path: Any, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays. An error of Orbax becomes a DamagedCheckpointError that names a leaf which cannot be read."""
    with quiet():
        return _read_arrays(path, abstract)


def _read_arrays(path: Any, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    try:
        return storage.read(path, abstract)
    except Exception as error:
        raise unreadable(path, abstract, error) from error


def unreadable(path: Any, abstract: Mapping[str, jax.ShapeDtypeStruct], error: Exception) -> CheckpointError:
    """What to raise where arrays of a checkpoint cannot be read; `error`: of Orbax or TensorStore."""
    if isinstance(error, PermissionError):
        return CheckpointError(f"{path} cannot be read ({error}): allow it, or name another folder.")
    index, changed = storage.broken_index(path), changed_files(path)
    leaf = "" if index else _named(error, abstract) or _unreadable(path, abstract)
    return DamagedCheckpointError(
        f"{path} is damaged: {f'leaf {leaf} in ' if leaf else ''}{index or _file(error) or _files_of(path, leaf)} "
        f"cannot be read{f'; {changed}' if changed else ''} ({_cause(error)}). {FALLBACK}")


def _chain(error: BaseException | None) -> Iterator[str]:
    """The messages of `error` and of the errors that caused it."""
    while error is not None:
        yield f"{type(error).__name__}: {' '.join(str(error).split())}"
        error = error.__cause__ or error.__context__


def _named(error: BaseException, names: Iterable[str]) -> str:
    """The leaf of `names` that a quoted path in the messages of `error` begins with; empty if there is none."""
    quoted = [text for line in _chain(error) for text in re.findall(r'"([^"]+/[^"]*)"', line)]
    return max((name for name in names if any(text.startswith(f"{name}/") for text in quoted)), key=len, default="")


def _file(error: BaseException) -> str:
    """The last file that tensorstore names in its message; empty if there is none."""
    return next((files[-1] for line in _chain(error) if (files := re.findall(r'file "([^"]+[^"/])"', line))), "")


def _files_of(path: Any, leaf: str) -> str:
    """The files that store a leaf's elements, as text; their folder where they are unknown or four and more."""
    files = files_of(path, leaf) if leaf else []
    return ", ".join(str(path / file) for file in files) if 0 < len(files) < 4 else str(path / storage.ARRAYS)


def _cause(error: BaseException) -> str:
    """The first cause of `error`, without tensorstore's specifications."""
    *_, last = _chain(error)
    return last.partition(" [tensorstore_spec")[0].rpartition('": ')[2][:300]


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
    try:
        recorded, sizes = json.loads((path / storage.SIZES).read_text()), storage.sizes(path)
        changed = [f"{name} has {sizes[name]} bytes and had {size}" if name in sizes else f"{name} is gone"
                   for name, size in recorded.items() if sizes.get(name) != size]
    except (OSError, ValueError, AttributeError):
        return ""
    return "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more files" if len(changed) > 3 else "")
