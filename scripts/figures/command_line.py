"""Draws docs/images/help.svg and docs/images/run.svg: the short help of train, and a run, at 100 columns.

Run it as `python scripts/figures/command_line.py`.
"""

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COMMANDS = {"help": "train --help", "run": "train --steps 40 --eval-every 20 --samples 1"}


def draw(name: str, command: str) -> None:
    """Runs `zero-jax COMMAND` in an empty folder, and draws what it prints; no font is fetched by who looks at it."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-m", "zero_jax", *command.split()], cwd=folder, check=True,
                              capture_output=True, text=True,
                              env={**os.environ, "COLUMNS": "100", "PYTHONPATH": str(IMAGES.parents[1])})
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text(done.stdout.replace("python -m zero_jax", "zero-jax")))
    svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=f"zero-jax {command}"), flags=re.DOTALL)
    path = IMAGES / f"{name}.svg"
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    print(f"{path.name}: {path.stat().st_size:,} bytes, {max(map(len, done.stdout.splitlines()))} columns")


if __name__ == "__main__":
    for each in COMMANDS.items():
        draw(*each)
