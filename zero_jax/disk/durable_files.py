"""Files and folders that are on the disk, not only in the page cache, when a function here returns.

Orbax syncs the arrays alone. Of a file that is not synced a power loss may leave the name without the bytes, and of a
folder that is not synced not even the name (Pillai et al., "All file systems are not created equal", OSDI 2014). What
is older is removed only after what replaces it is synced.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def sync(path: Any) -> None:
    """Syncs a file or, of a folder, its entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Any) -> None:
    """Syncs every file below `folder`, then every folder below it, and the folder's own entries last."""
    folders = []
    for root, _, files in os.walk(folder):
        folders.append(root)
        for name in files:
            sync(os.path.join(root, name))
    for root in reversed(folders):
        sync(root)


def make_folder(folder: Any) -> None:
    """Creates a folder and its parents, and syncs the entries of those that are new."""
    folder = Path(folder)
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def rename(path: Any, target: Any) -> None:
    """Renames a file or folder within its folder, which is synced."""
    os.rename(path, target)
    sync(Path(target).parent)


def replace_json(path: Any, value: Any) -> None:
    """Writes `value` as JSON to a local file: whenever this is interrupted, the file is the old or the new one."""
    temporary = f"{path}.tmp"
    with new_file(temporary) as file:
        json.dump(value, file)
    rename(temporary, path)


@contextlib.contextmanager
def new_file(path: Any) -> Iterator[Any]:
    """A text file to write, synced at the end; its folder is not."""
    with open(path, "w", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
