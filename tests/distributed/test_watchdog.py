"""What hangs is told, with its stacks, and what does not hang is not."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zero_jax.distributed.watchdog import HUNG, Watchdog

ROOT = Path(__file__).parents[2]


def test_only_what_takes_too_long_is_told_and_once(tmp_path):
    now = [0.0]
    with open(tmp_path / "told", "w+") as file:
        dog = Watchdog(10, process=3, file=file, clock=lambda: now[0])
        assert not dog.look(), "nothing has begun"
        for number in range(5):
            dog.beat(f"step {number}")
            now[0] += 10
            assert not dog.look()
        now[0] += 0.1
        assert dog.look() and not dog.look()
        dog.beat("validation")
        dog.rest()
        now[0] += 1000
        assert not dog.look()
        file.seek(0)
        text = file.read()
    assert text.count("Process 3: step 4 takes more than 10 seconds") == 1 and "test_only_what_takes" in text


def test_the_thread_sees_the_stacks_of_others(tmp_path):
    go = threading.Event()

    def stuck_here():
        go.wait(60)

    other = threading.Thread(target=stuck_here)
    other.start()
    with open(tmp_path / "told", "w+") as file, Watchdog(0.05, file=file) as dog:
        dog.beat("step 7")
        text, end = "", time.monotonic() + 60
        while not ("stuck_here" in text and "test_the_thread" in text) and time.monotonic() < end:
            text = (tmp_path / "told").read_text()
    go.set()
    other.join()
    assert "Process 0: step 7 takes more than 0.05 seconds" in text and "stuck_here" in text


@pytest.mark.parametrize(("end", "status"), [(True, HUNG), (False, 0)])
def test_it_ends_the_process_where_it_is_asked_to(end, status):
    program = ("import sys, time\nfrom zero_jax.distributed.watchdog import Watchdog\n"
               f"with Watchdog(0.1, end={end}) as dog:\n    dog.beat('step 1')\n    time.sleep(2)\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == status and "step 1 takes more than 0.1 seconds" in done.stderr


def test_without_a_limit_there_is_no_thread():
    before = threading.active_count()
    with Watchdog(None) as dog:
        dog.beat("step 1")
        assert threading.active_count() == before and not dog.look()
