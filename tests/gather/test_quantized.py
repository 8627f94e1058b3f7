"""Quantised collectives: the numbers of a plain step whose weights an independent quantiser in NumPy rounds."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from support.flat import flat_step
from support.normed_net import losses_of
from support.oracle import by_name, slow
from support.plain_training import linen_functions, nnx_functions
from support.programs import program
from support.rounding import rounded
from support.workloads import token_batches

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax import Communication
from zero_jax.contract import verify as contract
from zero_jax.contract.report import CODES
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.partition import axes_by_dim
from zero_jax.tree import map_named, named_leaves

SGD = optax.sgd(0.5)

# Steps: the weights that the model reads, and the loss and gradient that they have.

NET = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)
ODD = gpt2.Config(3, 20, 2, vocab_size=65, max_length=17)
STEPS = {
    "linen": (gpt2.build(NET), 3, (8,), {}, Communication(weights="int4", block=16)),
    "nnx hpZ": (gpt2_nnx.build(NET), 3, (2, 4), {"hpz_axes": "data_1"}, Communication(weights="int4", block=32)),
    "odd": (gpt2.build(ODD), 3, (5,), {}, Communication(weights="int4", block=16)),
    "tensor": (gpt2.build(NET), 3, (2, 2), {"tensor": 2}, Communication(weights="int4", block=16)),
    "nnx unrolled": (gpt2_nnx.build(dataclasses.replace(NET, scan_layers=False)), 3, (8,), {},
                     Communication(weights="fp8", block=16)),
    "accumulated": (gpt2.build(NET), 3, (4,), {"accumulate": 2}, Communication(weights="int4", block=16)),
    "once": (gpt2.build(NET), 3, (4,), {"accumulate": 2, "reduce": "once"}, Communication(weights="int4", block=16)),
}


def step_of(model, stage, data, options, communication, **more):
    options = dict(options)
    mesh = zero_jax.make_mesh(data if len(data) > 1 else data[0], tensor=options.pop("tensor", 1))
    rules = gpt2.tensor_rules(NET) if "tensor" in mesh.axis_names else ()
    return flat_step(model, stage, mesh=mesh, optimizer=SGD, tensor_rules=rules, communication=communication,
                     **options, **more)


def received(step, layout, params, policy, block=None):
    """What the model reads of master weights in true shapes: matrices rounded shard by shard and layer by layer."""
    def leaf(name, value, stored_shape, sharding):
        stacked = len(layout.reads[name].stacked)
        stored = np.asarray(stored_shape.store(jnp.asarray(value)))
        result = stored.copy()
        layers = stored.shape[0] if stacked else 1
        small = value.ndim - stacked < 2 or stored.size // layers // sharding.num_devices < policy.block
        for index in () if small else sharding.devices_indices_map(stored.shape).values():
            rows = stored[index].reshape(layers, -1)
            rows = np.stack([rounded(row, policy.weights, block or policy.block) for row in rows])
            result[index] = rows.reshape(stored[index].shape)
        return jnp.asarray(stored_shape.load(result))

    return map_named(leaf, params, layout.stored_shapes.params, layout.gradients)


def losses_of_plain_steps(step, layout, model, batches, start, policy, block=None):
    """Losses and last parameters: the loss and its gradient at the weights as received, applied to the master ones."""
    _, apply = (linen_functions(model, zero_jax.next_token_loss, ("dropout",)) if isinstance(model, nn.Module) else
                nnx_functions(model, zero_jax.next_token_loss))
    variables = {} if isinstance(model, nn.Module) else start[1]
    grad = jax.jit(jax.value_and_grad(lambda weights, batch: apply(weights, variables, jax.random.key(0), batch)[0]))
    params, losses = start[0], []
    for batch in batches:
        loss, grads = grad(received(step, layout, params, policy, block), batch)
        losses.append(float(loss))
        params = jax.tree.map(lambda param, grad: param - 0.5 * grad, params, grads)
    return losses, params


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_is_a_plain_step_with_the_rounded_weights(kind):
    """And negative control: weights as they are, or in blocks of twice the size, have other losses."""
    model, *rest = STEPS[kind]
    policy = rest[-1]
    length = 17 if kind == "odd" else 16
    batches = token_batches(3, 10 if kind == "odd" else 16, length)
    step = step_of(model, *rest)
    state = step.init(jax.random.key(0), batches[0])
    layout = step.layout()
    start = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), (step.params(state), state.variables))
    losses, state = losses_of(step, state, batches)
    expected, params = losses_of_plain_steps(step, layout, model, batches, start, policy)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    last = by_name(step.params(state))
    for name, leaf in named_leaves(params):
        np.testing.assert_allclose(last[name], leaf, rtol=0, atol=1e-4, err_msg=name)
    coarser, _ = losses_of_plain_steps(step, layout, model, batches, start, policy, 2 * policy.block)
    exact, _ = losses_of_plain_steps(step, layout, model, batches, start, dataclasses.replace(policy, block=65536))
    for control in (coarser, exact):
        assert np.abs(np.array(control) / expected - 1).max() > 1e-4


@pytest.mark.grid
@pytest.mark.parametrize("kind", [*map(slow, ("linen", "nnx hpZ")), "odd"])
def test_words_give_what_bytes_do(kind, monkeypatch):
    """The weights of a TPU's messages, bit for bit; and negative control: messages have another dtype and size."""
    model, *rest = STEPS[kind]
    batch = token_batches(1, 10 if kind == "odd" else 16, 17 if kind == "odd" else 16)[0]
    gathers = step_of(model, *rest).layout(batch).quantized.gathers
    assert len(gathers) > 3
    for name, codes in gathers.items():
        sizes = [3 if is_loop else local * codes.axes.size(*names)
                 for local, is_loop, names in zip(codes.local, codes.loops, axes_by_dim(codes.spec), strict=True)]
        stored = np.random.default_rng(3).normal(size=sizes).astype(np.float32)
        received, messages = [], []
        for is_tpu in (False, True):
            monkeypatch.setattr(MeshAxes, "is_tpu", is_tpu)
            messages.append(jax.jit(codes.encode)(stored))
            received.append(np.asarray(jax.jit(lambda messages, codes=codes: codes.decode(
                messages, jnp.float32))(messages[-1])))
        np.testing.assert_array_equal(*received, err_msg=name)
        assert received[0].shape == stored.shape and np.abs(received[0] - stored).max() < 0.5
        assert [each.dtype for each in messages] == [jnp.uint8, jnp.uint32] and not messages[1].size % 128


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("model", "gradients", "least", "most"), [
    (gpt2.build(NET), ("int8", "fp4"), 0.05, 0.3), (gpt2_nnx.build(NET), ("int8", "fp4"), 0.05, 0.3),
    (gpt2_nnx.build(NET), "int8", 1e-3, 0.02)], ids=["linen fp4", "nnx fp4", "nnx int8"])
