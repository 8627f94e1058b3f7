"""Where checkpoints lie: the only module that knows orbax, and through it local and remote file systems.

A checkpoint is the folder `<root>/<step>` with `state`, the arrays, and `manifest`, JSON. orbax writes both into a
temporary folder and renames that, or, where a file system cannot rename, writes a file that says so at the end.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath
from orbax.checkpoint.experimental import v1 as ocp

ARRAYS, MANIFEST, SIZES = "state", "manifest", "sizes.json"
_COMMITTED, _UNFINISHED = "commit_success.txt", ".orbax-checkpoint-tmp"


def folder(path: Any) -> epath.Path:
    """`path`, a string or a path, local or remote (gs://...), as orbax takes it."""
    path = epath.Path(path)
    return path if "://" in str(path) else path.expanduser().absolute()


def committed(root: epath.Path) -> list[int]:
    """The steps that were saved to the end, in order."""
    if not root.exists():
        return []
    return sorted(int(each.name) for each in root.iterdir()
                  if re.fullmatch(r"0|[1-9]\d{0,17}", each.name) and (each / _COMMITTED).exists())


def unfinished(root: epath.Path) -> list[epath.Path]:
    """Folders of saves and removals that did not come to their end, a save under way among them."""
    if not root.exists():
        return []
    return [each for each in root.iterdir() if re.fullmatch(rf"\d+{_UNFINISHED}.*", each.name) or (
        each.name.isdigit() and manifest_path(each).exists() and not (each / _COMMITTED).exists())]


def remove(path: epath.Path) -> None:
    """Deletes a checkpoint; at whatever moment that is interrupted, what is left is no checkpoint any more."""
    (path / _COMMITTED).unlink(missing_ok=True)
    if (path / ARRAYS).exists():
        (path / ARRAYS).rmtree()
    path.rmtree()


def write(path: epath.Path, arrays: Mapping[str, jax.Array], manifest: Any) -> Any:
    """Begins to save; `.result()` of what is returned waits for the end. The arrays may be donated meanwhile."""
    with _context():
        return ocp.save_checkpointables_async(path, {ARRAYS: dict(arrays), MANIFEST: manifest})


def manifest_path(path: epath.Path) -> epath.Path:
    """The file that holds a checkpoint's manifest."""
    return path / MANIFEST / "data.json"


def read(path: epath.Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays that `abstract` names, each with its sharding; raises whatever orbax does where one is not there."""
    with _context():
        return ocp.load_checkpointables(path, {ARRAYS: dict(abstract)})[ARRAYS]


def sizes(path: epath.Path) -> dict[str, int]:
    """Bytes of each file of a checkpoint, by its path in there; `SIZES` itself is left out."""
    found, waiting = {}, [path]
    while waiting:
        for each in waiting.pop().iterdir():
            if each.is_dir():
                waiting.append(each)
            elif each.name != SIZES:
                found[str(each.relative_to(path))] = each.stat().length
    return dict(sorted(found.items()))


def _context() -> ocp.Context:
    context = ocp.Context()
    # What cannot be written is then told at once and not after a timeout of threads that wait for a folder.
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = True  # `check_fit` has compared the trees
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=MANIFEST)
    context.checkpointables.registry = registry
    return context
