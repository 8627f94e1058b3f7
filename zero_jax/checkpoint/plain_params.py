"""Parameters alone as an Orbax checkpoint that `orbax.checkpoint.StandardCheckpointer` restores."""

import glob
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from zero_jax.arguments import check_path
from zero_jax.checkpoint.object_store import check_target
from zero_jax.checkpoint.orbax_files import log_no_raised, quiet
from zero_jax.distributed.agreement import all_or_none, check_same_numbers, is_first
from zero_jax.errors import UnwrittenCheckpointError, UsageError
from zero_jax.sharding.auto_axes import in_any_context
from zero_jax.tree import cast_floating


@in_any_context
def export_orbax(path: Path | str, params: Any, *, dtype: Any = None) -> Path:
    """Writes nested dicts of arrays in logical shapes, also sharded, as a plain Orbax checkpoint; returns its folder.

    path: of a folder that does not exist, or is empty. dtype: of floating arrays; None: as they are. Every process
    must call this, and each writes what its own devices hold. Raises UsageError for a folder that is not empty,
    and UnwrittenCheckpointError where it cannot be written.
    """
    check_path("export_orbax: path", path)
    check_target(path)
    check_same_numbers(f"{path}: Orbax saves nothing")
    folder = Path(path).expanduser().absolute()

    def check_empty() -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is not an empty folder: give another.")

    all_or_none(check_empty)
    all_or_none(lambda: folder.rmdir() if is_first() and folder.exists() else None)  # Orbax makes it
    if dtype is not None:
        params = jax.jit(lambda tree: cast_floating(tree, dtype))(params)
    # In the background a folder that cannot be made is reported after 5 minutes of waiting for it.
    log_no_raised()
    options = ocp.AsyncOptions(create_directories_asynchronously=False)
    try:
        with quiet(), ocp.StandardCheckpointer(async_options=options) as checkpointer:
            checkpointer.save(folder, params)
    except Exception as error:
        for left in folder.parent.glob(f"{glob.escape(folder.name)}.orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)
        raise UnwrittenCheckpointError(f"{folder} cannot be written ({' '.join(str(error).split())[:500]}): free "
                                       "space, allow writing, or give another place.") from error
    return folder
