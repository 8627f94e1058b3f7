"""Generations of states in files: what the checksum finds, reads that fail, files that are removed, old headers."""

import errno
import json
import os
import random
import shutil
import struct
import time
import zlib

import numpy as np
import pytest
from support.scripts import script

from zero_jax import CheckpointError, DamagedCheckpointError
from zero_jax.checkpoint.manifest import parse
from zero_jax.disk.generations import Commit, Generations, read_commits, sealed_commit
from zero_jax.disk.streaming import Streaming
from zero_jax.files import checksum

OWN = "process-00000-of-00001"


@pytest.fixture(scope="module")
def kills():
    with script("reliability/disk_kills") as module:
        yield module


@pytest.fixture
def three(kills, tmp_path):
    """(folder with generations 2 and 3, what had it open)."""
    streaming = Streaming(Generations(tmp_path / "states", kills.layout()))
    kills.resumed(streaming.files)
    for generation in (1, 2, 3):
        kills.commit_next(streaming, generation)
    yield tmp_path / "states", streaming
    streaming.close()


def resumed(kills, folder):
    """The generation that is found and whole, as a new process finds it."""
    generations = Generations(folder, kills.layout())
    try:
        return kills.resumed(generations)
    finally:
        generations.close()


def sums_of_sectors(data):
    """As the control: CRC-32 of the sums of the words of each sector of 512 bytes."""
    return zlib.crc32(np.frombuffer(data, np.uint64).reshape(-1, 64).sum(axis=1).data)


