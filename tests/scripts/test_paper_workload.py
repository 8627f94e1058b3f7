"""A step of a GPT by formula: its FLOPs and volumes, and what bounds it."""

import dataclasses
import math

import pytest
import workload
from arithmetic import (
    communication_elements,
    megatron_step_flops,
    partitioned_gather_elements,
    tensor_parallel_elements,
)
from workload import transformer_workload

from zero_jax.xla import timing
from zero_jax.xla.events import Loop, Start, collectives, totals
from zero_jax.xla.targets import target_of
from zero_jax.xla.timing import Rates

SMALL = dict(layers=10, hidden=1024, heads=16, batch=4, length=512, vocab=4096, data=4, stage=2)
DGX = target_of("v100-32gb:25x16")


@pytest.fixture(autouse=True)
def no_latency(monkeypatch):
    """Bandwidths alone, so that doubled work takes twice as long."""
    monkeypatch.setattr(timing, "START_SECONDS", {"cuda": 0.0, "tpu": 0.0})
    monkeypatch.setattr(timing, "HOP_SECONDS", dict.fromkeys(timing.HOP_SECONDS, 0.0))


def with_chip(target, **changes):
    return dataclasses.replace(target, chip=dataclasses.replace(target.chip, **changes))


@pytest.mark.parametrize("stage", range(4))
def test_formulas_of_a_transformer(stage):
    """FLOPs and communication volumes are those of scripts/paper/arithmetic.py."""
    c = SMALL | {"stage": stage, "tensor": 2}
    step = transformer_workload(**c, split_checkpoints=True)
    shape = c["layers"], c["hidden"], c["batch"], c["length"]
    full = c["data"] * megatron_step_flops(*shape, c["vocab"])
    assert 8 * totals(step.events).flops["bf16"] == pytest.approx(full)
    assert step.devices == 8 and step.tokens == 4 * 4 * 512
    assert transformer_workload(**c, recompute=False).model_flops == step.model_flops == pytest.approx(
        8 * totals(transformer_workload(**c, recompute=False).events).flops["bf16"])
    sent = dict.fromkeys(((0, 1), (0, 2, 4, 6)), 0.0)

    def add(events, times):
        for event in events:
            if isinstance(event, Loop):
                add(event.body, times * event.trips)
            elif isinstance(event, Start):
                sent[event.collective.group] += times * event.collective.communication_bytes

    add(step.events, 1)
    params = (12 * 10 * 1024**2 + (4096 + 512) * 1024) / 2
    assert sent[0, 2, 4, 6] == pytest.approx(2 * 3 / 4 * sum(communication_elements(stage, params).values()))
    assert sent[0, 1] == pytest.approx(2 / 2 * (
        tensor_parallel_elements(*shape) + partitioned_gather_elements(*shape)))


def test_one_device_sends_nothing():
    step = transformer_workload(**SMALL | {"data": 1, "stage": 3})
    assert not list(collectives(step.events))
    timed = step.predict(target_of("v5p:2x2x1"))
    assert timed.seconds > 0 and timed.exposed_seconds == {} and timed.mfu < timed.hfu < 1


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
    assert inline.communication_seconds["network"] == pytest.approx(beside.communication_seconds["network"])
    assert inline.exposed_seconds["network"] == pytest.approx(inline.communication_seconds["network"])


def test_a_slow_network_is_the_bound():
    step = transformer_workload(**SMALL | {"data": 32, "batch": 32})
    assert step.predict(DGX).bound == "compute"
    assert step.predict(with_chip(DGX, network_bandwidth=1e7)).bound == "network"
    assert step.predict(with_chip(DGX, memory_bandwidth=1e10)).bound == "memory"
    inside = transformer_workload(**SMALL | {"data": 16, "batch": 32})
    assert inside.predict(with_chip(DGX, link_bandwidth=1e8)).bound == "nvlink"
    assert inside.predict(with_chip(DGX, network_bandwidth=1e7)) == inside.predict(DGX)  # one node


def test_tensor_parallelism_across_nodes_is_slow():
    """Figure 2's point: the same split over 16 GPUs of a node, and over 16 in two nodes."""
    apart = dataclasses.replace(DGX, dims=(50, 8))
    step = transformer_workload(**SMALL | {"data": 2, "tensor": 16})
    near, far = step.predict(DGX, workload.DGX2_RATES), step.predict(apart, workload.DGX2_RATES)
    assert far.seconds > 3 * near.seconds and far.bound == "network"
