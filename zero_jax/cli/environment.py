"""The environment of a run: folders, earlier checkpoints, accelerators, the terminal. Nothing here imports JAX."""

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from zero_jax.checkpoint.object_store import is_remote, numbers_in
from zero_jax.errors import UsageError


def check_folder(name: str, path: Path) -> None:
    """Raises ValueError unless the folder `path`, the value of the option `name`, can be written or created."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{name}={path} cannot be written: {existing} is not a writable folder.")


@contextlib.contextmanager
def in_folder_of_run(path: Path, done: str = "written") -> Iterator[None]:
    """Around what writes `path`; raises ValueError where that fails."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be {done} ({error.strerror}): choose another folder with out.") from error


def simulates() -> bool:
    """Whether to simulate devices: JAX_PLATFORMS is cpu, or is unset and no accelerator has a device file."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms == "cpu"
    files = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")
    return not any(glob.glob(pattern) for pattern in files)


def checkpoint_folder(path: Path) -> Path | None:
    """The folder of checkpoints that `path` is, or that the run in the folder `path` has; None where there is none."""
    path = path.expanduser()
    return next((folder for folder in (path, path / "checkpoints") if numbers_in(folder)), None)


def checkpoints_of(name: str) -> str:
    """Where the checkpoints of `name` are, a folder of them or of a run that has some; else `name` as it is."""
    folder = None if is_remote(name) else checkpoint_folder(Path(name))
    return name if folder is None else str(folder)


def shown_text(text: str) -> str:
    r"""`text` without control characters, which a terminal would interpret and an untrained model generates.

    >>> shown_text("a\tb\n") == "a\tb\n", len(shown_text("\x1b[2J"))
    (True, 4)
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
