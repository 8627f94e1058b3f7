"""Time for what moves between host memory, files and the device."""

import dataclasses
import math

import pytest
from support.transfers import CHIP, TIMING, compiled

from zero_jax.offload.disk_leaves import DiskTraffic
from zero_jax.planning.transfers import (
    COPY_SECONDS,
    ENGINE_BANDWIDTH,
    REACHED,
    disk_transfers,
    transfers_of,
    with_transfers,
)
from zero_jax.xla.chip import built_in, chip_files
from zero_jax.xla.targets import target_of

GPU, TPU = CHIP, dataclasses.replace(CHIP, gpu=None)
ENGINES = dataclasses.replace(GPU, name="with copy engines")


@pytest.mark.parametrize("chip, moved, busy", [
    (TPU, (8, 0), 0.8), (TPU, (40, 0), 4.0), (TPU, (0, 8), 0.8), (TPU, (8, 4), 1.2),
    (TPU, (0, 0, 30, 30), 4.0),  # 60 bytes over the memory's 15 a second; 3 s on the link, which carries both ways
    (TPU, (0, 0, 10, 90), 9.0), (TPU, (0, 0, 0, 0, 10), 4 / 3), (TPU, (4, 0, 0, 0, 10), 1.6),
    (GPU, (8, 0), 0.8), (GPU, (40, 0), 4.0), (GPU, (8, 4), 1.2), (GPU, (0, 0, 30, 30), 6.0),
    (GPU, (0, 0, 10, 90), 10.0), (GPU, (0, 0, 0, 0, 10), 2.0), (GPU, (4, 0, 0, 0, 10), 2.4),
    (ENGINES, (8, 0), 0.8), (ENGINES, (8, 4), 1.2), (ENGINES, (0, 0, 10, 90), 10.0), (ENGINES, (4, 0, 0, 0, 10), 2.4)])
def test_what_is_ahead_is_hidden_on_tpus_and_by_copy_engines_and_the_rest_is_waited_for(chip, moved, busy):
    transfers = transfers_of(compiled(*moved, engines=chip is ENGINES), chip, TIMING)
    assert math.isclose(transfers.seconds * REACHED, busy, rel_tol=1e-3)
    both = moved[4] if len(moved) > 4 else 0
    link = moved[0] + (2 if chip.gpu else 1) * both
    ahead = max(link, (moved[0] + 2 * both) / 1.5) / 10 / REACHED
    hidden = 0.0 if chip is GPU else min(2.0, ahead)  # beside the two seconds of the step
    assert math.isclose(transfers.exposed_seconds, busy / REACHED - hidden, abs_tol=1e-3)
    timing = with_transfers(TIMING, transfers)
    assert math.isclose(timing.seconds, 2.0 + transfers.exposed_seconds) and math.isclose(
        sum(timing.spent.values()), timing.seconds)
    assert math.isclose(timing.mfu * timing.seconds, TIMING.mfu * 2.0)
    assert with_transfers(TIMING, None) is TIMING
    assert transfers.checkpoints == both
    assert transfers_of(compiled(*moved), dataclasses.replace(chip, host_link_bandwidth=0.0), TIMING) is None


def test_many_small_copies_take_their_time():
    fast = dataclasses.replace(TPU, host_link_bandwidth=1e12, host_memory_bandwidth=1e12)
    transfers = transfers_of(compiled(8, 8, 8, 16), fast, TIMING)
    assert math.isclose(transfers.seconds, (2 + 1 + 2 * 2) * COPY_SECONDS, rel_tol=1e-3)
    assert math.isclose(transfers.exposed_seconds, (1 + 2 * 2) * COPY_SECONDS, rel_tol=1e-3)


def test_chips_have_a_link_to_their_host_slower_than_their_memory():
    for name in chip_files():
        chip = built_in(name)
        assert chip.host_link_bandwidth < chip.memory_bandwidth / 10
        assert chip.host_link_bandwidth > 10e9 or name == "tpu7x"  # of which nothing is published
        assert chip.host_memory_bandwidth < chip.memory_bandwidth / 10


def test_the_time_of_files_is_that_of_disk_link_or_process():
    def seconds(read, written, *, devices=1, **rates):
        chip = dataclasses.replace(CHIP, disk_read_bandwidth=4.0, disk_write_bandwidth=2.0, **rates)
        target = dataclasses.replace(target_of(f"h100:{devices}"), chip=chip)
        return disk_transfers(DiskTraffic(read, written, 2 * written), target).seconds

    assert math.isclose(seconds(8, 4) * REACHED, 2 + 2)
    assert math.isclose(seconds(8, 4, host_link_bandwidth=1.0) * REACHED, 8)
    assert math.isclose(seconds(8, 4, host_memory_bandwidth=2.0) * REACHED, 6)
    fast = {"host_link_bandwidth": 1e15, "host_memory_bandwidth": 1e15}
    chip = dataclasses.replace(CHIP, disk_read_bandwidth=1e15, disk_write_bandwidth=1e15, **fast)
    for devices in (1, 8):  # of one process
        moved = disk_transfers(DiskTraffic(10**9, 10**9, 0), dataclasses.replace(target_of(f"h100:{devices}"),
                                                                                 chip=chip))
        assert math.isclose(moved.seconds, 2e9 * devices / ENGINE_BANDWIDTH)
        assert with_transfers(TIMING, moved).spent["disk"] == moved.exposed_seconds == moved.seconds
    for name in ("disk_read_bandwidth", "disk_write_bandwidth", "host_link_bandwidth"):
        unknown = dataclasses.replace(chip, **{name: 0.0})
        target = dataclasses.replace(target_of("h100:8"), chip=unknown)
        assert disk_transfers(DiskTraffic(1, 1, 1), target) is None
