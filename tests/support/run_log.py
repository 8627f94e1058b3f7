"""The log that a run leaves."""

import json
from pathlib import Path
from typing import Any


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of train.jsonl in the folder of a run."""
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def losses(folder: Path, name: str = "loss") -> dict[int, float]:
    """By step; of a step that was taken twice the later one. name: of another number of the log."""
    return {row["step"]: row[name] for row in rows(folder) if name in row and "step" in row}