def test_exchanged_words_and_double_flips_are_found():
    rng, missed = np.random.default_rng(0), {"exchanged": [0, 0], "flips": [0, 0]}
    data = rng.integers(0, 2**64, 2**10, np.uint64)
    known = checksum(data.data), sums_of_sectors(data)
    for _ in range(3000):
        first, second = rng.choice(64, 2, replace=False) + 64 * rng.integers(len(data) // 64)  # words of one sector
        exchanged, flips = data.copy(), data.copy()
        exchanged[[first, second]] = data[[second, first]]
        flips[[first, second]] ^= np.uint64(1) << np.uint64(rng.integers(64))  # in one bit lane
        for what, changed in (("exchanged", exchanged), ("flips", flips)):
            missed[what][0] += checksum(changed.data) == known[0]
            missed[what][1] += sums_of_sectors(changed) == known[1]
    assert missed["exchanged"] == [0, 3000] and missed["flips"][0] == 0 and missed["flips"][1] > 1000


def test_exchanged_words_of_a_file_are_damage(kills, three):
    folder, streaming = three
    streaming.close()
    path = folder / OWN / "generation-1.bin"
    words = np.fromfile(path, np.uint64)
    words[[5, 60]] = 1, 2  # in a record all words are the same
    words.tofile(path)
    assert resumed(kills, folder) == 2


FAULTS = errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ENOMEM, errno.EINTR, errno.ETIMEDOUT, errno.EACCES
CALLS = "open", "preadv", "listdir"


def failing(monkeypatch, folder, *, error, call, skipped, times):
    """The calls of `os` after `skipped` that read in `folder` fail `times` times; returns how many have failed."""
    real, counts = getattr(os, call), [0, 0]

    def fails(*args, **options):
        path = os.readlink(f"/proc/self/fd/{args[0]}") if call == "preadv" else os.fspath(args[0])
        if str(folder) in path and not path.endswith(".lock"):
            counts[0] += 1
            if skipped < counts[0] <= skipped + times:
                counts[1] += 1
                raise OSError(error, os.strerror(error))
        return real(*args, **options)

    monkeypatch.setattr(os, call, fails)
    return counts


def test_a_read_that_fails_is_tried_again_and_is_no_damage(kills, three, monkeypatch):
    folder, streaming = three
    streaming.close()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    before = {path.name: path.read_bytes() for path in (folder / OWN).iterdir()}
    rng, seen, raised = random.Random(0), 0, 0
    for _ in range(100):
        error, call, times = rng.choice(FAULTS), rng.choice(CALLS), rng.choice([1, 2, 10**6])
        with monkeypatch.context() as patch:
            counts = failing(patch, folder, error=error, call=call, times=times, skipped=rng.randrange(3))
            try:
                assert resumed(kills, folder) == 3
                assert counts[1] <= 2
            except CheckpointError as refused:
                assert not isinstance(refused, DamagedCheckpointError) and "cannot be read" in str(refused), refused
                assert error == errno.EACCES or counts[1] > 2
                raised += 1
            seen += counts[1] > 0
        assert {path.name: path.read_bytes() for path in (folder / OWN).iterdir()} == before
    assert resumed(kills, folder) == 3 and seen > 50 and raised > 20
    # The control: what is damaged is passed over, and nothing else.
    (folder / OWN / "commit-1.json").write_bytes(b"{}")
    assert resumed(kills, folder) == 2


@pytest.mark.parametrize("what", ["generation-0.bin", "generation-1.bin", "commit-1.json", "", "replaced"])
def test_files_that_are_removed_under_a_run_are_noticed(kills, three, what):
    folder, streaming = three
    kills.commit_next(streaming, 4)
    kills.commit_next(streaming, 5)  # the control: nothing is removed
    path = folder / OWN / ("generation-1.bin" if what == "replaced" else what)
    if what == "replaced":
        shutil.copy(path, folder / "copy")
        (folder / "copy").rename(path)
    elif what:
        path.unlink()
    else:
        shutil.rmtree(folder / OWN)
    with pytest.raises(CheckpointError, match="removed or replaced while this run uses it"):
        kills.commit_next(streaming, 6)


def test_a_lock_that_is_removed_under_a_run_is_written_again(kills, three, caplog):
    folder, streaming = three
    lock = folder / f"{OWN}.lock"
    token = json.loads(lock.read_text())["token"]
    lock.unlink()
    kills.commit_next(streaming, 4)
    assert json.loads(lock.read_text())["token"] == token and "it is written again" in caplog.text


OLD = {"format": "zero_jax states on disk", "version": 1, "generation": 1, "session": 1, "step": 1, "checksums": [],
       "fingerprint": "", "leaves": {}, "note": None}


def test_headers_of_earlier_versions_are_refused_in_one_line(tmp_path):
    refused = r"was written by another version of zero_jax, as 'zero_jax [^\n]*: use the version that wrote it\.$"
    (tmp_path / "commit-0.json").write_text(json.dumps(
        {**OLD, "checksum": f"{zlib.crc32(json.dumps(OLD, sort_keys=True).encode()):08x}"}))
    with pytest.raises(CheckpointError, match=refused):
        read_commits(tmp_path)
    with pytest.raises(CheckpointError, match=refused) as caught:
        parse(json.dumps({"sha256": "", "manifest": {"format": "zero_jax checkpoint", "version": 1}}), "manifest")
    assert not isinstance(caught.value, DamagedCheckpointError)
    # The control: what this version writes; and with one character changed it is damaged, not old.
    commit = Commit(1, 1, 1, (), "", {}, {"at": 1})
    text = json.dumps(sealed_commit(commit))
    (tmp_path / "commit-0.json").write_text(text)
    assert read_commits(tmp_path) == ([commit, None], [])
    (tmp_path / "commit-0.json").write_text(text.replace("disk 2", "disk 3"))
    commits, damaged = read_commits(tmp_path)
    assert commits == [None, None] and "its checksum is" in damaged[0]


def test_old_local_copies_are_passed_over_in_one_line(tmp_path, caplog):
    from zero_jax.checkpoint.local_copies import _read_header

    text = json.dumps({"format": "zero_jax local copy 1"}).encode()
    (tmp_path / "0.copy").write_bytes(struct.pack("<QI", len(text), zlib.crc32(text)) + text)
    assert _read_header(tmp_path / "0.copy") is None
    (line,) = caplog.messages
    assert "is no zero_jax local copy" in line and line.endswith("The local copy is passed over.")
