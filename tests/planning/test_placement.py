"""The placement of least predicted time that fits."""

import dataclasses
import functools
import json
import math
import re
import types

import flax.linen as nn
import jax
import pytest
from rich.console import Console
from support.targets import mesh_of
from support.transfers import CHIP, TIMING, compiled

import zero_jax
from models import gpt2
from zero_jax.cli.planning.plan_command import plan_command
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.planning import placement
from zero_jax.planning.host_link import measured_link, with_measured_link
from zero_jax.planning.offload_choice import Candidate, choose
from zero_jax.planning.placement import choose_for, compare
from zero_jax.planning.plan import examine
from zero_jax.planning.transfers import (
    REACHED,
    transfers_of,
)
from zero_jax.stages import STAGES
from zero_jax.xla.chip import built_in
from zero_jax.xla.targets import target_of


def plan_of(fits, seconds, free=0, **changes):
    fields = {"fits": fits, "free_bytes": free, "lacking_bytes": -free, "transfers": None,
              "timing": dataclasses.replace(TIMING, seconds=seconds),
              "layout": types.SimpleNamespace(host=frozenset(), disk=frozenset())}
    return types.SimpleNamespace(**fields | changes)


def candidates(plans):
    return [Candidate(None if name == "no" else name, plan) for name, plan in plans.items()]


@pytest.mark.parametrize("plans, chosen, words", [
    ({"no": (True, 1.0), "optimizer": (True, 2.0)}, "no", "offload=optimizer takes 2 s"),
    ({"no": (False, 1.0), "optimizer": (True, 2.0), "parameters": (True, 3.0)}, "optimizer", "no offload does not fit"),
    ({"no": (True, 3.0), "optimizer": (True, 2.0)}, "optimizer", "predicted to take 2 s"),
    ({"no": (True, 2.0), "optimizer": (True, 2.0)}, "no", ""),
    ({"no": (False, 1.0, -9), "optimizer": (False, 2.0, -3)}, "optimizer", "no placement fits")])
def test_the_placement_of_least_time_that_fits_is_chosen(plans, chosen, words):
    plans = {name: plan_of(*fields) for name, fields in plans.items()}
    taken, reason = choose(candidates(plans))
    assert taken.name == chosen and taken.plan is plans[chosen] and words in reason
    assert all(taken.plan.timing.seconds <= other.timing.seconds for other in plans.values()
               if other.fits) or not taken.plan.fits


def test_what_moves_over_a_link_without_a_rate_is_not_taken_for_fast():
    moved = plan_of(True, 1.0, layout=types.SimpleNamespace(host={"opt_state/mu"}, disk=()))
    assert choose(candidates({"no": plan_of(True, 2.0), "optimizer": moved}))[0].name == "no"
    known = plan_of(True, 1.0, layout=moved.layout, transfers=transfers_of(compiled(8, 0), CHIP, TIMING))
    assert choose(candidates({"no": plan_of(True, 2.0), "optimizer": known}))[0].name == "optimizer"


def test_without_times_the_first_that_fits_is_chosen():
    plans = {name: plan_of(name != "no", 1.0, timing=None) for name in ("no", "optimizer", "parameters")}
    chosen, reason = choose(candidates(plans))
    assert chosen.name == "optimizer" and reason == (
        "offload=optimizer fits and moves the least, and times are not predicted for these devices; no offload does "
        "not fit; offload=parameters moves more")


BATCH = {name: jax.ShapeDtypeStruct((16, 32), "int32") for name in ("inputs", "targets")}
MODEL = nn.Sequential([nn.Embed(256, 64), nn.Dense(256), nn.gelu, nn.Dense(256)])


@pytest.mark.parametrize("options, words", [
    ({}, "devices of kind 'cpu' do not say how much memory.*memory_bytes=.*target="),
    ({"memory_bytes": 0}, "memory_bytes=0: give at least 1"), ({"memory_bytes": 1e9}, "give a whole number of"),
    ({"memory_bytes": 10**9, "offload": "optimizer"}, "that is what is chosen"),
    ({"target": "h100:4", "mesh": True}, "h100:4' has 4 devices, and the mesh {'data': 8} 8"),
    ({"memory_bytes": 10_000}, "no placement fits.*345,872 of 10,000 bytes.*state alone.*198,416 of 10,000")])
