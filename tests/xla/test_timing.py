"""The time model: timelines by hand, and a compiled step."""

import dataclasses
import gzip
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

import pytest
from support.programs import DEEP, program
from support.targets import mesh_of

from zero_jax.cli.planning.plan_report import recomputed_text
from zero_jax.contract.report import Contract, Report, TrafficBudget, TrafficResult
from zero_jax.xla import devices as xla_devices
from zero_jax.xla import timing
from zero_jax.xla.chip import Rates, built_in
from zero_jax.xla.collective import Collective
from zero_jax.xla.events import Done, Loop, Start, Work
from zero_jax.xla.schedule import schedule
from zero_jax.xla.targets import target_of

EXACT = Rates(matmul=1, hbm=1, links=1)
H100, V5P = target_of("h100:2x8"), target_of("v5p:4x4x4")
CHIP = H100.chip
INSIDE, ACROSS = (0, 1), (0, 8)  # partitions of H100 joined by NVLink, and by the network
LATENCY = timing.START_SECONDS["cuda"]


def compute(seconds, dtype="bf16"):
    return Work("w", "fusion", "", {dtype: seconds * CHIP.peak_flops[dtype]}, 0)


def memory(seconds):
    return Work("m", "fusion", "", {}, seconds * CHIP.memory_bandwidth)


def send(payload_bytes, group, kind="collective-permute"):
    return Collective(kind, (), payload_bytes, group, 1, True, False, True, "", "", "", "")


@pytest.fixture(autouse=True)
def no_latency(request, monkeypatch):
    """Whole seconds by hand, except where a test is about latency."""
    if "latency" not in request.node.name:
        monkeypatch.setattr(timing, "START_SECONDS", {"cuda": 0.0, "tpu": 0.0})
        monkeypatch.setattr(timing, "HOP_SECONDS", dict.fromkeys(timing.HOP_SECONDS, 0.0))


def seconds_of(link, seconds):
    """A collective that takes `seconds`."""
    bandwidth = {"nvlink": CHIP.link_bandwidth, "network": CHIP.network_bandwidth}[link]
    return send(round(seconds * bandwidth), {"nvlink": INSIDE, "network": ACROSS}[link])


