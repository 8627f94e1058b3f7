"""Installs a wheel into a fresh environment, and trains with it in a folder that has no source.

    python scripts/reliability/installed_wheel.py build/dist

`make dist` builds the sdist and the wheel into build/dist, and then runs this.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import sys, flax.linen as nn, jax, zero_jax
assert zero_jax.__file__.startswith(sys.argv[1]), f"{zero_jax.__file__} is not what was installed"
zero_jax.simulate_devices(8)
step = zero_jax.make_zero_train_step(nn.Sequential([nn.Embed(256, 64), nn.Dense(256)]), stage=3)
tokens = jax.random.randint(jax.random.key(1), (16, 32), 0, 256)
batch = {"inputs": tokens, "targets": tokens}
state, first = step(step.init(jax.random.key(0), batch), batch)
state, second = step(state, batch)
assert second["loss"] < first["loss"], (first, second)
print(f"zero_jax {zero_jax.__version__}: loss {first['loss']:.4f}, then {second['loss']:.4f}")
"""
"""What the wheel must do: two steps at stage 3, of which the second has the smaller loss."""


def wrong_tag(wheel: str, tags: list[str]) -> str:
    """What is wrong where a commit with these tags builds `wheel`: a tag v1.2.3 is of version 1.2.3; "": nothing."""
    versions = [tag[1:] for tag in tags if tag[:1] == "v" and tag[1:2].isdigit()]
    version = wheel.split("-")[1]
    return "" if not versions or version in versions else (
        f"{wheel} is of version {version}, and its commit has the tag v{versions[0]}: set version in pyproject.toml, "
        "or move the tag.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Installs a wheel and trains with it.")
    parser.add_argument("folder", type=Path)
    wheels = sorted(parser.parse_args().folder.resolve().glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"There are {len(wheels)} wheels, and one is needed: run make dist.")
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], capture_output=True, text=True, check=False).stdout
    if wrong := wrong_tag(wheels[0].name, tags.split()):
        sys.exit(wrong)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS")}
        python = folder / "venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check",
                        f"{wheels[0]}[train]"], check=True)
        (folder / "empty").mkdir()
        subprocess.run([python, "-W", "error", "-c", PROGRAM, str(folder / "venv")], cwd=folder / "empty",
                       env=environment, check=True)
        subprocess.run([folder / "venv/bin/zero-jax", "--version"], cwd=folder / "empty", env=environment, check=True)


if __name__ == "__main__":
    main()
