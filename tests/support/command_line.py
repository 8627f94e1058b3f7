"""The command line of `python -m zero_jax`, in this process or in one of its own."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from zero_jax.cli import main

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a command left: its exit status and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run(*args: str) -> Finished:
    """`zero_jax.cli.main.main(args)` in this process, in an empty folder, where no run has left its checkpoints.

    JAX is there already, with 8 simulated devices.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(out),
          contextlib.redirect_stderr(err), mock.patch.dict(os.environ, {"COLUMNS": "200"})):
        status = main.main(args)
    return Finished(status, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def run_process(*args: str, cwd: Path | str | None = None) -> Finished:
    """`python -m zero_jax` with `args` in a process of its own, where warnings are errors."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-W", "error", "-m", "zero_jax", *args], cwd=cwd or folder, env=env,
                              capture_output=True, text=True, timeout=300)
    return Finished(done.returncode, done.stdout, done.stderr)


def refused(*args: str) -> str:
    """What a command says that is refused: one line on standard error, with status 2, and nothing else."""
    done = run(*args)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    return message(done)


def refused_without_jax(*commands: list[str], cwd: Path | str | None = None) -> str:
    """What `commands` say, each of which is refused, in a process that has not imported JAX by then."""
    program = ("import json, sys\nfrom zero_jax.cli import main as cli\n"
               "assert {cli.main(args) for args in json.loads(sys.argv[1])} == {2} and 'jax' not in sys.modules\n")
    done = subprocess.run([sys.executable, "-c", program, json.dumps(commands)], cwd=cwd, timeout=120, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stderr


def message(done: Finished) -> str:
    """What was said on standard error, on one line."""
    return " ".join(done.stderr.split())
