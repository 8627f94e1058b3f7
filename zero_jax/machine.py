"""What this machine is to a run: accelerators or none, folders that can be written. No JAX."""

import glob
import os
from pathlib import Path

SIMULATED_DEVICES = 8
"""CPU devices to simulate where no accelerator is present."""


def check_folder(name: str, path: Path) -> None:
    """Raises ValueError unless `path`, told as the option `name`, is or can be made a folder to write to."""
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
