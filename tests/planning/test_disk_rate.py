"""The rate of a live disk: measured once, with what moves states, and used where it is another than was predicted."""

import dataclasses
import errno
import math
import os
import threading
import time
import types

import jax
import pytest
from support.transfers import CHIP

import zero_jax
from zero_jax.disk.record_file import AlignedFile
from zero_jax.offload.disk_leaves import DiskTraffic
from zero_jax.planning import disk_rate, placement
from zero_jax.planning.disk_rate import DiskRate, agreed_disk, measured_disk, used_disk_rate
from zero_jax.planning.placement import choose_for
from zero_jax.planning.transfers import ENGINE_BANDWIDTH, disk_transfers, predicted_disk_rate
from zero_jax.xla.chip import built_in
from zero_jax.xla.targets import target_of

BATCH = {name: jax.ShapeDtypeStruct((16, 32), "int32") for name in ("inputs", "targets")}


def slowed(monkeypatch, seconds):
    """Each record takes so long, one after another, as on one disk."""
    move, disk = AlignedFile._whole, threading.Lock()

    def slow(self, *arguments):
        with disk:
            time.sleep(seconds)
            move(self, *arguments)

    monkeypatch.setattr(AlignedFile, "_whole", slow)
    monkeypatch.setattr(disk_rate, "ROUND_SECONDS", 0.3)


def test_a_disk_is_measured_once_and_nothing_is_left_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_rate, "ROUND_BYTES", 2**27)
    rate = agreed_disk(tmp_path / "not" / "there")
    assert 1e6 < rate.bytes_per_second < 1e12 and not os.listdir(tmp_path)
    monkeypatch.setattr(disk_rate, "_Measured", None)
    assert agreed_disk(tmp_path) == rate, "the same disk is not measured again"
    measured_disk.cache_clear()
    with pytest.raises(TypeError):
        agreed_disk(tmp_path)


def test_a_slow_disk_is_found_to_be_slow_in_a_short_time(tmp_path, monkeypatch):
    slowed(monkeypatch, 0.05)
    records, move = [], AlignedFile._whole
    monkeypatch.setattr(AlignedFile, "_whole", lambda *arguments: records.append(move(*arguments)))
    rate = agreed_disk(tmp_path).bytes_per_second
    assert 0.05 < rate * 0.05 / disk_rate.RECORD <= 1, "a record every 50 ms is 84 MB/s, on a machine that does no more"
    assert len(records) < disk_rate.RECORDS, "a fast disk writes that many before it is timed"


def test_a_disk_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    def failed(number):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", lambda *_: failed(errno.ENOSPC))
    with pytest.raises(zero_jax.UsageError, match="(?s)cannot be measured: 134,217,728 bytes of .*No space left.*free"):
        agreed_disk(tmp_path)
    assert not os.listdir(tmp_path)
    monkeypatch.setattr(AlignedFile, "_direct", lambda *_: failed(errno.EROFS))
    with pytest.raises(zero_jax.UsageError, match="Read-only file system.*name a folder on a disk that can be written"):
        agreed_disk(tmp_path)


def test_what_was_measured_counts_where_it_parts_from_the_prediction_by_a_quarter():
    target = target_of("h100:8")
    predicted = predicted_disk_rate(target)
    assert predicted == ENGINE_BANDWIDTH, "eight disks are faster than one process"
    assert math.isclose(predicted_disk_rate(target_of("h100:1")), 0.8 * 2 / (1 / 6.5e9 + 1 / 3.5e9))
    for share in (0.76, 1.24):
        assert used_disk_rate(target, "/mnt", DiskRate(share * predicted, True)) == (None, ())
    for share in (0.74, 1.26):
        rate, (note,) = used_disk_rate(target, "/mnt", DiskRate(share * predicted, True))
        assert rate == share * predicted and "predicted were 4:" in note and "page cache" not in note
    assert "page cache" in used_disk_rate(target, "/mnt", DiskRate(1e9, False))[1][0]
    assert predicted_disk_rate(target_of("v5p:2x2x1")) == 0
    rate, (note,) = used_disk_rate(target_of("v5p:2x2x1"), "/mnt", DiskRate(1e9, True))
    assert rate == 1e9 and "1 GB/s in /mnt, both together; v5p:2x2x1 has no rates of disks" in note


def test_a_measured_rate_takes_the_place_of_the_disks_and_of_the_processs():
    fast = {"host_link_bandwidth": 1e15, "host_memory_bandwidth": 1e15}
    target = dataclasses.replace(target_of("h100:8"), chip=dataclasses.replace(CHIP, **fast))
    traffic = DiskTraffic(3 * 10**9, 10**9, 0)
    for rate in (1e8, 8e9):  # slower than the disks, faster than a process was on the machine that was measured
        assert math.isclose(disk_transfers(traffic, target, rate).seconds, 4e9 * 8 / rate)
    unknown = dataclasses.replace(target, chip=dataclasses.replace(target.chip, disk_read_bandwidth=0.0))
    assert disk_transfers(traffic, unknown) is None
    assert math.isclose(disk_transfers(traffic, unknown, 1e9).seconds, 32)
    slow_link = dataclasses.replace(target, chip=dataclasses.replace(target.chip, host_link_bandwidth=1e7))
    assert disk_transfers(traffic, slow_link, 1e9).seconds > 300


@pytest.mark.parametrize("seconds, words", [(0.05, "predicted were 4:"), (None, "")])
def test_a_choice_measures_the_disk_where_files_are_compared(tmp_path, monkeypatch, seconds, words):
    live, seen = target_of("h100:8"), {}
    monkeypatch.setattr(placement, "topology_of", lambda devices: dataclasses.replace(
        live, chip=dataclasses.replace(built_in("h100"), host_memory_bytes=1)))
    monkeypatch.setattr(placement, "measured_link", lambda devices: 0.8 * 64e9)
    if seconds is None:
        monkeypatch.setattr(disk_rate, "measured_disk", lambda folder: DiskRate(ENGINE_BANDWIDTH, True))
    else:
        slowed(monkeypatch, seconds)

    def examine(step, batch, target, *rest, **limits):
        files = isinstance(step.offload, zero_jax.Offload)
        seen[files] = limits["disk_rate"]
        layout = types.SimpleNamespace(host=(), disk=(), stage=types.SimpleNamespace(shards_params=False))
        return types.SimpleNamespace(fits=files or limits["memory_bytes"] > 10, timing=None, lacking_bytes=9,
                                     transfers=None, layout=layout, free_bytes=0)

    monkeypatch.setattr(placement, "examine", examine)

    def make(offload):
        return types.SimpleNamespace(mesh=zero_jax.make_mesh(), offload=offload)

    assert choose_for(make, BATCH, memory_bytes=11, disk=tmp_path).notes == () and True not in seen
    choice = choose_for(make, BATCH, memory_bytes=10, disk=tmp_path)
    assert choice.name == "disk" and seen[False] is None and not os.listdir(tmp_path)
    assert (seen[True] is None) == (not words) == (choice.notes == ())
    assert not words or seen[True] < 84e6 and words in choice.notes[0] and str(tmp_path) in choice.notes[0]