def test_a_choice_that_cannot_be_made_is_one_error(options, words):
    if "mesh" in options:
        options = options | {"mesh": zero_jax.make_mesh()}
    with pytest.raises(zero_jax.UsageError, match=f"(?s){words}"):
        zero_jax.choose_offload(MODEL, 2 if options.get("memory_bytes") == 10_000 else 3, BATCH, precision="bf16",
                                **options)


def test_a_step_does_not_choose_and_names_what_does():
    with pytest.raises(zero_jax.UsageError, match="zero_jax.choose_offload"):
        zero_jax.make_zero_train_step(MODEL, 3, offload="auto")


@pytest.mark.parametrize("options, words", [
    ({"offload": "nvme"}, "There are: no, optimizer, .*auto"),
    ({"offload": "parameters", "stage": 2}, "take stage 3"),
    ({"offload": "auto", "search": "fit"}, "other stages and sizes")])
def test_other_placements_are_refused(options, words):
    with pytest.raises(zero_jax.UsageError, match=words):
        PlanConfig(model="gpt2:bytes", target="h100:8", **options)


def moving(memory, *, granule=30, states=1000, others=500, host_memory=10_000, disk_memory=10_000):
    """`plan_of` for `compare`: of a step whose states, by the granule, stay on the device or wait for host or disk."""
    def plan_of(offload):
        if isinstance(offload, zero_jax.Offload) and offload.disk is not None:
            needed, stored = others, 2 * states
            return types.SimpleNamespace(
                fits=needed <= memory and stored <= disk_memory, free_bytes=memory - needed, needed_bytes=needed,
                lacking_bytes=max(0, needed - memory) + max(0, stored - disk_memory),
                timing=dataclasses.replace(TIMING, seconds=1 + 15 * states / 100),
                transfers=object(),
                layout=types.SimpleNamespace(host=(), disk={"opt_state/mu"}, host_bytes=0, stage=STAGES[3]))
        share = {None: 0.0, "optimizer": 1.0, "parameters": 1.2, "gradients": 1.3}.get(offload) if not isinstance(
            offload, zero_jax.Offload) else offload.fraction
        host = math.ceil(share * states / granule) * granule if share < 1 else round(share * states)
        needed = others + states - host + 50 * bool(host)
        return types.SimpleNamespace(
            fits=needed <= memory and host <= host_memory, free_bytes=memory - needed, needed_bytes=needed,
            lacking_bytes=max(0, needed - memory) + max(0, host - host_memory), transfers=object(),
            timing=dataclasses.replace(TIMING, seconds=1 + host / 100),
            layout=types.SimpleNamespace(host=host and {"opt_state/mu"}, disk=(), host_bytes=host, stage=STAGES[3]))
    return plan_of


@pytest.mark.parametrize("memory", [*range(355, 1600, 83), 1499, 1500])
def test_what_the_device_has_room_for_stays_there(memory):
    choice = compare(moving(memory), files_in)
    chosen = choice.plan
    assert chosen.fits and all(chosen.timing.seconds <= plan.timing.seconds
                               for plan in choice.plans.values() if plan.fits)
    share = 550 <= memory < 1500
    assert choice.name.startswith("optimizer 0.") == share and isinstance(choice.offload, zero_jax.Offload) == share
    if share:  # with a granule less on the host it would not fit
        assert choice.offload.fraction < 1 and chosen.free_bytes < 30 + 2
        assert f"with a share of {choice.offload.fraction:g} of the states on the host" in choice.reason
        assert [*choice.plans][-2:] == ["optimizer", "parameters"]


def files_in():
    return zero_jax.Offload(disk="states")


def no_disk():
    raise zero_jax.UsageError("no disk")


@pytest.mark.parametrize("memory", [300, 400, 520, 800, 1500])
@pytest.mark.parametrize("host_memory", [0, 999, 1100, 1200, 1300])
def test_files_are_taken_where_no_memory_is_enough_and_are_never_slower(memory, host_memory):
    plan_of, files = moving(memory, host_memory=host_memory), files_in()
    fixed = {name: plan_of(name) for name in (None, "optimizer", "parameters", "gradients")} | {
        "disk": plan_of(files)}
    choice = compare(plan_of, files_in)
    fitting = {name: plan.timing.seconds for name, plan in fixed.items() if plan.fits}
    assert choice.plan.fits == bool(fitting)
    assert not fitting or choice.plan.timing.seconds <= min(fitting.values())
    assert ("disk" in choice.plans) == (not fixed[None].fits and not fixed["optimizer"].fits)
    # What moves more than "parameters" is compiled where that does not fit.
    assert ("gradients" in choice.plans) == (not any(fixed[name].fits for name in (None, "optimizer", "parameters")))
    assert (choice.name == "gradients") == (memory == 300 and host_memory == 1300)
    if [*fitting] == ["disk"]:
        assert choice.offload == files and choice.reason.startswith("offload=disk is predicted to take 151 s")
        assert "offload=optimizer does not fit" in choice.reason
        # Without a disk that is large enough, or known, none fits.
        assert not compare(moving(memory, host_memory=host_memory, disk_memory=1999), files_in).plan.fits
        without = compare(plan_of, no_disk)
        assert not without.plan.fits and without.refused["disk"] == "no disk"


