"""Processes that are killed while they save or train; `scripts/reliability/crash_test.py` does the same more often."""

import pytest
from support.scripts import script

pytestmark = pytest.mark.slow


@pytest.fixture
def crash_test():
    with script("reliability/crash_test") as module:
        yield module


def test_kills_while_saving(crash_test, tmp_path):
    unfinished, faults = crash_test.kills_while_saving(tmp_path, 8, 0, 67)
    assert faults == [] and unfinished


@pytest.mark.grid
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_that_is_killed_three_times(crash_test, tmp_path, seed):
    assert crash_test.run_of_kills(tmp_path, seed, 67) == []


def test_another_state_is_found(crash_test, tmp_path, monkeypatch):
    """The control: against the states of a run on other batches, every checkpoint is another one."""
    references = crash_test.references
    monkeypatch.setattr(crash_test, "references", lambda *args: references(*args)[::-1])
    _, faults = crash_test.kills_while_saving(tmp_path, 6, 3, 67)  # some before the first checkpoint
    assert any("is another on" in fault for fault in faults)
