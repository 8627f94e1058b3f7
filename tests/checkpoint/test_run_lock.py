"""One run at a time saves to a folder; a lock of a dead run is taken over; threads that save wait for each other."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.saved import BATCH, step_for, trained

import zero_jax
from zero_jax import Checkpoints
from zero_jax.checkpoint import orbax_store
from zero_jax.disk import run_lock
from zero_jax.disk.run_lock import RunLock
from zero_jax.sharding import auto_axes

ROOT = Path(__file__).parents[2]
OWNER = """
import sys, time
from zero_jax.disk.run_lock import RunLock
RunLock(sys.argv[1]).acquire()
print("acquired", flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path):
    """(folder, process that has its lock)."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "run")], env=env, stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "acquired\n"
        yield tmp_path / "run", process
        process.kill()


def test_a_second_run_is_refused_and_a_dead_one_taken_over(owner):
    folder, process = owner
    step = step_for(0, 1)
    state = trained(step)
    text = rf"run\.lock says that process {process.pid} on \S+ since \d+-\d+-\d+ \d+:\d+:\d+ saves to this folder"
    with pytest.raises(zero_jax.CheckpointError, match=text):
        Checkpoints(folder).lock()
    with pytest.raises(zero_jax.CheckpointError, match=text):
        Checkpoints(folder).save(step, state)
    assert not folder.exists()
    process.send_signal(signal.SIGSTOP)  # it may go on
    with pytest.raises(zero_jax.CheckpointError, match=text):
        Checkpoints(folder).lock()
    process.kill()
    process.wait()
    with Checkpoints(folder) as checkpoints:
        assert f"is taken over from process {process.pid}" in checkpoints.lock() and checkpoints.lock() == ""
        checkpoints.save(step, state, at=1, wait=True)
        assert json.loads((folder.parent / "run.lock").read_text())["pid"] == os.getpid()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["run"]


FORKS = """
import atexit, os, sys
parent = os.getpid()
atexit.register(lambda: os.getpid() == parent or os._exit(3))  # called last: a child of JAX's threads would not end
from zero_jax import Checkpoints, CheckpointError
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.lock()
    if not (child := os.fork()):
        try:
            Checkpoints(sys.argv[1]).lock()
        except CheckpointError as error:
            assert f"says that process {parent}" in str(error)
            sys.exit()  # through the `with`, and what is called at the end of a process
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("LEFT", status, os.path.exists(sys.argv[1] + ".lock"))
print("LEFT", 0, os.path.exists(sys.argv[1] + ".lock"))
"""


def test_a_forked_child_gives_no_lock_back(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path / "run")], timeout=240, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    # The control: the parent's own end does.
    assert [line for line in done.stdout.splitlines() if line.startswith("LEFT")] == ["LEFT 3 True", "LEFT 0 False"], (
        done.stdout, done.stderr)


def test_a_reader_beside_a_run_changes_nothing(owner, caplog):
    folder, process = owner
    step = step_for(0, 1)
    state = trained(step)
    other = folder.with_name("other")
    with Checkpoints(other) as checkpoints:
        for number in (1, 2):
            checkpoints.save(step, state, at=number, data=number)
    other.rename(folder)
    assert Checkpoints(folder).restore(step, BATCH, at=1).data == 1
    assert "cannot be noted" in caplog.text and Checkpoints(folder).latest() == 2
    # The control: when the run is dead, the same call rolls back.
    process.kill()
    process.wait()
    assert Checkpoints(folder).restore(step, BATCH, at=1).data == 1 and Checkpoints(folder).latest() == 1
    assert f"is taken over from process {process.pid}" in caplog.text


def write_lock(path, **values):
    owner = {"host": "elsewhere", "pid": 7, "time": "then", "machine": "another", "started": "1", "token": "x"}
    Path(path).write_text(json.dumps(owner | values))


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"machine": [], "pid": "x"}'])
def test_a_lock_of_another_host_is_watched(tmp_path, monkeypatch, text):
    monkeypatch.setattr(run_lock, "STALE", 0.5)
    path = tmp_path / "run.lock"
    write_lock(path) if text is None else path.write_text(text)
    ended = threading.Event()

    def beat():
        while not ended.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(zero_jax.CheckpointError, match="saves to this folder"):
        RunLock(tmp_path / "run").acquire()
    ended.set()
    thread.join()
    lock = RunLock(tmp_path / "run")
    assert "is taken over from" in lock.acquire()
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_the_same_id_is_told_from_the_one_that_died(tmp_path):
    """Of this very process, but with another start."""
    path = tmp_path / "run.lock"
    write_lock(path, pid=os.getpid(), machine=run_lock._machine(), started="1")
    assert "is taken over" in RunLock(tmp_path / "run").acquire()
    write_lock(path, pid=os.getppid(), machine=run_lock._machine(), started=run_lock._started(os.getppid()))
    run_lock._held.pop(str(path)).end()
    with pytest.raises(zero_jax.CheckpointError, match=f"process {os.getppid()} "):
        RunLock(tmp_path / "run").acquire()


def test_the_owner_keeps_it_alive_and_notices_its_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.05)
    lock, path = RunLock(tmp_path / "run"), tmp_path / "run.lock"
    lock.acquire()
    os.utime(path, (1, 1))
    deadline = time.monotonic() + 20
    while path.stat().st_mtime < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.stat().st_mtime > 2
    lock.acquire()
    write_lock(path)
    with pytest.raises(zero_jax.CheckpointError, match="was taken over by process 7 on elsewhere"):
        lock.acquire()
    lock.release()
    assert json.loads(path.read_text())["pid"] == 7  # it is not ours to remove


def test_those_of_one_process_share_it(tmp_path):
    locks = [RunLock(tmp_path / "run") for _ in range(3)]
    for lock in (*locks, locks[0]):
        lock.acquire()
    for lock in locks:
        assert (tmp_path / "run.lock").exists()
        lock.release()
    assert not (tmp_path / "run.lock").exists()


def test_a_link_to_the_folder_has_its_lock(owner):
    folder, process = owner
    folder.mkdir()
    (folder.parent / "latest").symlink_to(folder)
    with pytest.raises(zero_jax.CheckpointError, match=f"process {process.pid}"):
        Checkpoints(folder.parent / "latest").lock()


def test_only_one_of_many_processes_gets_it(tmp_path):
    write_lock(tmp_path / "run.lock", machine=run_lock._machine(), started="1", pid=2**30)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen([sys.executable, "-c", OWNER.replace("600", "3"), str(tmp_path / "run")], env=env,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [output for output, _ in outputs].count("acquired\n") == 1, outputs
    assert sum("saves to this folder" in errors for _, errors in outputs) == 3, outputs


@pytest.mark.parametrize("serialised", [True, False])
def test_two_threads_that_save(tmp_path, monkeypatch, serialised):
    """Without the locks (the control) both are in the middle of a save at once."""
    step = step_for(0, 1)
    state = trained(step)
    checkpoints = Checkpoints(tmp_path / "run", keep_last=None)
    if not serialised:
        monkeypatch.setattr(checkpoints, "_threads", threading.Semaphore(99))
        monkeypatch.setattr(auto_axes, "_ONE_AT_A_TIME", threading.Semaphore(99))  # of all that takes a state
    inside, most, errors, write = [0], [0], [], orbax_store.write

    def slow_write(*args):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.3)
        inside[0] -= 1
        return write(*args) if serialised else type("Done", (), {"result": lambda self: None})()

    monkeypatch.setattr(orbax_store, "write", slow_write)

    def save(first):
        try:
            for number in range(first, 6, 2):
                checkpoints.save(step, state, at=number, data=number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checkpoints.close()
    assert errors == [] and most[0] == (1 if serialised else 2)
    if serialised:
        assert checkpoints.steps() == [*range(6)]
        assert Checkpoints(tmp_path / "run", read_only=True).restore(step, BATCH, at=3).data == 3
