"""The only module that uses Orbax, and through it local and remote file systems.

A checkpoint is the folder `<root>/<step>` with `state`, the arrays, and `manifest`, JSON. Orbax writes both into
`<root>/<step>.zero_jax-tmp`, a name that no other program gives; a thread syncs that and renames it. An object store
cannot rename: there Orbax writes a commit file at the end, and until then an object under that name says whose the
unfinished folder is.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath
from orbax.checkpoint.experimental import v1 as ocp

from zero_jax.checkpoint.history import PLACE, Place, parse_place
from zero_jax.checkpoint.manifest import FORMAT
from zero_jax.checkpoint.object_store import check_scheme, contents, is_remote, listed
from zero_jax.checkpoint.orbax_files import INDEX, ArraysAndLeaves, Leaves, WithLeaves, log_no_raised, quiet
from zero_jax.disk.durable_files import new_file, rename, sync_tree
from zero_jax.errors import CheckpointError, UsageError

ARRAYS, MANIFEST, SIZES = "state", "manifest", "sizes.json"
MIN_LAYER_BYTES = 2**20
"""Bytes of a device's part of a layer that is written by itself, at least."""

_COMMITTED, _TEMPORARY, _REMOVED = "commit_success.txt", ".zero_jax-tmp", ".zero_jax-tmp-removed"


def folder(path: Any) -> epath.Path:
    """`path`, a string or a path, local or remote (gs://...), as Orbax takes it."""
    check_scheme(path)
    path = epath.Path(path)
    return path if "://" in str(path) else path.expanduser().absolute()


def committed(root: epath.Path) -> list[int]:
    """The steps whose checkpoints are complete, ascending."""
    return [number for number in present(root) if is_committed(root / str(number))]


def is_committed(path: epath.Path) -> bool:
    """Whether the file that says that a checkpoint is complete exists."""
    return _COMMITTED in listed(path)


def present(root: epath.Path) -> list[int]:
    """The steps whose checkpoints are complete or have lost the file that says so, ascending."""
    return sorted(int(name) for name, size in listed(root).items()
                  if size is None and re.fullmatch(r"0|[1-9]\d{0,17}", name)
                  and is_ours(root / name) and (not is_remote(root) or _was_complete(root / name)))


def _was_complete(path: epath.Path) -> bool:
    """Whether a folder in an object store was a complete checkpoint: its commit file may be lost since."""
    return not {_COMMITTED, SIZES}.isdisjoint(listed(path))


def is_ours(path: epath.Path) -> bool:
    """Whether a folder has a manifest of ours or, where that is damaged, another file that only our saves write.

    Nothing else is listed or removed: folders may have numbers for names because another program saves there.
    """
    if parse_place(_json(path / PLACE)) is not None:  # the smallest file first: folders are listed often
        return True
    if isinstance(recorded := _json(path / SIZES), dict) and f"{MANIFEST}/{manifest_path(path).name}" in recorded:
        return True
    manifest = _json(manifest_path(path))
    body = manifest.get("manifest") if isinstance(manifest, dict) else None
    return isinstance(body, dict) and str(body.get("format")).startswith(FORMAT.rpartition(" ")[0])


def is_free(path: epath.Path) -> bool:
    """Whether there is nothing at `path`, or an empty folder."""
    return listed(path.parent).get(path.name) is None and not listed(path)


def unfinished(root: epath.Path) -> list[epath.Path]:
    """Folders of unfinished saves and removals of ours, of a save in progress, too."""
    names = listed(root)
    in_place = [name for name in names if is_remote(root) and name.isdigit() and not _was_complete(root / name)
                and (f"{name}{_TEMPORARY}" in names or is_ours(root / name))]
    staged = [name for name in names if re.fullmatch(rf"\d+{_TEMPORARY}.*", name)]
    # Last what says whose those are: a removal may be interrupted, too.
    return [root / name for name in (*in_place, *staged)]


def remove(path: epath.Path) -> None:
    """Deletes a checkpoint: whenever it is interrupted, what is left is no checkpoint."""
    if not is_remote(path):
        removed = f"{path}{_REMOVED}"
        rename(path, removed)
        shutil.rmtree(removed)
        return
    for file in (path / SIZES, commit_path(path)):
        file.unlink(missing_ok=True)
    if ARRAYS in listed(path):
        (path / ARRAYS).rmtree()
    path.rmtree()


def write(path: epath.Path, arrays: Mapping[str, jax.Array], manifest: dict[str, Any], place: Any,
          leaves: Leaves | None = None) -> Any:
    """Starts to save; `.result()` of the return value waits for the end. The arrays may be donated meanwhile.

    place: the contents of the checkpoint's file `PLACE`, which the manifest gets, too. A checkpoint that is at `path`
    is replaced. leaves: of arrays that are not in memory, which are written when this returns; the manifest is then
    what writing them returns.
    """
    body = manifest | {"order": place}
    saved: Any = dict(arrays) if leaves is None else WithLeaves(
        arrays, leaves.names, lambda folder: body.update(leaves.write(folder)))
    log_no_raised()
    staged = path if is_remote(path) else _temporary(path)
    if is_remote(path) and jax.process_index() == 0:
        (_temporary(path) / "saving").write_text(json.dumps(place))
    with _context(leaves=leaves is not None), quiet():
        response = ocp.save_checkpointables_async(staged, {ARRAYS: saved, MANIFEST: body})
    if jax.process_index() != 0:
        return response
    return _Save(response, lambda: _publish(staged, path, place, body))