def test_gradients_are_those_of_a_plain_step_to_what_their_format_rounds(model, gradients, least, most):
    """By a step of SGD. Negative controls: no format is within the bounds of the other, and vectors are exact."""
    batch = token_batches(1, 16, 16)[0]
    step = step_of(model, 3, (2, 4), {"hpz_axes": "data_1"}, Communication(gradients=gradients, block=32))
    state = step.init(jax.random.key(0), batch)
    params, variables = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), (step.params(state), state.variables))
    _, apply = (linen_functions(model, zero_jax.next_token_loss, ("dropout",)) if isinstance(model, nn.Module) else
                nnx_functions(model, zero_jax.next_token_loss))
    variables = {} if isinstance(model, nn.Module) else variables
    expected = by_name(jax.jit(jax.grad(lambda params: apply(params, variables, jax.random.key(0), batch)[0]))(params))
    state, _ = step(state, batch)
    last, quantized = by_name(step.params(state)), step.layout().quantized.gradients
    assert len(quantized) > 4 and len(expected.keys() - quantized) > 4
    for name, first in by_name(params).items():
        off = np.linalg.norm((first - last[name]) / 0.5 - expected[name]) / np.linalg.norm(expected[name])
        assert least < off < most if name in quantized else off < 1e-3, (name, off)


# What is sent: the contract.


def sent(found, kind, codes):
    """Bytes of a kind of collective that are codes, or that are none."""
    return sum(c.communication_bytes * c.count for c in found.collectives
               if c.kind == kind and (set(c.dtypes) <= set(CODES)) == codes)


@pytest.mark.grid
@pytest.mark.parametrize("name", [*map(slow, ("cpu stage 3", 
    "h100 stage 3", "h100 stage 3, hpZ", "h100 stage 2", "h100 stage 3, unrolled", "h100 stage 3, odd",
    "h100 stage 3, 5 x 5", "v5e stage 3", "v5p stage 3"))])
def test_weights_and_gradients_travel_as_codes(name):
    """And negative controls: one gather, or one reduction, in float32, all of a kind with twice the bytes, and none.

    Twice the bytes are what the bits of bfloat16 would take under the name of codes.
    """
    found = program(f"{name}, quantised")
    report = found.verify()
    for result in report.results[:2]:
        assert result.budget.code_bytes > 0.9 * result.budget.communication_bytes
        assert result.communication_bytes < 1.04 * result.budget.communication_bytes
    assert sent(found, "all-to-all", True) and not sent(found, "all-to-all", False)

    def widened(c):
        shapes = tuple(("f32", (*shape[1], CODES[shape[0]])) if shape[0] in CODES else shape for shape in c.shapes)
        return dataclasses.replace(c, shapes=shapes, payload_bytes=4 * c.payload_bytes)

    coded = [c for c in found.collectives if set(c.dtypes) & set(CODES)]
    for kind, what in (("all-gather", "parameters"), ("all-to-all", "gradients")):
        largest = max((c for c in coded if c.kind == kind), key=lambda c: c.payload_bytes)
        changed = [widened(c) if c is largest else c for c in found.collectives]
        told = [f"of {what} are {how}" for how in ("sent as", "gathered", "reduced")]
        assert any(text in line for line in contract.check(changed, found.contract).violations for text in told)
        bits_of_bf16 = [dataclasses.replace(c, payload_bytes=2 * c.payload_bytes, shapes=tuple(
            (dtype, (*dims, 2)) if dtype in CODES else (dtype, dims) for dtype, dims in c.shapes))
            if c in coded and c.kind == kind else c for c in found.collectives]
        assert any(f"bytes of {what} are" in line for line in contract.check(
            bits_of_bf16, found.contract).violations)
        missing = [c for c in found.collectives if c.kind != kind]
        assert any(f"bytes of {what} are sent as codes, of" in line
                   for line in contract.check(missing, found.contract).violations)


