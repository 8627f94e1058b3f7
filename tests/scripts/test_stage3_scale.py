"""scripts/figures/stage3_scale.py: programs for other numbers of devices, derived; by hand."""

from pathlib import Path

import pytest

from scripts.figures import stage3_scale as scale
from zero_jax.xla import timing
from zero_jax.xla.collective import Collective
from zero_jax.xla.events import Done, Loop, Start, Work

PAGE = Path(__file__).parents[2] / "docs/stage3_scale.md"


def gather(group, name="g"):
    return Collective("all-gather", (), 1 << 30, tuple(group), 1, True, True, True, "c", name, "", "")


def groups(events):
    """Group and name of each start and end in `events`, in order."""
    return [each for event in events for each in (
        groups(event.body) if isinstance(event, Loop) else
        [(event.collective.name, event.collective.group)] if isinstance(event, Start | Done) else [])]


def test_groups_across_hosts_grow_and_others_stay():
    """All devices, one of each host, and a host: for 32 devices and back. Control: a program for 8 has one host."""
    whole, across, inside = gather(range(16), "all"), gather((3, 11), "across"), gather(range(8), "host")
    events = (Start(whole), Loop(4, True, (Start(across), Done(across))), Start(inside), Done(inside), Done(whole))
    larger = scale.rescaled(events, 16, 32)
    wanted = {"all": tuple(range(32)), "across": (3, 11, 19, 27), "host": tuple(range(8))}
    assert groups(larger) == [(name, wanted[name]) for name, _ in groups(events)] != groups(events)
    assert groups(scale.rescaled(larger, 32, 16)) == groups(events)
    assert larger[0].collective is larger[-1].collective and larger[0].collective.payload_bytes == whole.payload_bytes
    assert groups(scale.rescaled((Start(inside),), 8, 16)) == [("host", tuple(range(16)))]


def test_the_exposed_share_of_a_rescaled_program():
    """It is that of the same events written for as many devices. Control: that of the number they were made for."""
    def events(devices):
        each = gather(range(devices))
        return (Start(each), Work("w", "fusion", "", {"bf16": 1e12}, 0), Done(each))

    assert scale.seconds_of(scale.rescaled(events(16), 16, 512), 512) == scale.seconds_of(events(512), 512)
    assert scale.seconds_of(events(16), 16)[1] < scale.seconds_of(events(512), 512)[1]


def test_an_average_of_slices_by_hand(monkeypatch):
    """2 of 3 hosts' parts twice, of 4 bytes of an eighth of the parameters. Control: one host has nobody to average."""
    monkeypatch.setattr(scale, "HOP_SECONDS", {"network": 1.0})
    chip = scale.target_for(24).chip
    rate = chip.network_bandwidth * chip.rates.links
    assert scale.average_seconds(8e9, 24) == pytest.approx(2 * 2 / 3 * 4e9 / rate + 4 + timing.START_SECONDS["cuda"])
    assert scale.average_seconds(8e9, 8) == 0.0


def test_the_page_has_the_curves_of_the_script():
    """A row for each curve, with a share for each number of devices. Control: a name that is none."""
    rows: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        name, *cells = [cell.strip() for cell in line.strip("| ").split("|")]
        rows.setdefault(name, cells)  # a second table has what is compiled
    for name in (*scale.PROGRAMS, scale.SLICES):
        assert len(rows[name]) == 1 + len(scale.DEVICES) and all(0 <= float(each) <= 100 for each in rows[name])
    assert "2 sequences, hpZ" not in rows