def coords_of(target):
    """Coordinates of all devices of `target`: GPUs host by host, chips of a torus axis by axis."""
    if target.chip.tpu:
        return list(itertools.product(*map(range, target.dims), range(target.chip.tpu.devices_per_chip)))
    return [(number // target.dims[1], number) for number in range(target.num_devices)]


def run(*events, target=H100, rates: Rates | None = EXACT, tokens=0.0, model_flops=0.0):
    timed = timing.predict(
        events, target, coords_of(target), tokens=tokens, model_flops=model_flops, rates=rates)
    assert sum(timed.spent.values()) == pytest.approx(timed.seconds)
    return timed


def test_compute_bound():
    timed = run(Work("w", "fusion", "", {"bf16": 2 * CHIP.peak_flops["bf16"]}, CHIP.memory_bandwidth),
                tokens=32, model_flops=16 * CHIP.peak_flops["bf16"])
    assert timed.seconds == timed.compute_seconds == 2 and timed.hbm_seconds == 1
    assert timed.bound == "compute" and timed.exposed_seconds == {} == timed.communication_seconds
    assert timed.tokens_per_second == 16 and timed.mfu == 0.5 and timed.hfu == 1


def test_bandwidth_bound():
    timed = run(Work("w", "fusion", "", {"bf16": CHIP.peak_flops["bf16"]}, 3 * CHIP.memory_bandwidth))
    assert timed.seconds == 3 and timed.bound == "memory" and timed.spent == {"compute": 0, "memory": 3}
    assert run(compute(1), memory(2)).seconds == 3  # two instructions do not overlap


def test_rates_by_dtype():
    assert run(compute(1), compute(1, "f8"), compute(1, "f32")).seconds == 3
    flops = {"f8e4m3fn": CHIP.peak_flops["f8"], "f64": CHIP.peak_flops["f32"]}  # not listed: as f32
    assert run(Work("w", "dot", "", flops, 0)).seconds == 2
    assert run(compute(1), rates=Rates(0.5, 1, 1)).seconds == run(memory(1), rates=Rates(1, 0.5, 1)).seconds == 2


def test_rates_by_kernel():
    """A launch each; odd rows; attention by the nearest head dim, slower in short sequences; else as without rates."""
    rates = Rates(1, 1, 1, launch=0.25, products={"bf16 odd": 0.5}, attention={"64 forward": (0.5, 1024)})
    once = compute(1)
    for changes, seconds in (
            ({}, 1), ({"kernel": "odd"}, 2), ({"kernel": "64 forward", "length": 1024}, 4),
            ({"kernel": "128 forward", "length": 3072}, 8 / 3)):
        work = dataclasses.replace(once, **changes)
        assert run(work, rates=rates).seconds == pytest.approx(seconds + 0.25)
        assert run(work).seconds == 1
    assert run(once, memory(1), rates=rates).spent == {"compute": 1, "memory": 1, "launches": 0.5}


def test_a_chips_rates_are_the_defaults():
    slow = with_chip(H100, rates=dataclasses.replace(EXACT, matmul=0.5))
    assert run(compute(1), target=slow, rates=None).seconds == 2 and run(compute(1), target=slow).seconds == 1
    typical = target_of("b200:8")
    assert run(compute(1), target=typical, rates=None).seconds == pytest.approx(
        CHIP.peak_flops["bf16"] / typical.chip.peak_flops["bf16"] / Rates().matmul)


def test_published_rows():
    """Of rows that calibrated nothing, at the rates and with the bands of today's chip files; typical rates miss it."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "tables"))
    import published  # pyright: ignore[reportMissingImports]

    found = json.loads(published.PREDICTED.read_text())
    assert json.loads(json.dumps(published.rates_of(found["rates"]))) == found["rates"]
    for what, missed in (("tokens", False), ("typical_tokens", True)):
        by_chip = {chip: each for (chip, used), each in published.errors_by_chip(found, what).items() if used == "no"}
        errors = [error for each in by_chip.values() for error in each]
        assert len(errors) >= 45 and (statistics.median(map(abs, errors)) > 0.08) == missed
        assert (sum(abs(error) <= 0.2 for error in errors) < 0.9 * len(errors)) == missed
        assert all((published.band(each) != built_in(chip).rates.band) == missed for chip, each in by_chip.items()
                   if len(each) >= published.FEWEST)
        assert not any(built_in(chip).rates.band for chip, each in by_chip.items() if len(each) < published.FEWEST)
    assert all(each["mfu"] <= each["hfu"] for name, each in found.items() if name != "rates")
    assert all(row["used"] in ("yes", "no") and row["source"] for row in published.rows())
    again = {row["remat"]: found[row["key"]]["hfu"] / found[row["key"]]["mfu"] for row in published.rows()
             if row["key"] in found and row["software"] == "MaxText" and row["target"].startswith("h")}
    assert again["dots"] < 1.1 < again["mlp"] < 1.2  # the feed-forward's first products are 0.18 of all


def test_what_xla_recomputes():
    """By its names, loops included; nothing where it recomputes nothing, and never more than all."""
    again = dataclasses.replace(compute(2), name="fusion.3.remat2")
    timed = run(compute(1), Loop(3, True, (again, compute(1))), model_flops=2.5 * CHIP.peak_flops["bf16"] * 16)
    assert timed.recomputed == pytest.approx(6 / 10) and timed.useful == pytest.approx(2.5 / 10)
    assert timed.mfu == pytest.approx(0.25) and timed.hfu == pytest.approx(1)
    assert run(compute(1)).recomputed == 0 == run(memory(1)).recomputed
    assert "XLA recomputes 60% of" in recomputed_text(timed.recomputed)


def measured_step():
    """Events of GPT-2 124M's step as compiled on one H100, and the seconds that it took there."""
    folder = Path(__file__).parents[2] / "scripts" / "bench" / "measured"
    with gzip.open(folder / "124m_16_stage-3.hlo.gz", "rt") as file:
        return schedule(file.read()), json.loads((folder / "124m_16_stage-3.json").read_text())["step"]


def test_a_measured_step():
    """Within 5 % by the chip's rates, and 25 % off by typical ones, for which attention runs as fast as any product."""
    events, seconds = measured_step()
    assert run(*events, target=target_of("h100:1"), rates=None).seconds == pytest.approx(seconds, rel=0.05)
    assert run(*events, target=target_of("h100:1"), rates=Rates()).seconds < 0.8 * seconds


def test_seconds_by_purpose():
    """A collective that serves two purposes is shared by bytes; one that nothing waits for is exposed for no second."""
    both, hidden = (dataclasses.replace(seconds_of("nvlink", 4), name=name) for name in ("both", "hidden"))
    timed = run(Start(both), compute(1), Done(both), Start(hidden), compute(5), Done(hidden))
    quarter, rest = (dataclasses.replace(both, payload_bytes=round(both.payload_bytes * part)) for part in (0.25, 0.75))
    results = [TrafficResult(TrafficBudget("", (), (), 0.0), each) for each in ((quarter,), (rest, hidden), ())]
    found = Report(Contract(3, {}, "cuda", 0, ()), tuple(results), ()).timed(timed).seconds
    assert [*itertools.chain(*found)] == pytest.approx([1, 0.75, 3 + 4, 2.25, 0, 0])


def test_overlapped_collective():
    c = seconds_of("nvlink", 2)
    timed = run(Start(c), compute(3), Done(c))
    assert timed.seconds == 3 and timed.bound == "compute"
    assert timed.communication_seconds == {"nvlink": 2} and timed.exposed_seconds == {"nvlink": 0}


def test_exposed_collective():
    c = seconds_of("nvlink", 5)
    timed = run(Start(c), compute(2), Done(c), compute(0.5))
    assert timed.seconds == 5.5 and timed.exposed_seconds == {"nvlink": 3} and timed.bound == "nvlink"
    blocking = run(Start(c), Done(c), compute(2))
    assert blocking.seconds == 7 and blocking.exposed_seconds == {"nvlink": 5}
    assert run(Start(c), compute(2), Done(c), rates=Rates(1, 1, 0.5)).seconds == 10


def test_different_links_work_at_once():
    a, b = seconds_of("nvlink", 4), seconds_of("network", 3)
    timed = run(Start(a), Start(b), compute(1), Done(a), Done(b))
    assert timed.seconds == 4 and timed.exposed_seconds == {"nvlink": 3, "network": 0}
    assert timed.communication_seconds == {"nvlink": 4, "network": 3}


def test_one_link_queues():
    a, b = seconds_of("nvlink", 4), seconds_of("nvlink", 3)
    assert run(Start(a), Start(b), compute(1), Done(a), Done(b)).seconds == 7
    assert run(Start(a), compute(6), Start(b), Done(b)).seconds == 9  # it is free again by then


def test_axes_of_a_torus():
    """Groups along x and y have links of their own; one over the plane has both."""
    at = {where: number for number, where in enumerate(coords_of(V5P))}
    x, y = (tuple(at[where] for where in line) for line in (
        [(i, 0, 0, 0) for i in range(4)], [(0, i, 0, 0) for i in range(4)]))
    plane = tuple(at[i, j, 0, 0] for i, j in itertools.product(range(4), repeat=2))
    second = round(2 * V5P.chip.link_bandwidth)
    a, b, c = send(second, x), send(2 * second, y), send(2 * second, plane)
    timed = run(Start(a), Start(b), Done(a), Done(b), target=V5P)
    assert timed.seconds == 2 and timed.communication_seconds == {"ici x": 1, "ici y": 2}
    assert run(Start(a), Start(c), Done(a), Done(c), target=V5P).seconds == 2  # waits for x, then 1 s on four links
    assert run(Start(c), Done(c), target=V5P).bound == "ici xy"


def test_nothing_is_waited_for_twice_or_unasked():
    c = seconds_of("nvlink", 2)
    assert run(Done(c), compute(1), Start(c), Done(c), Done(c)).seconds == 3
    assert run(Start(c), compute(1)).seconds == 1
    alone = send(100, (0,), "all-gather")
    assert run(Start(alone), Done(alone)).seconds == 0
    assert run().bound == "compute" and run(tokens=1).tokens_per_second == 0


def test_loops():
    c = seconds_of("nvlink", 3)
    body = (Start(c), compute(1), Done(c))
    timed = run(Loop(10, True, body))
    assert timed.seconds == 30 and timed.compute_seconds == 10 and timed.exposed_seconds == {"nvlink": 20}
    assert timed.hfu == pytest.approx(1 / 3) and timed.communication_seconds == {"nvlink": 30}
    nested = run(Loop(4, True, (compute(1), Loop(5, True, body), memory(2))))
    assert nested.seconds == 4 * (1 + 15 + 2) and nested.spent == {"compute": 24, "memory": 8, "nvlink": 40}
    assert [run(Loop(trips, True, body)).seconds for trips in (0, 1, 2)] == [0, 3, 6]


@pytest.mark.parametrize("sending, iteration", [(1, 2), (5, 5)])
def test_pipelined_loop(sending, iteration):
    """Each iteration waits for what the one before has sent: the first waits for nothing, and the last is awaited."""
    c = seconds_of("network", sending)
    timed = run(Loop(8, True, (compute(2), Done(c), Start(c))), Done(c))
    assert timed.seconds == 2 + 7 * iteration + sending
    assert timed.exposed_seconds == {"network": timed.seconds - 16}


def test_a_backlog_grows():
    """Collectives that no iteration waits for queue until after the loop."""
    c, last = seconds_of("nvlink", 3), seconds_of("nvlink", 1)
    assert run(Loop(10, True, (compute(1), Start(c))), Start(last), Done(last)).seconds == 1 + 30 + 1


def test_latency():
    latency = timing.START_SECONDS["cuda"]
    ring, both = tuple(range(8)), tuple(range(16))
    nvlink, network = timing.HOP_SECONDS["nvlink"], timing.HOP_SECONDS["network"]
    for kind, group, expected in (
        ("all-gather", ring, 7 * nvlink), ("all-reduce", ring, 14 * nvlink), ("all-to-all", ring, nvlink),
        ("reduce-scatter", both, 14 * nvlink + network), ("collective-permute", ACROSS, network),
    ):
        c = send(1, group, kind)
        assert run(Start(c), Done(c)).seconds == pytest.approx(latency + expected, rel=1e-3)


def test_ring_of_the_network():
    """`Rates.ring` bounds what crosses hosts, and nothing inside them."""
    a, b = seconds_of("nvlink", 1), seconds_of("network", 1)
    slow = dataclasses.replace(EXACT, ring=CHIP.network_bandwidth / 10)
    assert run(Start(a), Done(a), rates=slow).seconds == 1 and run(Start(b), Done(b), rates=slow).seconds == 10


def with_chip(target, **changes):
    return dataclasses.replace(target, chip=dataclasses.replace(target.chip, **changes))


def predicted(layers):
    """The timing of a step on 8 H100s, 16 tokens on each."""
    width, length, target = DEEP.width, 16, target_of("h100:8")
    flops = 6 * (12 * layers * width**2 + DEEP.vocab_size * width) + 12 * layers * width * length
    return timing.predict(
        program(f"h100 stage 3, {layers} layers").schedule, target,
        [xla_devices.coords(device) for device in mesh_of("h100:8").devices.flat], tokens=8 * length,
        model_flops=8 * length * flops)


@pytest.mark.slow
def test_a_compiled_step():
    shallow, deep = predicted(4), predicted(12)
    for found in (shallow, deep):
        assert all(math.isfinite(value) for value in (found.seconds, found.tokens_per_second, found.mfu, found.hfu))
        assert sum(found.spent.values()) == pytest.approx(found.seconds)
        assert found.compute_seconds > 0 and found.hbm_seconds > 0 and 0 < found.mfu < 1
        assert found.hfu == pytest.approx(found.mfu)  # nothing is recomputed
        assert set(found.communication_seconds) == {"nvlink"}
        assert found.bound in ("compute", "memory", "launches", "nvlink")
        assert found.exposed_seconds["nvlink"] <= found.communication_seconds["nvlink"] + 1e-9
    assert deep.seconds > 1.5 * shallow.seconds and deep.compute_seconds > 2 * shallow.compute_seconds
