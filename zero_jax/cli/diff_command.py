"""`zero-jax diff old.json new.json`: what changed between two audits, and why."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from zero_jax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class DiffConfig:
    """Compare two reports of `zero-jax audit --json`: bytes, memory, FLOPs, time, and findings that came or went."""

    old: Path
    """The report before."""
    new: Path
    """The report after."""
    tolerance: float = 0.01
    """Share by which a number may change without a line."""


def diff_command(config: DiffConfig) -> int:
    """Prints a line for each change, and returns 0 where there is none, else 1."""
    from zero_jax.auditing.compare import changes

    lines = changes(_report(config.old), _report(config.new), tolerance=config.tolerance)
    print(*(lines or ["nothing changed"]), sep="\n")
    return 1 if lines else 0


def _report(path: Path) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no report that can be read ({error}): give a file of zero-jax audit --json."
                         ) from error
    if not isinstance(data, dict) or "findings" not in data:
        raise UsageError(f"{path} is no report of an audit: give a file of zero-jax audit --json.")
    return data