@pytest.mark.slow
def test_a_target_whose_hosts_have_disks_takes_them_and_another_says_what_they_would_take(tmp_path):
    small = dataclasses.replace(target_of("h100:2"), chip=dataclasses.replace(built_in("h100"), host_memory_bytes=1000))
    options = {"target": small, "precision": "bf16", "memory_bytes": 7_000_000}
    model = nn.Sequential([nn.Embed(256, 256), nn.Dense(1024), nn.Dense(256)])
    choice = zero_jax.choose_offload(model, 2, BATCH, disk=tmp_path / "new", **options)
    assert choice.offload == zero_jax.Offload(disk=tmp_path / "new") and not (tmp_path / "new").exists()
    assert choice.name == "disk" and choice.plan.disk_memory_bytes == 3_840_000_000_000
    states = choice.plan.layout.disk_bytes
    assert 2 * states <= choice.plan.disk_bytes < 2.01 * states and choice.plan.transfers.place == "disk"
    assert f"{choice.plan.disk_bytes:,}" in str(choice) and "offload=optimizer does not fit" in choice.reason
    size = f"{choice.plan.disk_bytes:,} bytes of disk"
    with pytest.raises(zero_jax.UsageError, match=f"offload=disk: not compared.*{size}.*--offload-disk"):
        zero_jax.choose_offload(model, 2, BATCH, **options)
    tiny = dataclasses.replace(small, chip=dataclasses.replace(small.chip, disk_bytes=1000))
    with pytest.raises(zero_jax.UsageError, match="two generations of state in files are .* has 1,000 of disks"):
        zero_jax.choose_offload(model, 2, BATCH, disk=tmp_path, **options | {"target": tiny})


def test_the_live_link_is_measured_once_and_counts_where_it_is_another(monkeypatch):
    rates, seen = iter([10e9, 50e9]), []
    monkeypatch.setattr(placement, "topology_of", lambda devices: target_of("h100:8"))
    monkeypatch.setattr(placement, "measured_link", lambda devices: next(rates))
    monkeypatch.setattr(placement, "examine", lambda step, batch, target, *rest, **limits: (
        seen.append(target.chip.host_link_bandwidth) or moving(10_000)(step.offload)))

    def make(offload):
        return types.SimpleNamespace(mesh=zero_jax.make_mesh(), offload=offload)

    choice = choose_for(make, BATCH, memory_bytes=10_000)
    assert set(seen) == {10e9 / REACHED} and "Measured: devices copy 10 GB/s" in choice.notes[0]
    assert "predicted were 51.2 (a link of 64)" in choice.notes[0]
    assert choose_for(make, BATCH, memory_bytes=10_000).notes == () and seen[-1] == 64e9
    with pytest.raises(StopIteration):
        choose_for(make, BATCH, memory_bytes=10_000)


def test_a_link_is_measured_in_both_directions_and_parts_by_a_quarter():
    assert 1e6 < measured_link(jax.devices()[:2], 2**20) < 1e13
    target = target_of("h100:8")
    predicted = REACHED * target.chip.host_link_bandwidth
    assert with_measured_link(target, 0.76 * predicted) == with_measured_link(target, 1.24 * predicted) == (target, ())
    for factor in (0.74, 1.26):
        other, notes = with_measured_link(target, factor * predicted)
        assert math.isclose(other.chip.host_link_bandwidth, factor * target.chip.host_link_bandwidth) and notes


def with_memory(choice, memory):
    """The plans of `choice` on devices of so many bytes."""
    return {name: dataclasses.replace(plan, memory_bytes=memory) for name, plan in choice.plans.items()}


