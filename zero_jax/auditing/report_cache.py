"""Reports of audits in a folder, by program: the same program is not compiled twice by the same versions."""

import hashlib
import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_jax.auditing.audit import audit
from zero_jax.versions import installed_version

PACKAGES = ("zero-jax", "jax", "jaxlib", "jax-cuda13-plugin", "libtpu")
"""Those that decide what a program is compiled to, and what is read of it."""


def cached_report(folder: Path, jitted: Any, shapes: Sequence[Any], *, target: str | None, params: str | None
                  ) -> dict[str, Any]:
    """`audit(...).to_json()`, read from `folder` where the same lowered program was audited before.

    Lines of source are those of the first audit: lines that move change no program. Without a target XLA's options of
    a plain `jax.jit` are not known, so that such a step is compiled each time.
    """
    options = target or _own_options(jitted)
    if options is None or not hasattr(jitted, "lower"):
        return audit(jitted, *shapes, target=target, params=params).to_json()
    try:
        lowered = jitted.lower(*shapes)
    except (TypeError, ValueError):  # `audit` says what is the matter
        return audit(jitted, *shapes, target=target, params=params).to_json()
    parts = [lowered.as_text(), str(lowered.in_tree), str(inspect.signature(jitted)), options, str(params),
             os.environ.get("XLA_FLAGS", ""), *map(installed_version, PACKAGES)]
    path = folder / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    report = audit(jitted, *shapes, target=target, params=params).to_json()
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(report), encoding="utf-8")
    unfinished.replace(path)
    return report


def _own_options(jitted: Any) -> str | None:
    """The devices and XLA's options of a step of this library; None for another function."""
    if not hasattr(jitted, "abstract_state"):
        return None
    return f"{jitted.functions.mesh.devices.flat[0].device_kind} {sorted(jitted.programs.compiler_options.items())}"
