"""Parameters alone as an Orbax checkpoint that `orbax.checkpoint.StandardCheckpointer` restores."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from zero_jax.arguments import check_path
from zero_jax.checkpoint.object_store import check_target
from zero_jax.distributed.agreement import check_same_numbers
from zero_jax.errors import UsageError
from zero_jax.sharding.auto_axes import in_any_context
from zero_jax.tree import cast_floating


@in_any_context
def export_orbax(path: Path | str, params: Any, *, dtype: Any = None) -> Path:
    """Writes nested dicts of arrays in logical shapes, also sharded, as a plain Orbax checkpoint; returns its folder.

    path: of a folder that does not exist, or is empty. dtype: of floating arrays; None: as they are. Every process
    must call this, and each writes what its own devices hold. Raises UsageError for a folder that is not empty.
    """
    check_path("export_orbax: path", path)
    check_target(path)
    check_same_numbers(f"{path}: Orbax saves nothing")
    folder = Path(path).expanduser().absolute()
    if folder.exists():
        if not folder.is_dir() or any(folder.iterdir()):
            raise UsageError(f"{folder} is not an empty folder: give another.")
        if jax.process_index() == 0:
            folder.rmdir()  # Orbax makes it
    if dtype is not None:
        params = jax.jit(lambda tree: cast_floating(tree, dtype))(params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, params)
    return folder
