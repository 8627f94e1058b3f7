"""Batches that are read ahead: the same ones, no further ahead than asked, and a step that waits is told."""

import threading
import time

import numpy as np
import pytest

from zero_jax.data.batches import Batches
from zero_jax.data.prefetch import Prefetched, StarvationMonitor

LENGTH = 8


class Counted(Batches):
    """Says which batches were read, how fast, and by which thread."""

    def __init__(self, seconds=0.0, **options):
        super().__init__(np.arange(LENGTH * 24 + 1), batch_size=4, length=LENGTH, **options)
        self.reads, self.threads, self.seconds = [], set(), seconds

    def __getitem__(self, position):
        time.sleep(self.seconds)
        self.reads.append(position)
        self.threads.add(threading.current_thread().name)
        return super().__getitem__(position)


def inputs(batches, number):
    return [next(batches)["inputs"].tolist() for _ in range(number)]


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_the_batches_are_the_same_and_no_further_ahead_than_asked(depth):
    expected, counted = inputs(Counted(), 9), Counted()
    with Prefetched(counted, depth=depth) as batches:
        assert inputs(batches, 7) == expected[:7] and counted.position == 7
    assert counted.reads == [*range(len(counted.reads))] and 7 <= len(counted.reads) <= 7 + depth
    assert ("MainThread" in counted.threads) == (depth == 0)
    assert inputs(Counted(seed=1), 9) != expected  # the control


def test_the_state_is_of_what_was_returned_and_resumes():
    counted, expected = Counted(), inputs(Counted(), 9)
    with Prefetched(counted, depth=3) as batches:
        inputs(batches, 4)
        state = counted.state()
    again = Counted()
    again.restore(state)
    with Prefetched(again, depth=3) as batches:
        assert inputs(batches, 5) == expected[4:]
        again.seek(1)  # what was read ahead is dropped
        assert inputs(batches, 3) == expected[1:4]


def test_the_wait_is_measured():
    with Prefetched(Counted(seconds=0.03), depth=2) as batches:
        next(batches)
        assert batches.waited > 0.02
        time.sleep(0.3)  # a step that takes longer than its batch
        next(batches)
        assert batches.waited < 0.02
    with Prefetched(Counted(seconds=0.03), depth=0) as batches:
        next(batches), time.sleep(0.1), next(batches)
        assert batches.waited > 0.02  # the control: nothing is read ahead


def test_an_error_is_raised_by_the_next_of_its_batch():
    tokens = np.zeros(LENGTH * 8 + 1, int)
    tokens[LENGTH * 5] = 999
    order = Batches(tokens, batch_size=1, length=LENGTH)
    bad = next(k for k in range(8) if 999 in order[k]["inputs"] or 999 in order[k]["targets"])
    with Prefetched(Batches(tokens, batch_size=1, length=LENGTH, vocab_size=9), depth=4) as batches:
        inputs(batches, bad)
        with pytest.raises(ValueError, match="hold ids 0..999"):
            next(batches)
    with pytest.raises(ValueError, match="depth=-1: give at least 0"):
        Prefetched(order, depth=-1)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_batch_that_is_asked_for_again_is_the_one_that_failed(depth):
    class Failing(Counted):
        def __getitem__(self, position):
            if position == 2 and 2 not in self.reads:
                self.reads.append(position)
                raise OSError("the file system is away")
            return super().__getitem__(position)

    expected, counted = inputs(Counted(), 6), Failing()
    with Prefetched(counted, depth=depth) as batches:
        found = inputs(batches, 2)
        with pytest.raises(OSError, match="is away"):
            next(batches)
        assert counted.position == 2 and found + inputs(batches, 4) == expected


def test_a_starving_step_is_told_once_a_window():
    monitor = StarvationMonitor(window=10)
    told = [monitor.observe(waited=0.2, seconds=1.0) for _ in range(20)]
    assert [k for k, message in enumerate(told) if message] == [9, 19]
    assert told[9].startswith("20 % of the last 10 steps went into waiting for data")
    assert not any(monitor.observe(waited=0.05, seconds=1.0) for _ in range(20))
