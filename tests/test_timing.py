"""The time model: timelines by hand, steps by formula, and a compiled step."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

import zero_jax
from models import gpt2
from zero_jax import accounting, hardware, hlo_schedule, timing
from zero_jax.hlo_collective import Collective
from zero_jax.hlo_events import Done, Loop, Start, Work, collectives, totals
from zero_jax.targets import target_of
from zero_jax.timing import Rates, transformer_workload

EXACT = Rates(matmul=1, hbm=1, wire=1)
H100, V5P = target_of("h100:2x8"), target_of("v5p:4x4x4")
CHIP = H100.chip
INSIDE, ACROSS = (0, 1), (0, 8)  # partitions of H100 joined by NVLink, and by the network
LATENCY = timing.BEGIN["cuda"]


def compute(seconds, dtype="bf16"):
    return Work("w", "fusion", "", {dtype: seconds * CHIP.peak_flops[dtype]}, 0)


def memory(seconds):
    return Work("m", "fusion", "", {}, seconds * CHIP.memory_bandwidth)


def send(payload_bytes, group, kind="collective-permute"):
    return Collective(kind, (), payload_bytes, group, 1, True, False, True, "", "", "", "")


@pytest.fixture(autouse=True)
def no_latency(request, monkeypatch):
    """Whole seconds by hand, but where a test is about latency or about real figures."""
    if "latency" not in request.node.name:
        monkeypatch.setattr(timing, "BEGIN", {"cuda": 0.0, "tpu": 0.0})
        monkeypatch.setattr(timing, "HOP", dict.fromkeys(timing.HOP, 0.0))


def seconds_of(link, seconds):
    """A collective that takes so long."""
    bandwidth = {"nvlink": CHIP.link_bandwidth, "network": CHIP.network_bandwidth}[link]
    return send(round(seconds * bandwidth), {"nvlink": INSIDE, "network": ACROSS}[link])


def run(*events, target=H100, rates=EXACT, tokens=0, model_flops=0):
    found = timing.predict(
        events, target, timing.places(target), tokens=tokens, model_flops=model_flops, rates=rates)
    assert sum(found.spent.values()) == pytest.approx(found.seconds)
    return found


def test_compute_bound():
    found = run(Work("w", "fusion", "", {"bf16": 2 * CHIP.peak_flops["bf16"]}, CHIP.memory_bandwidth),
                tokens=32, model_flops=16 * CHIP.peak_flops["bf16"])
    assert found.seconds == found.compute_seconds == 2 and found.hbm_seconds == 1
    assert found.bound == "compute" and found.exposed_seconds == {} == found.wire_seconds
    assert found.tokens_per_second == 16 and found.mfu == 0.5 and found.hfu == 1


def test_bandwidth_bound():
    found = run(Work("w", "fusion", "", {"bf16": CHIP.peak_flops["bf16"]}, 3 * CHIP.memory_bandwidth))
    assert found.seconds == 3 and found.bound == "memory" and found.spent == {"compute": 0, "memory": 3}
    assert run(compute(1), memory(2)).seconds == 3  # two instructions do not overlap


def test_rates_by_dtype():
    assert run(compute(1), compute(1, "f8"), compute(1, "f32")).seconds == 3
    flops = {"f8e4m3fn": CHIP.peak_flops["f8"], "f64": CHIP.peak_flops["f32"]}  # not listed: as f32
    assert run(Work("w", "dot", "", flops, 0)).seconds == 2
    assert run(compute(1), rates=Rates(0.5, 1, 1)).seconds == run(memory(1), rates=Rates(1, 0.5, 1)).seconds == 2


def test_overlapped_collective():
    c = seconds_of("nvlink", 2)
    found = run(Start(c), compute(3), Done(c))
    assert found.seconds == 3 and found.bound == "compute"
    assert found.wire_seconds == {"nvlink": 2} and found.exposed_seconds == {"nvlink": 0}


def test_exposed_collective():
    c = seconds_of("nvlink", 5)
    found = run(Start(c), compute(2), Done(c), compute(0.5))
    assert found.seconds == 5.5 and found.exposed_seconds == {"nvlink": 3} and found.bound == "nvlink"
    blocking = run(Start(c), Done(c), compute(2))
    assert blocking.seconds == 7 and blocking.exposed_seconds == {"nvlink": 5}
    assert run(Start(c), compute(2), Done(c), rates=Rates(1, 1, 0.5)).seconds == 10


def test_different_links_work_at_once():
    a, b = seconds_of("nvlink", 4), seconds_of("network", 3)
    found = run(Start(a), Start(b), compute(1), Done(a), Done(b))
    assert found.seconds == 4 and found.exposed_seconds == {"nvlink": 3, "network": 0}
    assert found.wire_seconds == {"nvlink": 4, "network": 3}


def test_one_link_queues():
    a, b = seconds_of("nvlink", 4), seconds_of("nvlink", 3)
    assert run(Start(a), Start(b), compute(1), Done(a), Done(b)).seconds == 7
    assert run(Start(a), compute(6), Start(b), Done(b)).seconds == 9  # it is free again by then


def test_axes_of_a_torus():
    """Groups along x and y have links of their own; one over the plane has both."""
    at = {where: number for number, where in enumerate(timing.places(V5P))}
    x, y = (tuple(at[where] for where in line) for line in (
        [(i, 0, 0, 0) for i in range(4)], [(0, i, 0, 0) for i in range(4)]))
    plane = tuple(at[i, j, 0, 0] for i, j in itertools.product(range(4), repeat=2))
    second = round(2 * V5P.chip.link_bandwidth)
    a, b, c = send(second, x), send(2 * second, y), send(2 * second, plane)
    found = run(Start(a), Start(b), Done(a), Done(b), target=V5P)
    assert found.seconds == 2 and found.wire_seconds == {"ici x": 1, "ici y": 2}
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
    found = run(Loop(10, True, body))
    assert found.seconds == 30 and found.compute_seconds == 10 and found.exposed_seconds == {"nvlink": 20}
    assert found.hfu == pytest.approx(1 / 3) and found.wire_seconds == {"nvlink": 30}
    nested = run(Loop(4, True, (compute(1), Loop(5, True, body), memory(2))))
    assert nested.seconds == 4 * (1 + 15 + 2) and nested.spent == {"compute": 24, "memory": 8, "nvlink": 40}
    assert [run(Loop(trips, True, body)).seconds for trips in (0, 1, 2)] == [0, 3, 6]


@pytest.mark.parametrize("wire, iteration", [(1, 2), (5, 5)])
def test_pipelined_loop(wire, iteration):
    """Each iteration waits for what the one before has sent: the first waits for nothing, and the last is awaited."""
    c = seconds_of("network", wire)
    found = run(Loop(8, True, (compute(2), Done(c), Start(c))), Done(c))
    assert found.seconds == 2 + 7 * iteration + wire
    assert found.exposed_seconds == {"network": found.seconds - 16}


def test_a_backlog_grows():
    """What no iteration waits for piles up behind the loop."""
    c, last = seconds_of("nvlink", 3), seconds_of("nvlink", 1)
    assert run(Loop(10, True, (compute(1), Start(c))), Start(last), Done(last)).seconds == 1 + 30 + 1


def test_latency():
    latency = timing.BEGIN["cuda"]
    ring, both = tuple(range(8)), tuple(range(16))
    nvlink, network = timing.HOP["nvlink"], timing.HOP["network"]
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


SMALL = dict(layers=10, hidden=1024, heads=16, batch=4, length=512, vocab=4096, data=4, stage=2)
DGX = target_of("v100-32gb:25x16")


@pytest.mark.parametrize("stage", range(4))
def test_formulas_of_a_transformer(stage):
    """FLOPs and wire volumes are those of zero_jax.accounting."""
    c = SMALL | {"stage": stage, "tensor": 2}
    workload = transformer_workload(**c, split_checkpoints=True)
    shape = c["layers"], c["hidden"], c["batch"], c["length"]
    full = c["data"] * accounting.megatron_step_flops(*shape, c["vocab"])
    assert 8 * totals(workload.events).flops["bf16"] == pytest.approx(full)
    assert workload.devices == 8 and workload.tokens == 4 * 4 * 512
    assert transformer_workload(**c, recompute=False).model_flops == workload.model_flops == pytest.approx(
        8 * totals(transformer_workload(**c, recompute=False).events).flops["bf16"])
    sent = dict.fromkeys(((0, 1), (0, 2, 4, 6)), 0.0)

    def add(events, times):
        for event in events:
            if isinstance(event, Loop):
                add(event.body, times * event.trips)
            elif isinstance(event, Start):
                sent[event.collective.group] += times * event.collective.wire_bytes

    add(workload.events, 1)
    params = (12 * 10 * 1024**2 + (4096 + 512) * 1024) / 2
    assert sent[0, 2, 4, 6] == pytest.approx(2 * 3 / 4 * sum(accounting.wire_elements(stage, params).values()))
    assert sent[0, 1] == pytest.approx(2 / 2 * (
        accounting.tensor_parallel_elements(*shape) + accounting.partitioned_gather_elements(*shape)))


def test_one_device_sends_nothing():
    workload = transformer_workload(**SMALL | {"data": 1, "stage": 3})
    assert not list(collectives(workload.events))
    found = workload.predict(target_of("v5p:2x2x1"))
    assert found.seconds > 0 and found.exposed_seconds == {} and found.mfu < found.hfu < 1


def test_doubled_flops_double_the_time():
    """Where compute is all: HBM and links without limit."""
    free = with_chip(DGX, memory_bandwidth=math.inf, link_bandwidth=math.inf, network_bandwidth=math.inf)
    once, twice = (transformer_workload(**SMALL | {"batch": batch}).predict(free) for batch in (4, 8))
    assert twice.seconds == pytest.approx(2 * once.seconds) and once.bound == "compute"
    assert once.hfu == pytest.approx(Rates().matmul)


@pytest.mark.parametrize("stage", range(4))
def test_without_overlap_it_takes_longer(stage):
    beside, inline = (
        transformer_workload(**SMALL | {"data": 400, "stage": stage}, overlap=overlap).predict(DGX)
        for overlap in (True, False))
    assert inline.seconds > 1.05 * beside.seconds
    assert inline.compute_seconds == pytest.approx(beside.compute_seconds)
    assert inline.wire_seconds["network"] == pytest.approx(beside.wire_seconds["network"])
    assert inline.exposed_seconds["network"] == pytest.approx(inline.wire_seconds["network"])


def test_a_slow_network_is_the_bound():
    workload = transformer_workload(**SMALL | {"data": 32, "batch": 32})
    assert workload.predict(DGX).bound == "compute"
    assert workload.predict(with_chip(DGX, network_bandwidth=1e7)).bound == "network"
    assert workload.predict(with_chip(DGX, memory_bandwidth=1e10)).bound == "memory"
    inside = transformer_workload(**SMALL | {"data": 16, "batch": 32})
    assert inside.predict(with_chip(DGX, link_bandwidth=1e8)).bound == "nvlink"
    assert inside.predict(with_chip(DGX, network_bandwidth=1e7)) == inside.predict(DGX)  # one node


def test_tensor_parallelism_across_nodes_is_slow():
    """Figure 2's point: the same split over 16 GPUs of a node, and over 16 that lie in two."""
    apart = dataclasses.replace(DGX, dims=(50, 8))
    workload = transformer_workload(**SMALL | {"data": 2, "tensor": 16})
    near, far = workload.predict(DGX, timing.PAPER), workload.predict(apart, timing.PAPER)
    assert far.seconds > 3 * near.seconds and far.bound == "network"


