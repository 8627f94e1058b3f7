"""Damage on disk: a flipped bit, a file cut short, gone or partly zeroed never loads as if nothing had been."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import numpy as np
import pytest
from support.covering import weekly
from support.oracle import slow
from support.saved import BATCH, WORDS, difference, dump, make_step, step_for, trained

import zero_jax
from zero_jax.errors import UnwrittenCheckpointError
from zero_jax.tree import named_leaves

ROOT = Path(__file__).parents[2]
# orbax leaves the other reads to themselves when one fails; what they say when they are collected is no fault of ours.
pytestmark = [pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
              pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder with one checkpoint that is damaged and mended, the step, its state as bytes).

    The shards are of some KiB: smaller ones lie in files with checksums of their own.
    """
    model = nn.Sequential([nn.Embed(WORDS, 128), nn.Dense(256), nn.gelu, nn.Dense(WORDS)])
    step, root = make_step(3, 8, model), tmp_path_factory.mktemp("damaged")
    state = trained(step)
    zero_jax.Checkpoints(root).save(step, state, at=1, wait=True)
    return root, step, dump(step, state)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def flip(path: Path, rng: np.random.Generator) -> None:
    raw = bytearray(path.read_bytes())
    raw[rng.integers(len(raw))] ^= 1 << rng.integers(8)
    path.write_bytes(raw)


def truncate(path: Path, rng: np.random.Generator) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: rng.integers(len(raw))])


def delete(path: Path, rng: np.random.Generator) -> None:
    path.unlink()


def zero(path: Path, rng: np.random.Generator) -> None:
    raw = bytearray(path.read_bytes())
    start = rng.integers(len(raw))
    size = int(rng.integers(1, 4097))
    raw[start : start + size] = bytes(len(raw[start : start + size]))
    path.write_bytes(raw)


INDEX = {"_CHECKPOINT_METADATA", "_METADATA", "_sharding", "process_0"}


def is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (ValueError, FileNotFoundError):
        return False
    return True


KINDS = {"flip": flip, "truncate": truncate, "delete": delete, "zero": zero}


def damaged_loads(saved, kind, seed) -> str:
    """Restores after a damage of `kind`: "refused", or "same" where every leaf is bitwise as it was saved."""
    root, step, before = saved
    rng = np.random.default_rng((seed, *kind.encode()))
    # Half of the damage goes to the largest files, which hold the arrays.
    known = [path for path in files(root) if path.stat().st_size]
    largest = sorted(known, key=lambda path: path.stat().st_size)[-2:]
    path = (largest if seed % 2 else known)[rng.integers(2 if seed % 2 else len(known))]
    original = path.read_bytes()
    try:
        KINDS[kind](path, rng)
        try:
            state = zero_jax.Checkpoints(root).restore(step, BATCH).state
        except zero_jax.CheckpointError as error:
            assert str(root) in str(error)
            # Without commit_success.txt there is no checkpoint; an index that is JSON is not told from a good one.
            if path.name != "commit_success.txt" and not (path.name in INDEX and is_json(path)):
                assert str(path.relative_to(root / "1")) in str(error)
            return "refused"
        assert difference(before, dump(step, state)) == [], path
        return "same"
    finally:
        path.write_bytes(original)


@weekly("kind", KINDS, default=2)
def test_no_damage_loads_in_silence(saved, kind):
    found = [damaged_loads(saved, kind, seed) for seed in range(5)]
    assert found.count("refused") >= 2, found
    root, step, before = saved
    assert difference(before, dump(step, zero_jax.Checkpoints(root).restore(step, BATCH).state)) == []


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("kind, part", [("flip", part) for part in range(4)] + [
    (kind, part) for kind in ("truncate", "delete", "zero") for part in range(2)])
def test_much_damage_does_not_either(saved, kind, part):
    found = [damaged_loads(saved, kind, 10 + 50 * part + seed) for seed in range(50)]
    assert found.count("refused") > 10, found


def test_without_the_digests_it_would(saved, monkeypatch):
    """The control: what the same flips do where nothing is verified."""
    from zero_jax.checkpoint import checkpoint

    monkeypatch.setattr(checkpoint, "verify", lambda *args: None)
    root, step, before = saved
    data = max(files(root), key=lambda path: path.stat().st_size)
    original, wrong = data.read_bytes(), 0
    try:
        for place in np.linspace(3000, len(original) - 3000, 12).astype(int):
            raw = bytearray(original)
            raw[place] ^= 16
            data.write_bytes(raw)
            try:
                state = zero_jax.Checkpoints(root).restore(step, BATCH).state
            except zero_jax.CheckpointError:
                continue
            wrong += difference(before, dump(step, state)) != []
    finally:
        data.write_bytes(original)
    assert wrong


