"""`gather="step"`: stage 3 whose microbatches share one gather of the parameters, and what decides for it."""

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
from zero_jax.contract import verify as contract
from zero_jax.layout import step_weights
from zero_jax.tree import named_leaves

UNEVEN = gpt2.Config(2, 36, 2, vocab_size=67, max_length=16)  # no dim of its matrices divides by 8
FLAVOURS = {"linen": gpt2.build, "nnx": gpt2_nnx.build}
BATCHES = token_batches(2, size=32, vocab=67)
SGD = optax.sgd(0.3, momentum=0.9)


@functools.cache
def one_device(flavour):
    return train(FLAVOURS[flavour](UNEVEN), 0, 1, batches=BATCHES, optimizer=SGD)


def differences(flavour, **options):
    """Of losses and parameters, from one device that takes the batch at once."""
    many = train(FLAVOURS[flavour](UNEVEN), 3, 8, batches=BATCHES, optimizer=SGD, accumulate=4, **options)
    one = one_device(flavour)
    return loss_difference(many, one), param_difference(many, one)


@pytest.mark.grid
@pytest.mark.parametrize("flavour, reduce", [
    slow("linen", "once"), slow("nnx", "every"), slow("linen", "every"), slow("nnx", "once")])
def test_it_has_the_numbers_of_one_device(flavour, reduce):
    loss, params = differences(flavour, reduce=reduce, gather="step")
    assert loss < 1e-6 and params < 3e-6


@pytest.mark.slow
def test_a_copy_that_is_no_copy_is_caught(monkeypatch):
    """Negative control: weights of which the copies have other bits."""
    gather_copy = step_weights.gather_copy
    monkeypatch.setattr(step_weights, "gather_copy", lambda *args: jax.tree.map(
        lambda copy: copy.astype(jnp.bfloat16).astype(copy.dtype), gather_copy(*args)))
    assert differences("linen", gather="step", reduce="once")[1] > 3e-5


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
def test_a_gather_in_each_microbatch_breaks_the_promise():
    """Negative control: what `use` sends."""
    once, each = (program(f"h100 stage 3, {name}reduced once") for name in ("gathered once, ", ""))
    with pytest.raises(zero_jax.ContractError, match="bytes of parameters are gathered"):
        contract.verify(each.text, once.contract)


@pytest.mark.slow
def test_gathers_are_missed():
    """Negative controls: the same gathers in each of eight iterations, and none."""
    once = program("h100 stage 3, gathered once, reduced once")
    gathers = [dataclasses.replace(c, count=8 * c.count, in_loop=True) if c.kind == "all-gather" else c
               for c in once.collectives]
    with pytest.raises(zero_jax.ContractError, match="bytes of parameters are gathered"):
        contract.verify(gathers, once.contract)
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
def test_the_copy_takes_two_bytes_per_parameter():
    """The temporaries that a step adds for it; gradients in the compute dtype are smaller than the float32 ones."""
    once, each = (program(f"h100 stage 3, {name}reduced once") for name in ("gathered once, ", ""))
    assert once.contract.copy_bytes == 2 * once.num_params and each.contract.copy_bytes == 0
    assert once.memory.temp_size_in_bytes - each.memory.temp_size_in_bytes < 2.2 * once.num_params


def layout(model, target, stage=3, *, mesh=None, rows=8, **options):
    mesh = mesh or mesh_of(target)
    step = flat_step(model, stage, mesh=mesh, precision="bf16", **{"accumulate": 2, **options})
    return step.layout({name: jax.ShapeDtypeStruct((rows * mesh.size, 16), jnp.int32)
                        for name in ("inputs", "targets")})


def test_the_layout_says_what_is_gathered_once():
    """Control: nothing is said where parameters are gathered at each use."""
    made = layout(gpt2.build(UNEVEN), "", mesh=zero_jax.make_mesh(8), gather="step")
    assert "parameters are gathered once a step: state, the gathered copy of" in made.describe()
    assert "parameters are gathered" not in layout(gpt2.build(UNEVEN), "", mesh=zero_jax.make_mesh(8)).describe()


@pytest.mark.parametrize("gather", ["twice", 1, "auto"])
def test_what_cannot_be_is_refused(gather):
    with pytest.raises(zero_jax.UsageError, match=f"gather={gather!r}: give"):
        flat_step(gpt2.build(UNEVEN), 3, accumulate=2, gather=gather)


def test_a_copy_that_does_not_fit_is_refused():
    config = dataclasses.replace(gpt2.PRESETS["13b"], max_length=16)
    with pytest.raises(zero_jax.UsageError, match=r"gather=\"step\": state, the .* \(TPU v5 lite\): give hpz"):
        layout(gpt2.build(config), "v5e:2x4", gather="step")
