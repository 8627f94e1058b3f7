"""How often a step of several microbatches gathers and reduces, where that is left open."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.flat import flat_step
from support.targets import mesh_of, target_devices

from models import gpt2
from zero_jax.cli.chosen import SHARE, with_chosen_microbatches
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.planning.ranking import decoder_of
from zero_jax.errors import UsageError
from zero_jax.planning.division import Division, estimate
from zero_jax.xla.process_memory import RESERVED
from zero_jax.xla.targets import target_of

CONFIG = gpt2.Config(4, 256, 4, vocab_size=512, max_length=64)
OPEN = PlanConfig(model="gpt2:tiny", target="h100:8", batch_per_device=8, accumulate=8)
SLOW = dataclasses.replace(OPEN, target="v100-32gb:8x1", seq_len=64)


def step_of(text, stage=3, **options):
    """(The step of 8 microbatches, its batch)."""
    mesh = mesh_of(text)
    tokens = jax.ShapeDtypeStruct((8 * mesh.size, 64), jnp.int32)
    return flat_step(gpt2.build(CONFIG), stage, mesh=mesh, precision="bf16", accumulate=8,
                                         **options), {"inputs": tokens, "targets": tokens}


def chosen(config=OPEN, *, memory=None, target="", sizes=CONFIG, length=64):
    """((gather, reduce), why) of a model and a target; memory: that the formula may just take."""
    def layout():
        step, batch = step_of(config.target, config.stage)
        return step.layout(batch)

    target = target_of(config.target) if target == "" else target
    if memory is not None:
        memory = RESERVED + round(1.05 * memory / SHARE)
        target = dataclasses.replace(target, chip=dataclasses.replace(target.chip, memory_bytes=memory))
    choice = dataclasses.replace(find_model("gpt2:tiny"), config=sizes)
    settled, why = with_chosen_microbatches(config, layout, choice, target, batch=64, length=length)
    return (settled.gather, settled.reduce), why


@pytest.mark.parametrize("pair", [("use", "every"), ("step", "every"), ("use", "once"), ("step", "once")])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bytes_by_formula_are_those_of_the_contract(stage, pair):
    """Where nothing but sending takes time. Control: of another stage they are others."""
    gather, reduce = pair
    if gather == "step" and stage < 3:
        return
    step, batch = step_of("h100:8", stage, gather=gather, reduce=reduce)
    params = step.layout(batch).num_params

    def sent(stage):
        return estimate(decoder_of(CONFIG, params), Division(
            stage=stage, data=8, accumulate=8, gather=gather, reduce=reduce), batch=64, length=64,
            chip=target_of("h100:8").chip, collective=lambda *_: (0.0, 1.0)).exposed

    budgets = step.contract(batch).budgets[:2]  # without metrics and other small sums
    assert sent(stage) == pytest.approx(sum(each.communication_bytes for each in budgets), rel=1e-3)
    assert gather == "step" or sent(2 if stage == 3 else 3) != pytest.approx(sent(stage), rel=0.05)


def test_what_is_predicted_fastest_is_taken():
    """Where links are slow little is sent. Control: within a host sums of whole gradients cost more than they save."""
    pair, why = chosen(SLOW)
    assert pair == ("step", "once") and why.startswith("Of 8 microbatches: gather=step, reduce=once: ")
    pair, why = chosen()
    assert pair == ("use", "every") and why.count(" ms and ") == 6 and "gather=forward, reduce=once" in why


def test_what_does_not_fit_is_not_taken():
    """With room for the copy alone that alone; with room for nothing what needs least. Control: with all both."""
    step, batch = step_of(SLOW.target)
    params = step.layout(batch).num_params
    least = estimate(decoder_of(CONFIG, params), Division(data=8, accumulate=8), batch=64, length=64,
                        chip=target_of(SLOW.target).chip, collective=lambda *_: (0.0, 1e9)).device_bytes
    assert chosen(SLOW, memory=least + 9 * params)[0] == ("step", "once")
    pair, why = chosen(SLOW, memory=least + 2 * params)
    assert pair == ("step", "every") and "do not fit or go together" in why
    pair, why = chosen(SLOW, memory=least / 4)
    assert pair == ("use", "every") and "none fits in 80% of the memory by formula; what needs least" in why
    pair, _ = chosen(dataclasses.replace(SLOW, stage=2))
    assert pair == ("use", "once"), "nothing is gathered in a microbatch"


def test_what_is_not_known_is_left_as_it_needs_least():
    """Controls of what is known are above; one device sends nothing, and a step of one batch makes no layout."""
    other = dataclasses.make_dataclass("Sizes", ["num_layers", "width", "num_heads"])(1, 2, 3)
    for words, options in {"nothing is known of these devices": {"target": None},
                           "takes no sequences": {"length": None},
                           "the model's config has no vocab_size": {"sizes": other}}.items():
        pair, why = chosen(SLOW, **options)
        assert pair == ("use", "every") and words in why and why.endswith("what needs least is taken.")
    assert chosen(dataclasses.replace(OPEN, target="h100:1")) == (("use", "every"), "")
    single = dataclasses.replace(OPEN, accumulate=1)
    assert with_chosen_microbatches(single, lambda: pytest.fail("a layout"), None, None, batch=8, length=64) == (
        single.with_microbatches(), "")


def test_what_is_given_is_kept_and_what_is_refused_is_not_taken():
    """Both options are open by themselves. Control: without the option that refuses it, "step" is taken."""
    target_devices(SLOW.target)
    assert chosen(dataclasses.replace(SLOW, gather="use"))[0] == ("use", "once")
    pair, why = chosen(dataclasses.replace(SLOW, offload="parameters"))
    assert pair == ("use", "every") and "do not fit or go together" in why
    with pytest.raises(UsageError):
        dataclasses.replace(SLOW, offload="parameters", gather="step")
