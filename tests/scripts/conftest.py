"""The scripts' folders on the path, as each has its own when it is run."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS / name) for name in ("paper", "reliability", "tables", "training")]