def never_slower(choice, chosen_of):
    """Whether `chosen_of` takes no placement that is slower than another which fits, for every size of memory."""
    sizes = [plan.needed_bytes for plan in choice.plans.values()]
    for memory in [min(sizes), *(size - 1 for size in sizes if size > min(sizes)), max(sizes), 10 * max(sizes)]:
        plans = with_memory(choice, memory)
        chosen = plans[chosen_of(plans)]
        if not chosen.fits or any(plan.fits and plan.timing.seconds < chosen.timing.seconds for plan in plans.values()):
            return False
    return True


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("target, stage, rows, model", [
    ("v5p:2x2x1", 3, 64, MODEL),
    ("h100:2", 1, 2048, nn.Sequential([nn.Embed(256, 512), nn.Dense(256)]))])
def test_no_fixed_placement_that_fits_is_faster(target, stage, rows, model):
    batch = {name: jax.ShapeDtypeStruct((rows, 32), "int32") for name in BATCH}
    choice = zero_jax.choose_offload(model, stage, batch, target=target, precision="bf16")
    assert list(choice.plans) == ["no", "optimizer", "parameters"][:stage] or stage == 1 and len(choice.plans) == 2
    assert never_slower(choice, lambda plans: choose(candidates(plans))[0].name)
    assert not never_slower(choice, lambda plans: [*plans][-1]), "what offloads the most is slower where less fits"
    assert all(name in str(choice) for name in choice.plans) and f"{choice.plan.needed_bytes:,}" in str(choice)
    step = zero_jax.make_zero_train_step(model, stage, precision="bf16", offload=choice.offload)
    assert step.options.offload is None and choice.name == "no"


@pytest.mark.slow
def test_a_share_of_the_states_is_faster_than_all_of_them_and_fits():
    model, batch = nn.Sequential([nn.Embed(256, 2048), nn.Dense(4096), nn.Dense(2048), nn.Dense(256)]), BATCH
    options = {"target": "h100:2", "precision": "bf16"}
    whole = zero_jax.choose_offload(model, 1, batch, **options)
    none, states = (whole.plans[name].needed_bytes for name in ("no", "optimizer"))
    choice = zero_jax.choose_offload(model, 1, batch, memory_bytes=(none + states) // 2, **options)
    assert choice.name.startswith("optimizer 0.") and choice.plan.fits
    assert choice.plan.timing.seconds < choice.plans["optimizer"].timing.seconds
    assert 0 < choice.plan.layout.host_bytes < choice.plans["optimizer"].layout.host_bytes
    assert not choice.plan.communication.violations and choice.plan.host_bytes == choice.plan.layout.host_bytes
    assert never_slower(choice, lambda plans: choose(candidates(plans))[0].name)


@pytest.mark.slow
def test_gradients_go_to_the_host_where_nothing_else_fits():
    model = gpt2.build(gpt2.Config(12, 512, 8, vocab_size=512, max_length=64, remat=True))
    batch = {name: jax.ShapeDtypeStruct((8, 64), "int32") for name in BATCH}

    @functools.cache
    def plan_of(offload):
        step = zero_jax.make_zero_train_step(model, 3, mesh=mesh_of("h100:8"), precision="bf16", offload=offload)
        return examine(step, batch, target_of("h100:8"))

    def chosen(memory):
        return compare(lambda offload: dataclasses.replace(plan_of(offload), memory_bytes=memory), no_disk)

    params = plan_of("parameters")
    enough, less = chosen(params.needed_bytes), chosen(params.needed_bytes - 1)
    assert enough.name == "parameters" and "gradients" not in enough.plans
    assert less.name == less.offload == "gradients" and less.plan.fits and not less.plan.communication.violations
    assert less.plan.needed_bytes < params.needed_bytes and less.plan.host_bytes > params.host_bytes
    assert less.plan.timing.seconds >= params.timing.seconds
    assert "offload=parameters does not fit" in less.reason


@pytest.mark.slow
def test_plan_compiles_each_placement_and_takes_the_fastest_that_fits(capsys):
    config = PlanConfig(model="gpt2:tiny", target="h100:8", offload="auto", precision="bf16", json=True)
    assert plan_command(config, console=Console(quiet=True))
    report = json.loads(capsys.readouterr().out)
    assert report["placement"]["offload"] == "no" and report["plan"]["transfers"] is None
    others = [float(seconds) for seconds in re.findall(r"takes ([\d.e-]+) s", report["placement"]["reason"])]
    assert len(others) == 2 and all(report["plan"]["timing"]["seconds"] < seconds for seconds in others)
