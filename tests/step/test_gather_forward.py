"""`gather="forward"`: stage 3 whose backward takes the gathered weights from forward, and sends what stage 2 does."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from support.flat import flat_step
from support.oracle import loss_difference, param_difference, slow, train
from support.programs import asynchronous, program
from support.workloads import token_batches

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.train_config import TrainConfig
from zero_jax.contract import verify as contract
from zero_jax.views import local

CONFIG = gpt2.Config(2, 36, 2, vocab_size=67, max_length=16)  # no dim of its matrices divides by 8
FLAVOURS = {"linen": gpt2.build, "nnx": gpt2_nnx.build}
BATCHES = token_batches(2, size=32, vocab=67)
SGD = optax.sgd(0.3, momentum=0.9)


@functools.cache
def one_device(flavour):
    return train(FLAVOURS[flavour](CONFIG), 0, 1, batches=BATCHES, optimizer=SGD)


def differences(flavour, **options):
    """Of losses and parameters, from one device that takes the batch at once."""
    many = train(FLAVOURS[flavour](CONFIG), 3, 8, batches=BATCHES, optimizer=SGD, gather="forward", **options)
    one = one_device(flavour)
    return loss_difference(many, one), param_difference(many, one)


@pytest.mark.grid
@pytest.mark.parametrize("flavour, options", [
    slow("linen", {"remat": "full"}), slow("linen", {"accumulate": 2, "reduce": "once"}),
    slow("nnx", {"accumulate": 4, "remat": zero_jax.Remat(every=2)})])
def test_it_has_the_numbers_of_one_device(flavour, options):
    loss, params = differences(flavour, **options)
    assert loss < 1e-6 and params < 3e-6


@pytest.mark.slow
def test_weights_with_other_bits_are_caught(monkeypatch):
    """Negative control."""
    original = local.gathered
    monkeypatch.setattr(local, "gathered", lambda value, *args, **kwargs: original(
        value.astype(jnp.bfloat16).astype(value.dtype), *args, **kwargs))
    assert differences("linen", remat="full")[1] > 3e-5


@pytest.mark.slow
def test_backward_gathers_nothing():
    """In units of psi elements of bf16 on a ring: 1 in place of 2, though the model rematerialises its blocks."""
    kept, again = (program(f"h100 stage 3, {name}") for name in ("gathered in forward", "remat"))
    unit = kept.num_params * 2 * (1 - 1 / 8)
    sent = [found.verify().results[0].communication_bytes / unit for found in (kept, again)]
    assert sent == pytest.approx([1, 2], rel=0.01)
    with pytest.raises(zero_jax.ContractError, match="bytes of parameters are gathered"):  # negative control
        contract.verify(again.text, kept.contract)


@pytest.mark.slow
def test_it_takes_the_memory_of_stage_2():
    """State is stage 3's, and within a step two bytes per parameter come to the temporaries."""
    kept, again = (program(f"h100 stage 3, {name}") for name in ("gathered in forward", "remat"))
    assert kept.state_bytes == again.state_bytes
    assert kept.contract.copy_bytes == 2 * kept.num_params and again.contract.copy_bytes == 0
    assert kept.memory.temp_size_in_bytes - again.memory.temp_size_in_bytes < 2.2 * kept.num_params


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_on_tpus_gathers_are_beside_compute(chip):
    """At stages 1 and 2 they come last, nearly all with no product beside them: the control below sends as much."""
    found = program(f"{chip} stage 3, gathered in forward")
    assert not found.report.violations
    assert asynchronous(f"{chip} stage 3, gathered in forward") >= {"v5p": 0.98, "v6e": 0.97}[chip]


@pytest.mark.slow
def test_at_the_end_of_a_step_they_are_not():
    """The control."""
    def beside(found):
        gathers = [each for each in found.collectives if each.kind == "all-gather"]
        sent = [each.communication_bytes * each.count * bool(each.overlapped_flops) for each in gathers]
        return sum(sent) / sum(each.communication_bytes * each.count for each in gathers)

    forward, last = program("v5p stage 3, gathered in forward"), program("v5p stage 2")
    assert beside(last) < 0.15 and beside(forward) > 0.25
    assert forward.sent() == pytest.approx(last.sent(), rel=0.02)


def test_the_layout_tells_its_bytes():
    mesh = zero_jax.make_mesh(8)
    step = flat_step(gpt2.build(CONFIG), 3, mesh=mesh, precision="bf16", gather="forward")
    layout = step.layout(BATCHES[0])
    stored = sum(leaf.size for leaf in jax.tree.leaves(layout.state.params))
    assert layout.kept_bytes == 2 * stored
    assert f"gathered in forward, and kept for backward: {2 * stored:,} bytes on each device" in layout.describe()


def test_the_command_line_takes_it_at_stage_3():
    assert TrainConfig(stage=3, gather="forward").gather == PlanConfig(stage=3, gather="forward").gather == "forward"
