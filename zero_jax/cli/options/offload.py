"""Where the command line puts the state: in device memory, host memory or files. Nothing here imports JAX."""

import tempfile
from pathlib import Path
from typing import Any

from zero_jax.disk.generations import check_folder, records_in
from zero_jax.errors import UsageError


def check_placement(config: Any) -> None:
    """Raises UsageError for a folder of states that cannot be one, and for sizes out of range.

    config: a `TrainConfig`.
    """
    if config.offload_disk is not None:
        check_folder(config.offload_disk)
    if config.offload_gib is not None and not 0 < config.offload_gib < 2**20:
        raise UsageError(f"offload_gib={config.offload_gib}: give the GiB of each device that a step may use.")


def check_no_states(config: Any) -> None:
    """Raises UsageError where a new run would find the states of another one in its folder."""
    folder = config.offload_disk
    if folder is not None and not config.resume and not config.dry_run and records_in(folder):
        raise UsageError(f"offload_disk={folder} has the states of a run: --resume goes on from them; for a new "
                         "run remove the folder, or name another one.")


def offload_argument(name: str, folder: Path | None, fraction: float = 1.0) -> Any:
    """What `make_zero_train_step(offload=...)` takes for an option; a plan has no folder, and opens no files."""
    if name == "no":
        return None
    if name != "disk" and fraction == 1:
        return name
    from zero_jax.offload.offload import Offload

    if name == "optimizer":
        return Offload(fraction=fraction)
    return Offload(disk=folder or tempfile.gettempdir())
