"""Reports of audits in a folder, by program: the same program is not compiled twice by the same versions."""

import hashlib
import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_jax.auditing.audit import audit
from zero_jax.auditing.program import plain_step
from zero_jax.files import write_text
from zero_jax.versions import installed_version

PACKAGES = ("zero-jax", "jax", "jaxlib", "jax-cuda13-plugin", "libtpu")
"""Those that decide what a program is compiled to, and what is read of it."""


def cached_report(folder: Path, jitted: Any, shapes: Sequence[Any], *, target: str | None, params: str | None
                  ) -> dict[str, Any]:
    """`audit(...).to_json()`, read from `folder` where the same lowered program was audited before.

    Lines of source are those of the first audit: lines that move change no program. Without a target XLA's options of
    a plain `jax.jit` are not known, so that such a step is compiled each time.
    """
    jitted, shapes = plain_step(jitted, tuple(shapes))
    key = _key(jitted, shapes, target, params)
    path = folder / f"{key}.json"
    if key is not None and path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    report = audit(jitted, *shapes, target=target, params=params).to_json()
    if key is None:
        return report
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(report))
    return report


def _key(jitted: Any, shapes: Sequence[Any], target: str | None, params: str | None) -> str | None:
    """A hash of all that decides a report; None where that is not known, or `audit` will say what is the matter."""
    is_own = hasattr(jitted, "abstract_state")
    if not hasattr(jitted, "lower") or not (target or is_own):
        return None
    try:
        lowered = jitted.lower(*shapes)
    except (TypeError, ValueError):
        return None
    parts = [lowered.as_text(), lowered.in_tree, inspect.signature(jitted), target, params,
             os.environ.get("XLA_FLAGS", ""), *map(installed_version, PACKAGES)]
    if is_own:  # it is compiled for its own mesh
        parts += [jitted.functions.mesh.devices.flat[0].device_kind, sorted(jitted.programs.compiler_options.items())]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
