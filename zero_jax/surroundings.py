"""What is there before a run: folders, earlier checkpoints, accelerators. Nothing here imports JAX."""

import glob
import os
from pathlib import Path


def check_folder(name: str, path: Path) -> None:
    """Raises ValueError unless the folder `path`, the option `name`, can be written or made."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{name}={path} cannot be written: {existing} is not a folder that allows it.")


def simulates() -> bool:
    """Whether to simulate devices: JAX_PLATFORMS says cpu, or says nothing and there is no accelerator's file."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms == "cpu"
    files = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")
    return not any(glob.glob(pattern) for pattern in files)


def check_no_checkpoints(folder: Path) -> None:
    """Raises ValueError if `folder` has checkpoints, which a new run must not mix with its own."""
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    if steps:
        raise ValueError(
            f"{folder} has checkpoints of an earlier run, up to step {max(steps)}: --resume goes on from there; for a "
            "new run give another out, or remove that folder.")
