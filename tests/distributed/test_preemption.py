"""SIGTERM, Ctrl-C and SIGHUP save and end a run, a dead process ends the others, and a resumed run is the same."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.once import one_at_a_time
from support.oracle import slow

from zero_jax.distributed.preemption import Preemption

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "reliability"))
import process_test  # noqa: E402


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_noted_and_nothing_else(number):
    before = signal.getsignal(number)
    with Preemption() as preemption:
        assert not preemption.asked(1) and preemption.signal is None
        os.kill(os.getpid(), number)
        assert preemption.asked(2) and preemption.asked(3) and preemption.signal == number
    assert signal.getsignal(number) is before


def test_what_is_ignored_stays_so():
    """As of a background job, and of what nohup started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not preemption.asked(1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_in_a_callback_of_the_collector_is_not_lost(monkeypatch):
    """As JAX's, which Python calls while it collects."""
    lost = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: lost.append(unraisable.exc_type))

    def callback(phase, info):
        if phase == "start":
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))

    def collect():
        gc.callbacks.append(callback)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(callback)

    with Preemption() as preemption:
        collect()
        assert preemption.asked(1) and lost == []
    collect()  # the control: the KeyboardInterrupt ends nothing
    assert lost == [KeyboardInterrupt]


TWICE = """
import hashlib, os, sys, threading, time
from zero_jax.distributed.preemption import Preemption
with Preemption() as preemption:
    print("ready", flush=True)
    while not preemption.asked(1):
        time.sleep(0.01)
    print("noted", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in C, where no handler of Python runs
"""


def test_a_second_ctrl_c_ends_at_once():
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", TWICE], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "noted\n"
        time.sleep(0.2)
        assert process.poll() is None  # the control: the first one alone ends nothing
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130 and errors == ""


@pytest.fixture
def whole():
    """Runs of one and of two processes that nothing interrupted."""
    def run(count: int) -> process_test.Run:
        with one_at_a_time(f"{count} processes") as path:
            made = process_test.Run(path, count)
            if not path.with_suffix(".finished").exists():
                made.finish()
                path.with_suffix(".finished").touch()
        return made

    return run


@pytest.mark.grid
@pytest.mark.parametrize(("count", "moment", "to"), [
    slow(1, "compile", None), slow(1, "step", None), slow(1, "save", None),
    slow(2, "compile", None), slow(2, "step", (1,)), slow(2, "save", (0,))])
def test_a_preempted_run_goes_on_bit_for_bit(tmp_path, whole, count, moment, to):
    process_test.preempt(tmp_path / "run", count, moment, 0.0, whole(count), to=to)


@pytest.mark.grid
@pytest.mark.parametrize(("moment", "victim", "number"), [
    slow("step", 0, signal.SIGKILL), slow("step", 1, signal.SIGSTOP), slow("save", 0, signal.SIGSTOP)])
def test_when_one_dies_the_other_ends_and_both_go_on(tmp_path, whole, moment, victim, number):
    process_test.kill(tmp_path / "run", moment, victim, 0.0, whole(2), number)


@pytest.mark.grid
@pytest.mark.parametrize("processes", [slow(1), slow(4)])
def test_another_number_of_processes_goes_on(tmp_path, whole, processes):
    """The state is the same bit for bit (restoring checks the digests); sums are taken in another order after it."""
    two = whole(2)
    run = process_test.Run(tmp_path / "run", 2)
    shutil.copytree(two.out, run.out)
    shutil.rmtree(run.out / "checkpoints/120")
    assert run.saved() == [105]
    log = [line for line in (run.out / "train.jsonl").read_text().splitlines(keepends=True)
           if json.loads(line).get("step", 0) <= 105 and "summary" not in line]
    (run.out / "train.jsonl").write_text("".join(log))
    assert max(run.losses) == 105
    run.finish("--resume", processes=processes)
    assert "Resumed after step 105 of 120" in run.output() and run.saved() == [105, 120]
    found, expected = ([each.losses[step] for step in range(1, 121)] for each in (run, two))
    assert found[:105] == expected[:105]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not np.allclose(found[105:], expected[104:-1], rtol=1e-5), "losses of other steps differ"


@pytest.mark.slow
def test_another_run_is_not_taken_for_the_same(tmp_path, whole):
    """The control: runs of one and two processes differ in length, and a loss that is off by a bit is seen."""
    one, two = whole(1), whole(2)
    with pytest.raises(AssertionError, match="losses differ"):
        process_test.check_same(one, two)
    copy = process_test.Run(tmp_path / "copy", 2)
    copy.out.mkdir()
    (copy.out / "checkpoints").symlink_to(two.out / "checkpoints")
    log = (two.out / "train.jsonl").read_text()
    (copy.out / "train.jsonl").write_text(log)
    process_test.check_same(copy, two)
    changed = log.replace(f'"loss": {two.losses[7]!r}', f'"loss": {two.losses[7] + 1e-6!r}')
    (copy.out / "train.jsonl").write_text(changed)
    with pytest.raises(AssertionError, match="losses differ"):
        process_test.check_same(copy, two)
