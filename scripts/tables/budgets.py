"""What docs/guide/budgets.md shows: budgets of its step, written, checked, exceeded; and two versions of JAX.

    python scripts/tables/budgets.py [--other OTHER/bin/python]

The step is the page's Python block. --other: a Python with another JAX, whose audit is compared.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = '["train.py:train_step"]\ntarget = "h100:8"\n'
COMMITS = {
    "the momentum's layout is left out": ("to(0.9 * momentum + grads, *SHARD)", "to(0.9 * momentum + grads)"),
    "weights are cast after they are gathered": (
        'to(to(w.astype(jnp.bfloat16), "data"))', "to(w).astype(jnp.bfloat16)"),
}
"""What is done to the step, and the text that does it."""


def step_of_page() -> str:
    text = (ROOT / "docs/guide/budgets.md").read_text()
    return re.findall(r"```python norun\n(.*?)```", text, re.DOTALL)[0]


def zero_jax(folder: Path, *args: str, python: str = sys.executable) -> str:
    """What a command prints."""
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run([python, "-m", "zero_jax", *args], cwd=folder, text=True, stdout=subprocess.PIPE,
                          env=environment | {"PYTHONPATH": str(ROOT)})
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    return done.stdout


def show(folder: Path, *args: str) -> None:
    print(f"$ zero-jax {' '.join(args)}", zero_jax(folder, *args), sep="\n")


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", help="a Python with another JAX")
    given = parser.parse_args(args).other
    other = given and os.path.abspath(given)
    step = step_of_page()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "train.py").write_text(step)
        (folder / "budgets.toml").write_text(SECTION)
        show(folder, "budgets", "update")
        show(folder, "budgets", "check")
        for what, (old, new) in COMMITS.items():
            print(f"# {what}")
            (folder / "train.py").write_text(step.replace(old, new))
            show(folder, "budgets", "check")
        (folder / "train.py").write_text(step)
        for file, python in (("old.json", sys.executable), ("new.json", other)) if other else ():
            (folder / file).write_text(zero_jax(folder, "audit", "train.py:train_step", "--target", "h100:8", "--json",
                                                python=python))
        if other:
            show(folder, "diff", "old.json", "new.json")


if __name__ == "__main__":
    main()