@pytest.fixture(scope="module")
def compiled():
    """Timings of a small step at 2 and 6 layers, compiled for 8 H100s."""
    if extra := hardware.missing_compiler("h100:8"):
        pytest.skip(f"needs {extra}")

    def found(layers):
        mesh = zero_jax.make_mesh(devices=hardware.describe("h100:8"))
        config = gpt2.Config(layers, 128, 4, vocab_size=512, max_length=128)
        step = zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=mesh, precision="bf16")
        batch = {name: jax.ShapeDtypeStruct((8, 128), jnp.int32) for name in ("inputs", "targets")}
        options = hardware.compiler_options(mesh.devices.flat[0])
        events = hlo_schedule.schedule(step.lower(batch).compile(compiler_options=options).as_text())
        return timing.predict(
            events, target_of("h100:8"), [hardware.coords(device) for device in mesh.devices.flat], tokens=8 * 128,
            model_flops=8 * 128 * accounting.train_flops_per_token(
                config.num_block_params + config.vocab_size * config.width, layers, config.width, 128,
                recompute=False))

    return found(2), found(6)


def test_a_compiled_step(compiled):
    for found in compiled:
        assert all(math.isfinite(value) for value in (found.seconds, found.tokens_per_second, found.mfu, found.hfu))
        assert sum(found.spent.values()) == pytest.approx(found.seconds)
        assert found.compute_seconds > 0 and found.hbm_seconds > 0 and 0 < found.mfu < 1
        assert found.hfu == pytest.approx(found.mfu)  # nothing is recomputed
        assert set(found.wire_seconds) == {"nvlink"} and found.bound in ("compute", "memory", "nvlink")
        assert found.exposed_seconds["nvlink"] <= found.wire_seconds["nvlink"] + 1e-9
    shallow, deep = compiled
    assert deep.seconds > 1.5 * shallow.seconds and deep.compute_seconds > 2 * shallow.compute_seconds
