"""`gather="forward"` and `"step"`: stage 3 that gathers once a microbatch or a step, and keeps what it gathered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.flat import flat_step
from support.oracle import loss_difference, param_difference, slow, train
from support.programs import program
from support.targets import mesh_of
from support.workloads import token_batches

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.train_config import TrainConfig
from zero_jax.contract import verify as contract
from zero_jax.layout import step_weights
from zero_jax.tree import named_leaves
from zero_jax.views import local

UNEVEN = gpt2.Config(2, 36, 2, vocab_size=67, max_length=16)  # no dim of its matrices divides by 8
FLAVOURS = {"linen": gpt2.build, "nnx": gpt2_nnx.build}
BATCHES = token_batches(2, size=32, vocab=67)
SGD = optax.sgd(0.3, momentum=0.9)
FORWARD, ONCE = "h100 stage 3, gathered in forward", "h100 stage 3, gathered once, reduced once"


@functools.cache
def one_device(flavour):
    return train(FLAVOURS[flavour](UNEVEN), 0, 1, batches=BATCHES, optimizer=SGD)


def differences(flavour, **options):
    """Of losses and parameters, from one device that takes the batch at once."""
    many = train(FLAVOURS[flavour](UNEVEN), 3, 8, batches=BATCHES, optimizer=SGD, **options)
    one = one_device(flavour)
    return loss_difference(many, one), param_difference(many, one)


@pytest.mark.grid
@pytest.mark.parametrize("flavour, options", [
    slow("linen", {"gather": "forward", "remat": "full"}),
    slow("linen", {"gather": "forward", "accumulate": 2, "reduce": "once"}),
    slow("nnx", {"gather": "forward", "accumulate": 4, "remat": zero_jax.Remat(every=2)}),
    *(slow(flavour, {"gather": "step", "accumulate": 4, "reduce": reduce})
      for flavour in FLAVOURS for reduce in ("once", "every"))])
def test_it_has_the_numbers_of_one_device(flavour, options):
    loss, params = differences(flavour, **options)
    assert loss < 1e-6 and params < 3e-6


def rounded(copy):
    return copy.astype(jnp.bfloat16).astype(copy.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["forward", "step"])
def test_weights_with_other_bits_are_caught(gather, monkeypatch):
    """Negative control."""
    gathered, gather_copy = local.gathered, step_weights.gather_copy
    if gather == "step":
        monkeypatch.setattr(step_weights, "gather_copy", lambda *args: jax.tree.map(rounded, gather_copy(*args)))
    else:
        monkeypatch.setattr(local, "gathered", lambda value, *args, **kwargs: gathered(rounded(value), *args, **kwargs))
    options = {"remat": "full"} if gather == "forward" else {"accumulate": 4, "reduce": "once"}
    assert differences("linen", gather=gather, **options)[1] > 3e-5


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["every", "once"])
@pytest.mark.parametrize("options", [{"hpz_axes": "data_1"}, {"frozen": ("wte", "up")}, {"remat": "full"}])
def test_on_a_factored_mesh(options, reduce):
    """Where the copy is sharded inside the node, too, and where some parameters are not trained."""
    options = {"mesh": zero_jax.make_mesh((2, 4)), "optimizer": SGD, "accumulate": 4, "reduce": reduce, **options}
    one = {name: value for name, value in options.items() if name == "frozen"}
    steps = (flat_step(gpt2.build(UNEVEN), 3, gather="step", **options),
             flat_step(gpt2.build(UNEVEN), 0, mesh=zero_jax.make_mesh(1), optimizer=SGD, **one))
    states = [step.init(jax.random.key(0), BATCHES[0]) for step in steps]
    for batch in BATCHES:
        states = [step(state, batch)[0] for step, state in zip(steps, states, strict=True)]
    sharded, whole = (named_leaves(step.params(state)) for step, state in zip(steps, states, strict=True))
    for (name, leaf), (_, like) in zip(sharded, whole, strict=True):
        np.testing.assert_allclose(leaf, like, atol=3e-6, err_msg=name)


@pytest.mark.slow
def test_backward_gathers_nothing():
    """In units of psi elements of bf16 on a ring: 1 in place of 2, though the model rematerialises its blocks."""
    kept, again = program(FORWARD), program("h100 stage 3, remat")
    unit = kept.num_params * 2 * (1 - 1 / 8)
    sent = [found.verify().results[0].communication_bytes / unit for found in (kept, again)]
    assert sent == pytest.approx([1, 2], rel=0.01)
    with pytest.raises(zero_jax.ContractError, match="bytes of parameters are gathered"):  # negative control
        contract.verify(again.text, kept.contract)


@pytest.mark.grid
@pytest.mark.parametrize("target, reduce", [("h100", "once"), slow("h100", "every"), slow("v5e", "once"),
                                            slow("v5e", "every")])
def test_parameters_are_sent_once(target, reduce):
    """In units of psi elements of bf16 on a ring: 1 in place of 16, which leaves 2 of 17 where gradients are, too."""
    found = program(f"{target} stage 3, gathered once, reduced {reduce}")
    unit = found.num_params * 2 * (1 - 1 / 8)
    gather, summed, _ = found.verify().results
    assert abs(gather.communication_bytes / unit - 1) < 0.01
    assert abs(summed.communication_bytes / unit / {"every": 8, "once": 1}[reduce] - 1) < 0.06


@pytest.mark.slow
def test_more_or_fewer_gathers_break_the_promise():
    """Negative controls: what `use` sends, the same gathers in each of eight iterations, and none."""
    once = program(ONCE)
    gathers = [dataclasses.replace(c, count=8 * c.count, in_loop=True) if c.kind == "all-gather" else c
               for c in once.collectives]
    for more in (program("h100 stage 3, reduced once").text, gathers):
        with pytest.raises(zero_jax.ContractError, match="bytes of parameters are gathered"):
            contract.verify(more, once.contract)
    nothing = [c for c in once.collectives if c.kind != "all-gather"]
    with pytest.raises(zero_jax.ContractError, match="read without a gather"):
        contract.verify(nothing, once.contract)


@pytest.mark.slow
def test_the_copy_may_stay_sharded_inside_the_node():
    """Across nodes parameters are sent once, inside twice in each microbatch; the control sends all of it each time."""
    found = program("h100 stage 3, gathered once inside the node")
    gather = found.verify().results[0]
    across = sum(c.communication_bytes * c.count for c in gather.collectives if "data_0" in c.axes(found.contract.mesh))
    assert across / (2 * found.num_params) == pytest.approx(1 / 4 - 1 / 8, rel=0.02)
    inside = gather.communication_bytes - across
    assert inside / (2 * found.num_params) == pytest.approx(8 * 2 * (1 - 1 / 4), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kept, again", [(FORWARD, "h100 stage 3, remat"), (ONCE, "h100 stage 3, reduced once")])
def test_the_copy_takes_two_bytes_per_parameter(kept, again):
    """As at stage 2, of the temporaries; the state is stage 3's, and gradients are no larger than in float32."""
    kept, again = program(kept), program(again)
    assert kept.state_bytes == again.state_bytes
    assert kept.contract.copy_bytes == 2 * kept.num_params and again.contract.copy_bytes == 0
    assert kept.memory.temp_size_in_bytes - again.memory.temp_size_in_bytes < 2.2 * kept.num_params