def test_the_message_names_leaf_and_file(saved, tmp_path):
    root, step, _ = saved
    shutil.copytree(root, tmp_path / "copy")
    data = max(files(tmp_path / "copy/1/state/d") or files(tmp_path / "copy"), key=lambda path: path.stat().st_size)
    leaf = r"leaf (step|rng|params|opt_state)\S* "
    data.write_bytes(data.read_bytes()[:-7])
    with pytest.raises(zero_jax.DamagedCheckpointError, match=leaf) as found:
        zero_jax.Checkpoints(tmp_path / "copy").restore(step, BATCH)
    assert f"{data.name} has {data.stat().st_size} bytes and had {data.stat().st_size + 7}" in str(found.value)
    data.unlink()
    with pytest.raises(zero_jax.DamagedCheckpointError, match=f"{data.name} is gone"):
        zero_jax.Checkpoints(tmp_path / "copy").restore(step, BATCH)
    shutil.rmtree(tmp_path / "copy/1/state")
    with pytest.raises(zero_jax.DamagedCheckpointError, match="1 is damaged"):
        zero_jax.Checkpoints(tmp_path / "copy").restore(step, BATCH)


PROGRAM = """
import asyncio, ctypes, gc, resource, sys
import jax
import zero_jax
zero_jax.simulate_devices(2)
from support.saved import *
step = step_for(3, 2)
state = trained(step)
with zero_jax.Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(step, state, at=1)
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
elif sys.argv[2] == "read-only":
    ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # root obeys modes, too
try:
    checkpoints.save(step, state, at=2, wait=sys.argv[3] == "wait")
    print("returned", flush=True)
    checkpoints.close()
except zero_jax.CheckpointError as error:
    print(error)
    for lost in error.__cause__, RuntimeError("of another task"):  # as when two of Orbax's tasks fail at once
        loop = asyncio.new_event_loop()
        future = loop.create_future()
        loop.close()
        future.set_exception(lost)
        del future, lost
        gc.collect()
    sys.exit(2)
"""


@pytest.mark.slow
@pytest.mark.grid
@weekly("trouble, wait", [
    ("full", "wait"), ("read-only", "wait"), slow("full", "async"), slow("none", "async")])
def test_a_disk_that_is_full_or_read_only(tmp_path, trouble, wait):
    root = tmp_path / "checkpoints"
    root.mkdir()
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    program = PROGRAM
    if trouble == "read-only":
        program = program.replace("try:", "import os\nos.chmod(sys.argv[1], 0o555)\ntry:")
    done = subprocess.run([sys.executable, "-W", "error", "-c", program, str(root), trouble, wait], cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=240)
    root.chmod(0o755)
    if trouble == "none":
        assert (done.returncode, done.stderr) == (0, "") and zero_jax.Checkpoints(root).steps() == [1, 2]
        return
    assert done.returncode == 2, done.stderr
    assert "Checkpoint 2 could not be written to" in done.stdout
    assert "Checkpoints before it are unchanged: 1." in done.stdout
    assert done.stdout.startswith("returned") == (wait == "async") or trouble == "read-only"
    # TensorStore's threads print this, now and then, of a second write that fails after the loop has ended.
    errors = re.sub(r"Traceback .*\n(?:  .*\n)+RuntimeError: Event loop is closed\n", "", done.stderr)
    assert "Traceback" not in errors
    assert [line for line in errors.splitlines() if "future: <" in line] == [
        "future: <Future finished exception=RuntimeError('of another task')>"], "whoever's it is, it is told of"
    step = step_for(3, 8)
    found = zero_jax.Checkpoints(root).restore(step, BATCH)
    assert found.step == 1 and sorted(path.name for path in root.iterdir()) == ["1"]


def test_an_error_of_the_writing_is_raised_by_the_next_call(tmp_path, monkeypatch):
    from zero_jax.checkpoint import orbax_store as storage

    class Failing:
        def result(self):
            raise OSError(28, "No space left on device")

    step = make_step(0, 1)
    state = trained(step)
    checkpoints = zero_jax.Checkpoints(tmp_path)
    checkpoints.save(step, state, at=1, wait=True)
    monkeypatch.setattr(storage, "write", lambda *args: Failing())
    for call in (checkpoints.wait, checkpoints.close, lambda: checkpoints.save(step, state, at=3),
                 lambda: checkpoints.restore(step, BATCH)):
        checkpoints.save(step, state, at=2)
        message = r"2 could not be written to .*No space left.*unchanged: 1\."
        with pytest.raises(UnwrittenCheckpointError, match=message):
            call()
    assert checkpoints.steps() == [1]
    assert dict(named_leaves(checkpoints.restore(step, BATCH).state))["step"] == 3
