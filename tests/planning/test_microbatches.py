"""How often a step of several microbatches gathers and reduces, where that is left open."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.flat import flat_step
from support.targets import mesh_of, target_devices

from models import gpt2
from zero_jax.cli.chosen_microbatches import by_hand, with_chosen_microbatches
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.errors import UsageError
from zero_jax.planning.microbatches import choose_microbatches, sent_bytes
from zero_jax.xla.targets import target_of

CONFIG = gpt2.Config(4, 256, 4, vocab_size=512, max_length=64)
OPEN = PlanConfig(model="gpt2:tiny", target="h100:8", batch_per_device=8, accumulate=8)


def step_of(text, stage, **options):
    """(The step of 8 microbatches, its batch)."""
    mesh = mesh_of(text)
    tokens = jax.ShapeDtypeStruct((8 * mesh.size, 64), jnp.int32)
    return flat_step(gpt2.build(CONFIG), stage, mesh=mesh, precision="bf16", accumulate=8,
                                         **options), {"inputs": tokens, "targets": tokens}


def layout(text="h100:8", stage=3):
    step, batch = step_of(text, stage)
    return step.layout(batch)


def chosen(text="h100:8", stage=3, *, memory=None, network=None, **options):
    """(gather, reduce) on a target whose memory or network is another."""
    target, chip = target_of(text), target_of(text).chip
    chip = dataclasses.replace(chip, memory_bytes=memory or chip.memory_bytes,
                               network_bandwidth=network or chip.network_bandwidth)
    choice, why = choose_microbatches(layout(text, stage), 8, dataclasses.replace(target, chip=chip), **options)
    assert why.startswith("Of 8 microbatches: gather=") and f"{choice.sent:.3g} bytes a parameter" in why
    return choice.gather, choice.reduce


def test_bytes_a_parameter_are_those_of_the_table():
    """Of microbatches.py in scripts/tables, measured: 42.0, 15.8, 29.8 and 3.5. Control: other stages' are others."""
    sent = {pair: sent_bytes(layout(), 8, *pair) for pair in (
        ("use", "every"), ("step", "every"), ("use", "once"), ("step", "once"))}
    assert [*sent.values()] == [42.0, 15.75, 29.75, 3.5]
    for stage in (0, 2, 3):
        step, batch = step_of("h100:8", stage)
        budgets = step.contract(batch).budgets[:2]  # without metrics and other small sums
        assert sum(each.communication_bytes for each in budgets) / step.layout(batch).num_params == pytest.approx(
            sent_bytes(layout(stage=stage), 8, "use", "every"))


def test_what_is_predicted_fastest_is_taken():
    """Where links are slow little is sent. Control: within a host sums of whole gradients cost more than they save."""
    assert chosen("h100:8x1", network=5e9) == ("step", "once")
    assert chosen() == ("use", "every")


def test_what_does_not_fit_is_not_taken():
    """With room for the copy alone that alone; with room for neither, neither. Control: with all of the memory both."""
    slow = {"text": "h100:8x1", "network": 5e9}
    params = layout("h100:8x1").num_params
    state = layout("h100:8x1").device_bytes
    assert chosen(**slow, memory=2 * (state + 11 * params)) == ("step", "once")
    assert chosen(**slow, memory=2 * (state + 3 * params)) == ("step", "every")
    assert chosen(**slow, memory=2 * state) == ("use", "every")
    assert chosen(**slow, allowed=lambda gather, reduce: gather == "use") == ("use", "once")
    assert chosen(**slow, stage=2) == ("use", "once"), "nothing is gathered in a microbatch"


def test_what_is_not_known_is_left_as_it_needs_least():
    """Simulated devices have no rates; one device sends nothing."""
    choice, why = choose_microbatches(layout("cpu"), 8, None)
    assert choice is None and "nothing is known of these devices" in why
    assert choose_microbatches(layout("h100:1"), 8, target_of("h100:1")) == (None, "")


def test_the_command_line_says_what_it_takes():
    """Both options are open by themselves.

    Controls: what is given is kept, what is refused is not taken, and a step of one batch makes no layout.
    """
    target_devices("h100:8")
    settled, why = with_chosen_microbatches(OPEN, layout)
    assert (settled.gather, settled.reduce) == ("use", "every") and "ms" in why
    slow = dataclasses.replace(OPEN, target="v100-32gb:8x1", seq_len=64)
    settled, _ = with_chosen_microbatches(slow, lambda: layout("v100-32gb:8x1"))
    assert (settled.gather, settled.reduce) == ("step", "once")
    settled, _ = with_chosen_microbatches(dataclasses.replace(slow, gather="use"), lambda: layout("v100-32gb:8x1"))
    assert (settled.gather, settled.reduce) == ("use", "once")
    settled, why = with_chosen_microbatches(
        dataclasses.replace(slow, offload="parameters"), lambda: layout("v100-32gb:8x1"))
    assert (settled.gather, settled.reduce) == ("use", "every") and "does not fit or go together" in why
    with pytest.raises(UsageError):
        dataclasses.replace(slow, offload="parameters", gather="step")
    single = dataclasses.replace(OPEN, accumulate=1)
    assert with_chosen_microbatches(single, lambda: pytest.fail("a layout")) == (by_hand(single), "")
