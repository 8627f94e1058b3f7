"""Where checkpoints lie: the only module that knows orbax, and through it local and remote file systems.

A checkpoint is the folder `<root>/<step>` with `state`, the arrays, and `manifest`, JSON. orbax writes both into a
temporary folder and renames that, or, where a file system cannot rename, writes a file that says so at the end.
"""

import contextlib
import gc
import json
import logging
import re
import sys
import time
import traceback
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import tensorstore
from etils import epath
from orbax.checkpoint.experimental import v1 as ocp

ARRAYS, MANIFEST, SIZES = "state", "manifest", "sizes.json"
_COMMITTED, _UNFINISHED, _INDEX = "commit_success.txt", ".orbax-checkpoint-tmp", "_METADATA"


def folder(path: Any) -> epath.Path:
    """`path`, a string or a path, local or remote (gs://...), as orbax takes it."""
    path = epath.Path(path)
    return path if "://" in str(path) else path.expanduser().absolute()


def committed(root: epath.Path) -> list[int]:
    """The steps that were saved to the end, in order."""
    if not root.is_dir():
        return []
    return sorted(int(each.name) for each in root.iterdir()
                  if re.fullmatch(r"0|[1-9]\d{0,17}", each.name) and (each / _COMMITTED).exists())


def unfinished(root: epath.Path) -> list[epath.Path]:
    """Folders of saves and removals that did not come to their end, a save under way among them."""
    if not root.is_dir():
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
    logging.getLogger("absl").addFilter(_is_not_raised_too)
    with _context():
        return ocp.save_checkpointables_async(path, {ARRAYS: dict(arrays), MANIFEST: manifest})


def manifest_path(path: epath.Path) -> epath.Path:
    """The file that holds a checkpoint's manifest."""
    return path / MANIFEST / "data.json"


def read(path: epath.Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays that `abstract` names, each with its sharding; raises whatever orbax does where one is not there."""
    with _context():
        found = ocp.load_checkpointables(path, {ARRAYS: dict(abstract)})[ARRAYS]
    for name, leaf in abstract.items():  # of what its metadata lack, orbax gives back what it was asked for
        array = found.get(name)
        if not isinstance(array, jax.Array) or (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(f'"{name}/" is not there as {leaf.dtype} {leaf.shape} by file "{path / ARRAYS / _INDEX}"')
    return {name: found[name] for name in abstract}


def broken_index(path: epath.Path) -> epath.Path | None:
    """The file that tells of a checkpoint's arrays, and is no JSON; None where all are, or are gone."""
    written = path / ARRAYS / "array_metadatas"  # by each process
    told = [path / "_CHECKPOINT_METADATA", path / ARRAYS / _INDEX, path / ARRAYS / "_sharding"]
    for file in told + (sorted(written.iterdir()) if written.is_dir() else []):
        try:
            json.loads(file.read_bytes())
        except ValueError:
            return file
        except OSError:
            continue
    return None


def files_of(path: epath.Path, name: str) -> list[str]:
    """The files below `path` that hold the elements of the array `name`; empty where their index cannot be read."""
    found, prefix = set(), f"{name}/".encode()
    try:
        arrays = str(path / ARRAYS) + "/"
        base = tensorstore.KvStore.open(arrays if "://" in arrays else {"driver": "file", "path": arrays}).result()
        root = tensorstore.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
        nodes = [(root, b"")]
        while nodes:
            location, before = nodes.pop()
            for entry in tensorstore.ocdbt.dump(base, location).result()["entries"]:
                key = before + entry.get("subtree_common_prefix", entry["key"])
                if "location" in entry and (key.startswith(prefix) or prefix.startswith(key)):
                    nodes.append((entry["location"], key))
                elif key.startswith(prefix) and not key.endswith(b"/zarr.json"):
                    # A small value lies in the node itself. A place is kind:folder:file:offset:size.
                    _, *file, _, _ = entry.get("indirect_value", location).split(":")
                    found.add(f"{ARRAYS}/{urllib.parse.unquote(''.join(file))}")
    except Exception:  # what is damaged says anything at all
        return []
    return sorted(found)


def _is_not_raised_too(record: logging.LogRecord) -> bool:
    """False for the tracebacks that orbax's threads log of what `.result()` raises."""
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps what orbax's other reads say to themselves from the terminal when one of them fails and is raised."""
    before = sys.unraisablehook
    log = logging.getLogger("asyncio")

    def hook(told: Any) -> None:
        if not re.search("Event loop is closed|was never awaited", str(told.exc_value)):
            before(told)

    def keep(record: logging.LogRecord) -> bool:
        return "never retrieved" not in record.getMessage()

    sys.unraisablehook = hook
    log.addFilter(keep)
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None:  # they live as long as the frames of the error do
            traceback.clear_frames(found.__traceback__)
            found = found.__cause__ or found.__context__
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*was never awaited", RuntimeWarning)
            time.sleep(0.1)  # reads end in threads of their own
            gc.collect()
        raise
    finally:
        log.removeFilter(keep)
        sys.unraisablehook = before


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
