"""Kills and torn files, fewer than `scripts/reliability/disk_kills.py` has."""

import json
import subprocess
import sys

import pytest
from support.pages import ROOT
from support.scripts import script


@pytest.fixture
def disk_kills():
    with script("reliability/disk_kills") as module:
        yield module


def test_torn_files_are_never_taken_for_whole_ones(disk_kills, tmp_path):
    assert disk_kills.torn(tmp_path / "checked", 12, 1) == []
    # The control: without checksums, damaged bytes are taken for a generation.
    assert disk_kills.torn(tmp_path / "unchecked", 30, 1, verify=False)


@pytest.mark.slow
def test_kills_leave_a_committed_generation(disk_kills, tmp_path):
    faults, generations, _ = disk_kills.kills(tmp_path / "kills", 8, 0)
    assert faults == [] and generations > 3
    # The control: commits with other checksums than their data have, of which none is found again.
    assert disk_kills.kills(tmp_path / "unlike", 3, 0, unlike=True)[0]


@pytest.mark.slow
def test_train_steps_that_are_killed_go_on_as_if_not(disk_kills, tmp_path):
    assert disk_kills.train_kills(tmp_path / "states", 1, 5, steps=12) == []


def process_kills(folder, count, *options):
    """What the script says of kills of two processes, in a process without JAX, which it forks."""
    args = ["--kills", "0", "--torn", "0", "--train-kills", "0", "--process-kills", str(count), "--folder", folder]
    done = subprocess.run([sys.executable, ROOT / "scripts/reliability/disk_kills.py", *args, *options],
                          capture_output=True, text=True, timeout=900)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_go_on_as_if_not(tmp_path):
    said = process_kills(str(tmp_path), 2)
    assert said["right"] == 2 and said["faults"] == []
    # The control: without their files they do not go on from where they were.
    assert process_kills(str(tmp_path), 1, "--forget")["right"] == 0