@pytest.mark.slow
def test_a_format_that_travels_as_bfloat16_is_a_violation():
    lines = program("h100 stage 2, quantised, uncoded").report.violations
    for what in ("parameters", "gradients"):
        assert any(line.startswith("0 bytes of " + what + " are sent as codes") and "exclude" in line for line in lines)


# What is refused, and what is told.


@pytest.mark.parametrize(("arguments", "message"), [
    ({"block": 32}, "quantise nothing"), ({"weights": "int5"}, "is no format"),
    ({"gradients": ("int8", None)}, "is no format"),
    ({"gradients": ("int8",) * 3}, "or a pair"), ({"gradients": 8}, "is no format"), ({"gradients": ()}, "or a pair"),
    ({"weights": "fp4"}, "no format of weights"), ({"weights": "int8", "block": 100}, "a multiple of 16"),
    ({"weights": "int8", "block": 0}, "at least 16"), ({"weights": "int8", "block": 2**17}, "a multiple of 16"),
    ({"weights": "int8", "exclude": "("}, "expression")])
def test_a_policy_that_is_none_is_refused(arguments, message):
    with pytest.raises(zero_jax.UsageError, match=message):
        Communication(**arguments)
    Communication(weights="fp8", gradients=["int8", "fp4"], block=32, exclude="embed")  # negative control


def test_a_pair_of_one_format_is_that_format():
    """On a mesh of one hop nothing is said of nodes."""
    assert Communication(gradients=("int8", "int8")) == Communication(gradients="int8")
    assert "nodes" not in Communication(gradients=("int8", "int8")).text
    assert Communication(gradients=("int8", "fp4")).text.startswith("gradients int8 inside, fp4 across nodes")


@pytest.mark.parametrize(("stage", "data", "communication", "options", "message"), [
    (3, (8,), Communication(weights="int8", exclude=("wpe", "blokcs")), {}, "exclude: 'blokcs' matches no parameter"),
    (3, (8,), Communication(weights="int8", block=2**16), {},
     r"weights='int8' would change nothing: .*down/kernel \(fewer"),
    (2, (8,), Communication(gradients="fp4", exclude=""), {}, "gradients='fp4' would change nothing: .*excluded"),
    (3, (8,), "int8", {}, "is a str")])
def test_what_cannot_take_effect_is_refused(stage, data, communication, options, message):
    with pytest.raises(zero_jax.UsageError, match=message):
        step_of(gpt2.build(NET), stage, data, options, communication).layout(token_batches(1, 16)[0])


def test_what_is_sent_as_it_is_is_listed():
    """And negative control: without a policy nothing is said of it."""
    batch = token_batches(1, 16)[0]
    policy = Communication(weights="int8", gradients="int4", block=256, exclude="wpe")
    layout = step_of(gpt2.build(NET), 3, (8,), {}, policy).layout(batch)
    text = layout.describe()
    assert "communication: weights int8, gradients int4, blocks of 256; " in text
    assert "wpe/embedding (excluded)" in text and "ln_f/scale (a vector)" in text
    assert "blocks/proj/kernel (fewer than 256 values on a device)" in text and "wte" not in text.split("sent as")[1]
    assert layout.quantized.gradients == layout.quantized.gathers.keys() >= {"wte/embedding", "blocks/up/kernel"}
    assert "communication" not in step_of(gpt2.build(NET), 3, (8,), {}, None).layout(batch).describe()


def test_the_copy_of_stage_2_is_what_numpy_rounds():
    """Bit for bit, in bfloat16; and negative control: a cast is another copy."""
    policy = Communication(weights="int4", block=16)
    step = step_of(gpt2.build(NET), 2, (2, 4), {"precision": "bf16"}, policy)
    state = step.init(jax.random.key(0), token_batches(1, 16)[0])
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), step.params(state))
    copies, expected = by_name(state.weights), by_name(received(step, step.layout(), params, policy))
    for name, leaf in expected.items():
        np.testing.assert_array_equal(copies[name], leaf.astype(ml_dtypes.bfloat16), err_msg=name)
    assert (copies["wte/embedding"] != by_name(params)["wte/embedding"].astype(ml_dtypes.bfloat16)).any()