def _temporary(path: epath.Path) -> epath.Path:
    """What stands beside a checkpoint while it is saved."""
    return path.parent / f"{path.name}{_TEMPORARY}"


class _Save:
    """A save in progress: once Orbax has written, on every process, `publish` is called in a thread."""

    def __init__(self, response: Any, publish: Callable[[], None]):
        self._response, self._publish, self._error = response, publish, None
        self._thread = threading.Thread(target=self._run, name="zero_jax checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._response.result()
            self._publish()
        except Exception as error:
            self._error = error

    def result(self) -> None:
        """Waits until the checkpoint is complete; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _publish(staged: epath.Path, path: epath.Path, place: Any, manifest: dict[str, Any]) -> None:
    """Makes the folder `staged` the checkpoint at `path`, when all of its files are on the disk."""
    # Orbax gets the manifest before the leaves are written, and writes it afterwards.
    if _json(manifest_path(staged)) != json.loads(json.dumps(manifest)):
        raise CheckpointError(f"{path} is not saved: Orbax wrote its manifest before its arrays. Install a version of "
                              "orbax-checkpoint that pyproject.toml allows.")
    if is_remote(path):
        (path / PLACE).write_text(json.dumps(place))
        (path / SIZES).write_text(json.dumps(sizes(path)))
        _temporary(path).rmtree()
        return
    for name, value in ((PLACE, place), (SIZES, sizes(staged))):
        with new_file(staged / name) as file:
            json.dump(value, file)
    sync_tree(staged)
    replaced = f"{path}{_REMOVED}"
    if os.path.isdir(path) and os.listdir(path):
        os.rename(path, replaced)
    rename(staged, path)
    if os.path.isdir(replaced):
        shutil.rmtree(replaced)


def place_of(path: epath.Path) -> Place | None:
    """The place of a checkpoint in the history of its folder; None where both copies of it are damaged."""
    if place := parse_place(_json(path / PLACE)):
        return place
    manifest = _json(manifest_path(path))
    return parse_place(manifest.get("order") if isinstance(manifest, dict) else None)


def _json(path: epath.Path) -> Any:
    """The contents of a file of JSON; None where there is none, or it is no JSON."""
    text = contents(path)  # whose CheckpointError is a ValueError, too
    try:
        return json.loads(text or b"")
    except (ValueError, RecursionError):
        return None


def commit_path(path: epath.Path) -> epath.Path:
    """The file whose existence says that a checkpoint is complete."""
    return path / _COMMITTED


def manifest_path(path: epath.Path) -> epath.Path:
    """The file of a checkpoint's manifest."""
    return path / MANIFEST / "data.json"


def read(path: epath.Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays named in `abstract`, each with its sharding; raises whatever Orbax does where one is missing."""
    with _context():
        arrays = ocp.load_checkpointables(path, {ARRAYS: dict(abstract)})[ARRAYS]
    for name, leaf in abstract.items():  # for what its metadata lack, Orbax returns the abstract array
        array = arrays.get(name)
        if not isinstance(array, jax.Array) or (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise UsageError(f'"{name}/" is not there as {leaf.dtype} {leaf.shape} by file "{path / ARRAYS / INDEX}"')
    return {name: arrays[name] for name in abstract}


def broken_index(path: epath.Path) -> epath.Path | None:
    """A metadata file of a checkpoint's arrays that is not JSON; None where all are, or are missing."""
    per_process = path / ARRAYS / "array_metadatas"
    files = [path / "_CHECKPOINT_METADATA", path / ARRAYS / INDEX, path / ARRAYS / "_sharding"]
    for file in files + [per_process / name for name in sorted(listed(per_process))]:
        text = contents(file)
        try:
            json.loads("null" if text is None else text)
        except ValueError:
            return file
    return None


def sizes(path: epath.Path) -> dict[str, int]:
    """Bytes of each file of a checkpoint, by its relative path, without those that are not part of it."""
    bytes_by_file, waiting = {}, [""]
    while waiting:
        folder = waiting.pop()
        for name, size in listed(path / folder).items():
            if size is None:
                waiting.append(f"{folder}{name}/")
            elif name not in (SIZES, PLACE, f"{PLACE}.tmp"):
                bytes_by_file[f"{folder}{name}"] = size
    return dict(sorted(bytes_by_file.items()))


def _context(*, leaves: bool = False) -> ocp.Context:
    context = ocp.Context()
    # What cannot be written then raises at once, not after a timeout of threads that wait for a folder.
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = True  # `check_fit` has compared the trees
    registry = ocp.handlers.local_registry(include_global_registry=not leaves)  # which has a handler of arrays
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=MANIFEST)
    if leaves:
        registry.add(ArraysAndLeaves, checkpointable_name=ARRAYS)
    context.checkpointables.registry = registry
    return context
