"""Where the command line puts the state: in device memory, host memory or files. Nothing here imports JAX."""

import tempfile
from pathlib import Path
from typing import Any

from zero_jax.cli.environment import simulates
from zero_jax.disk.commits import records_in
from zero_jax.disk.generations import check_folder
from zero_jax.errors import UsageError


def check_disk(config: Any) -> None:
    """Raises UsageError for a folder that no `offload` uses, or the reverse, and for what goes not with files.

    config: a `TrainConfig`.
    """
    if config.offload_disk is None:
        if config.offload == "disk":
            raise UsageError("offload=disk: name a folder on a local disk for the states: offload_disk=/mnt/nvme/run, "
                             "say.")
        return
    if config.offload not in ("disk", "auto"):
        raise UsageError(f"offload_disk={config.offload_disk} without offload=disk or auto: give both, or neither.")
    check_folder(config.offload_disk)
    if config.offload == "auto":
        return
    for name, why in (("local_checkpoints", "the files are such a copy"),
                      ("check_replicas", "what is in files cannot be compared on the devices")):
        if getattr(config, name):
            raise UsageError(f"{name} with offload={config.offload}: {why}: leave it out.")


def check_auto(config: Any) -> None:
    """Raises UsageError where the memory that offload=auto is to fit is not known, or is given without it.

    config: a `TrainConfig`.
    """
    if config.offload != "auto":
        if config.offload_gib is not None:
            raise UsageError(f"offload_gib={config.offload_gib} without offload=auto: give both, or leave it out.")
        return
    if config.offload_gib is not None and not 0 < config.offload_gib < 2**20:
        raise UsageError(f"offload_gib={config.offload_gib}: give the GiB of each device that a step may use.")
    if config.offload_gib is None and config.target is None and simulates():
        raise UsageError("offload=auto: simulated devices have no memory of their own to fit: give offload_gib, or "
                         "name the placement; zero-jax plan --target h100:8 --offload auto chooses for accelerators.")


def check_no_states(config: Any) -> None:
    """Raises UsageError where a new run would find the states of another one in its folder."""
    folder = config.offload_disk
    if folder is not None and not config.resume and not config.dry_run and records_in(folder):
        raise UsageError(f"offload_disk={folder} has the states of a run: --resume goes on from them; for a new "
                         "run remove the folder, or name another one.")


def check_fraction(config: Any) -> None:
    """Raises UsageError for a share that is none, or that has no states to be a share of.

    config: a `TrainConfig` or `PlanConfig`.
    """
    if not 0 < config.offload_fraction <= 1:
        raise UsageError(f"offload_fraction={config.offload_fraction}: give a share above 0 and at most 1.")
    if config.offload_fraction < 1 and config.offload != "optimizer":
        raise UsageError(f"offload_fraction={config.offload_fraction} with offload={config.offload}: it is the share "
                         "of what offload=optimizer puts into host memory: give both, or leave it out.")


def offload_argument(name: str, folder: Path | None, fraction: float = 1.0) -> Any:
    """What `make_zero_train_step(offload=...)` takes for an option; a plan has no folder, and opens no files."""
    if name == "no":
        return None
    if name != "disk" and fraction == 1:
        return name
    from zero_jax.sharding.memory.kinds import Offload

    if name == "optimizer":
        return Offload(fraction=fraction)
    return Offload(disk=folder or tempfile.gettempdir())
