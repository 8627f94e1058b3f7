"""Which files of a checkpoint have the elements of an array, for messages."""

import urllib.parse

import tensorstore
from etils import epath

from zero_jax.checkpoint.orbax_store import ARRAYS


def files_of(path: epath.Path, name: str) -> list[str]:
    """The files below `path` with the elements of the array `name`; empty where their index cannot be read."""
    files, prefix = set(), f"{name}/".encode()
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
                    # A small value is stored in the node itself. A location is kind:folder:file:offset:size.
                    _, *file, _, _ = entry.get("indirect_value", location).split(":")
                    files.add(f"{ARRAYS}/{urllib.parse.unquote(''.join(file))}")
    except Exception:  # a damaged index raises anything at all
        return []
    return sorted(files)
