"""Reads that fail, as the system reports them, prove nothing: nothing intact is passed over, abandoned or removed.

Schedules of saves by several objects, restores with fallback, real damage, and faults of the calls that read files: a
library before libc (`support/fault.c`) fails those of some path once, some times or for ever, in Python and in
TensorStore. After each operation what must be there is restored without faults.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = '''
import errno, logging, os, shutil, sys
from pathlib import Path
import numpy as np
import zero_jax
from support.saved import BATCH, step_for, trained
from zero_jax import Checkpoints, files
from zero_jax.checkpoint import integrity
from zero_jax.checkpoint import orbax_store as storage

logging.disable(logging.CRITICAL)
files.WAITS = (0.001,) * 4
if sys.argv[4] == "every error is damage":  # the control
    integrity._of_reading = lambda errors: None
    integrity._find_files = lambda path: None

    def or_nothing(read, nothing):
        def call(path):
            try:
                return read(path)
            except zero_jax.CheckpointError:
                return nothing
        return call

    storage.listed = or_nothing(storage.listed, {})
    storage.contents = integrity.contents = or_nothing(storage.contents, None)
step, fault, wrong, met = step_for(0, 1), Path(os.environ["FAULT"]), [], 0
state = trained(step, 1)


def snapshot(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def schedule(seed, root):
    global met
    rng, keep = np.random.default_rng(seed), int(np.random.default_rng(seed).integers(1, 4))
    objects, intact, number = [Checkpoints(root, keep_last=keep)], [], 0
    for _ in range(8):
        what = rng.choice(["save", "save", "restore", "restore", "damage", "other"])
        at, part = rng.choice(intact) if intact else 0, rng.choice(["", "/state", "/state/d", "/manifest", "/order"])
        code = rng.choice([errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOENT, errno.EACCES, errno.ENOMEM])
        calls, times = rng.choice(["o", "r", "d", "s", "f", "ordsf"]), rng.choice([0, 1, 2, 5, -1])
        current, before = objects[-1], snapshot(root) if what == "restore" else None
        if what == "damage" and len(intact) > 1:
            file = rng.choice(sorted(path for path in (root / str(intact[-1]) / "state").rglob("*") if path.is_file()
                                     and "ocdbt.process" in str(path) and "manifest" not in path.name))
            os.truncate(file, Path(file).stat().st_size // 2)
            intact.pop()
            current.restore(step, BATCH, fallback=True)
            continue
        fault.write_text(f"{code} {times} {root}/{at}{part} {calls}")
        try:
            if what == "save":
                number += 1
                current.save(step, state, at=number, data=number, wait=True)
                intact.append(number)
            elif what == "other":
                objects.append(Checkpoints(root, keep_last=keep))
            elif intact:
                newest = intact[-1]
                found = current.restore(step, BATCH, fallback=True)
                if (found.step, found.data) != (newest, newest):
                    wrong.append(f"{seed}: {found.step} is restored and not {newest}")
        except zero_jax.CheckpointError as error:
            met += 1
            if isinstance(error, zero_jax.DamagedCheckpointError):
                wrong.append(f"{seed}: {error}")
        finally:
            fault.write_text("")
        if what == "save" and number not in intact and number in Checkpoints(root).steps():
            intact.append(number)  # it was complete before the error
        intact = intact[-keep:]  # the others need not stay
        if before is not None and snapshot(root) != before:
            wrong.append(f"{seed}: a restore writes")
        there = Checkpoints(root, read_only=True)
        for each in intact:
            try:
                if there.restore(step, BATCH, at=each).data != each:
                    wrong.append(f"{seed}: {each} is another")
            except zero_jax.CheckpointError as error:
                wrong.append(f"{seed}: {each} is lost by {what}: {error}")
        if intact and there.restore(step, BATCH, fallback=True).step != intact[-1]:
            wrong.append(f"{seed}: {intact[-1]} is not the latest after {what}")
    for each in objects:
        each.close()


for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    root = Path(sys.argv[3]) / str(seed)
    schedule(seed, root)
    shutil.rmtree(root, ignore_errors=True)
print("\\n".join(wrong[:20]))
print(len(wrong), "wrong", met, "errors")
'''


def outcome(tmp_path, first, last, mode):
    """(what was wrong, how many faults ended in an error)."""
    if not (compiler := shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("no C compiler")
    library, fault = tmp_path / "fault.so", tmp_path / "fault"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, ROOT / "tests/support/fault.c", "-ldl"],
                   check=True)
    fault.write_text("")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(first), str(last), str(tmp_path / "runs"), mode],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "LD_PRELOAD": str(library), "FAULT": str(fault)},
        capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    *wrong, last_line = done.stdout.splitlines()
    return [line for line in wrong if line], int(last_line.split()[2])


@pytest.mark.parametrize("first, last", [(0, 2), pytest.param(2, 100, marks=pytest.mark.slow)])
def test_nothing_intact_is_passed_over_or_removed(tmp_path, first, last):
    wrong, errors = outcome(tmp_path, first, last, "as it is")
    assert wrong == [] and errors >= (last - first) // 2


@pytest.mark.slow
def test_where_every_error_is_damage_it_is(tmp_path):
    """The control."""
    wrong, _ = outcome(tmp_path, 0, 12, "every error is damage")
    assert any("is restored and not" in line or "is lost" in line for line in wrong), wrong