@pytest.mark.slow
def test_on_tpus_gathers_are_beside_compute():
    """At stages 1 and 2 they come last, nearly all with no product beside them: the control, which sends as much."""
    def beside(found):
        gathers = [each for each in found.collectives if each.kind == "all-gather"]
        sent = [each.communication_bytes * each.count * bool(each.overlapped_flops) for each in gathers]
        return sum(sent) / sum(each.communication_bytes * each.count for each in gathers)

    forward, last = program("v5p stage 3, gathered in forward"), program("v5p stage 2")
    assert beside(last) < 0.15 and beside(forward) > 0.25
    assert forward.sent() == pytest.approx(last.sent(), rel=0.02)


def layout(model, mesh, **options):
    step = flat_step(model, 3, mesh=mesh, precision="bf16", **options)
    return step.layout({name: jax.ShapeDtypeStruct((8 * mesh.size, 16), jnp.int32) for name in ("inputs", "targets")})


def test_the_layout_says_what_is_gathered_once():
    """Control: nothing is said where parameters are gathered at each use."""
    made, mesh = gpt2.build(UNEVEN), zero_jax.make_mesh(8)
    once = layout(made, mesh, accumulate=2, gather="step").describe()
    assert "parameters are gathered once a step: state, the gathered copy of" in once
    forward = layout(made, mesh, gather="forward")
    stored = sum(leaf.size for leaf in jax.tree.leaves(forward.state.params))
    assert forward.kept_bytes == 2 * stored
    assert f"gathered in forward, and kept for backward: {2 * stored:,} bytes on each device" in forward.describe()
    at_use = layout(made, mesh, accumulate=2).describe()
    assert "parameters are gathered" not in at_use and "gathered in forward" not in at_use


def test_a_copy_that_does_not_fit_is_refused():
    config = dataclasses.replace(gpt2.PRESETS["13b"], max_length=16)
    with pytest.raises(zero_jax.UsageError, match=r"gather=\"step\": state, the .* \(TPU v5 lite\): give hpz"):
        layout(gpt2.build(config), mesh_of("v5e:2x4"), accumulate=2, gather="step")


def test_the_command_line_takes_it_at_stage_3():
    assert TrainConfig(stage=3, gather="forward").gather == PlanConfig(stage=3, gather="forward").gather == "forward"
