"""Quantised collectives: the numbers of a plain step whose weights an independent quantiser in NumPy rounds."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.oracle import by_name, slow
from support.plain_training import linen_functions, nnx_functions
from support.programs import program
from support.workloads import token_batches

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax import Communication
from zero_jax.contract import verify as contract
from zero_jax.contract.report import CODES
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.quantized.messages import GRADIENT_NAMES, BlockFormat
from zero_jax.sharding.quantized.reduce import reduce_quantized
from zero_jax.tree import map_named, named_leaves

LIMITS = {"int8": 127, "fp8": 448, "int4": 7, "fp4": 1}
SGD = optax.sgd(0.5)


def rounded(values, name, block):
    """What a receiver has of a flat float32 array that was sent in blocks: in NumPy, and nothing of the library."""
    number = -(-values.size // block)
    size = -(-values.size // number)
    size += size % 2
    blocks = np.zeros(number * size, np.float32)
    blocks[:values.size] = values
    blocks = blocks.reshape(number, size)
    scales = (np.abs(blocks).max(1) * np.float32(1 / LIMITS[name])).astype(np.float32)
    short = scales.astype(ml_dtypes.bfloat16)
    short = np.where(short.astype(np.float32) < scales, np.nextafter(short, ml_dtypes.bfloat16(np.inf)), short)
    scales = np.where(scales < 2.0**-126, 0, short.astype(np.float32))[:, None]
    codes = np.clip(blocks / np.where(scales == 0, 1, scales), -LIMITS[name], LIMITS[name])
    if name == "fp4":  # the nearest power of two, of at least 2**-6; 0 below half of that
        fraction, exponent = np.frexp(np.abs(codes))
        nearest = np.maximum(np.ldexp(1.0, exponent - (fraction <= 0.75)), 2.0**-6)
        codes = np.copysign(np.where(np.abs(codes) <= 2.0**-7, 0, nearest), codes)
    else:
        codes = codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) if name == "fp8" else np.rint(codes)
    return (codes * scales).reshape(-1)[:values.size].astype(np.float32)


VALUES = np.random.default_rng(0).normal(size=(3, 700)).astype(np.float32) * np.float32(10.0) ** np.arange(-3, 4, 3)[
    :, None].astype(np.float32)


@pytest.mark.parametrize("block", [16, 256])
@pytest.mark.parametrize("name", GRADIENT_NAMES)
def test_a_message_is_what_numpy_makes_of_it(name, block):
    """And negative control: blocks of another size have other values."""
    codes = BlockFormat(name, block)
    message = jax.jit(codes.encode)(VALUES)
    assert message.dtype == jnp.uint8 and message.shape == (3, codes.message_bytes(700))
    received = np.asarray(jax.jit(lambda message: codes.decode(message, 700, jnp.float32))(message))
    expected = np.stack([rounded(row, name, block) for row in VALUES])
    np.testing.assert_array_equal(received, expected)
    assert np.max(np.abs(received - VALUES) / np.abs(VALUES).max(1, keepdims=True)) <= codes.relative_error
    assert not np.array_equal(expected, np.stack([rounded(row, name, 128) for row in VALUES]))


def test_fp4_keeps_small_values_to_a_third():
    """Down to the half between its two smallest codes; and negative control: int4 has zeros of most of them."""
    values = np.concatenate([[1], np.geomspace(1.01 * 0.75 / 64, 1, 255) * np.resize([1, -1], 255)]).astype(np.float32)
    messages = {name: jax.jit(BlockFormat(name, 256).encode)(values) for name in ("fp4", "int4")}
    received = {name: np.asarray(jax.jit(lambda message, name=name: BlockFormat(name, 256).decode(
        message, 256, jnp.float32))(message)) for name, message in messages.items()}
    assert np.max(np.abs(received["fp4"] / values - 1)) < 0.34
    assert (received["int4"] == 0).mean() > 0.4
    assert messages["fp4"].shape == messages["int4"].shape == (256 / 2 + 2,)


@pytest.mark.parametrize("name", GRADIENT_NAMES)
def test_zeros_stay_and_what_is_not_finite_is_found(name):
    codes = BlockFormat(name, 16)
    rows = np.zeros((4, 32), np.float32)
    rows[1, 3], rows[2, 20], rows[3] = np.nan, -np.inf, 1e-40  # subnormal: a compiler may flush it
    received = np.asarray(jax.jit(lambda rows: codes.decode(codes.encode(rows), 32, jnp.float32))(rows))
    assert not received[0].any() and not received[3].any()
    assert not np.isfinite(received[1, 3]) and not np.isfinite(received[2, 20])
    assert not received[1, 16:].any() and not received[2, :16].any()  # the other blocks


def bytes_of(codes, values):
    return codes.message_bytes(values) / values


def test_messages_are_within_two_percent_of_the_codes():
    assert bytes_of(BlockFormat("int8", 256), 768 * 96) < 1.01
    assert bytes_of(BlockFormat("int4", 256), 768 * 96) < 0.508
    assert bytes_of(BlockFormat("int4", 256), 300) < 0.52  # two blocks of 150, and not of 256


# Reductions.

REDUCTIONS = {
    "one hop": ((5,), 1, "int8", P(None, "data"), ()),
    "two hops": ((2, 4), 1, ("fp4", "int8"), P("data_1", "data_0"), ()),
    "int4 in both": ((2, 4), 1, "int4", P("data_1", "data_0"), ()),
    "odd": ((3, 2), 1, ("int8", "fp8"), P(None, ("data_0", "data_1")), ()),
    "inside is major": ((2, 3), 1, ("int8", "int4"), P(("data_0", "data_1")), ("data_0",)),
    "replicas": ((4,), 2, ("int8", "fp4"), P("data"), ()),
}


def varied(place, dims, sizes):
    """Every place that differs from `place` in `dims` alone, in the order of the mesh."""
    for at in np.ndindex(*(sizes[dim] for dim in dims)):
        new = dict(zip(dims, at, strict=True))
        yield tuple(new.get(dim, own) for dim, own in enumerate(place))


def summed(parts, mesh, spec, hops):
    """In NumPy, by the places of the mesh: the shard of the sum that each device has after all hops."""
    sizes, names = mesh.devices.shape, mesh.axis_names
    indices = jax.sharding.NamedSharding(mesh, spec).devices_indices_map(parts.shape[len(sizes):])
    scattered = [[names.index(name) for name in hop] for hop, _ in hops if "replica" not in hop]
    later = scattered[1] if len(scattered) > 1 else []

    def shard(value, place):
        return value[indices[mesh.devices[place]]].ravel()

    def send(values, hop):
        return rounded(values, hops[hop][1].name, hops[hop][1].block)

    held = {place: sum(send(np.concatenate([shard(parts[sender], owner) for owner in varied(place, later, sizes)]), 0)
                       for sender in varied(place, scattered[0], sizes)) for place in np.ndindex(sizes)}
    if later:
        own = {place: [*varied(place, later, sizes)].index(place) for place in held}
        held = {place: sum(send(np.split(held[sender], len(held) // len({tuple(np.delete(p, later)) for p in held}))[
            own[place]], 1) for sender in varied(place, later, sizes)) for place in held}
    if "replica" in names:
        copies = {place: [*varied(place, [names.index("replica")], sizes)] for place in held}
        held = {place: np.concatenate([
            send(sum(send(np.array_split(held[sender], len(of))[piece], len(hops) - 1) for sender in of), len(hops) - 1)
            for piece in range(len(of))]) for place, of in copies.items()}
    return held


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_reduction_is_what_numpy_makes_of_it(kind):
    """And negative control: in other blocks it is another sum."""
    data, replica, gradients, spec, hpz = REDUCTIONS[kind]
    mesh = zero_jax.make_mesh(data if len(data) > 1 else data[0], replica=replica)
    axes, every = MeshAxes.of(mesh), tuple(mesh.axis_names)
    hops = Communication(gradients=gradients, block=16).hops(axes, hpz)
    parts = np.random.default_rng(1).normal(size=(*mesh.devices.shape, 24, 120)).astype(np.float32)
    run = jax.jit(jax.shard_map(
        lambda own: reduce_quantized(own.reshape(24, 120), axes, spec, hops), mesh=mesh, in_specs=P(*every),
        out_specs=spec, check_vma=False))
    shards = {shard.device: np.asarray(shard.data).ravel() for shard in run(parts).addressable_shards}
    expected = summed(parts, mesh, spec, hops)
    off = np.concatenate([np.abs(shards[device] - expected[place]) for place, device in np.ndenumerate(mesh.devices)])
    # Sums of a hop are rounded in another order: a value halfway between two codes of the next hop may take the other.
    largest = max(np.abs(shard).max() for shard in expected.values())
    assert (off > 2e-6).mean() < 0.01 and off.max() <= 2 * hops[-1][1].relative_error * largest
    exact = parts.sum(tuple(range(len(every))))
    other = summed(parts, mesh, spec, [(hop, BlockFormat("int8", 48)) for hop, _ in hops])
    whole = np.concatenate([expected[place] for place in expected])
    assert (np.abs(whole - np.concatenate([other[place] for place in other])) > 2e-6).mean() > 0.5
    assert 1e-3 < np.abs(run(parts) - exact).max() < np.abs(exact).max()


# Steps: the weights that the model reads, and the loss and gradient that they have.

NET = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)
ODD = gpt2.Config(3, 20, 2, vocab_size=65, max_length=17)
STEPS = {
    "linen": (gpt2.build(NET), 3, (8,), {}, Communication("int4", block=16)),
    "nnx hpZ": (gpt2_nnx.build(NET), 3, (2, 4), {"hpz_axes": "data_1"}, Communication("int4", block=32)),
    "odd": (gpt2.build(ODD), 3, (5,), {}, Communication("int4", block=16)),
    "tensor": (gpt2.build(NET), 3, (2, 2), {"tensor": 2}, Communication("int4", block=16)),
    "nnx unrolled": (gpt2_nnx.build(dataclasses.replace(NET, scan_layers=False)), 3, (8,), {},
                     Communication("fp8", block=16)),
    "accumulated": (gpt2.build(NET), 3, (4,), {"accumulate": 2}, Communication("int4", block=16)),
    "once": (gpt2.build(NET), 3, (4,), {"accumulate": 2, "reduce": "once"}, Communication("int4", block=16)),
}


def step_of(model, stage, data, options, communication, **more):
    options = dict(options)
    mesh = zero_jax.make_mesh(data if len(data) > 1 else data[0], tensor=options.pop("tensor", 1))
    rules = gpt2.tensor_rules(NET) if "tensor" in mesh.axis_names else ()
    return zero_jax.make_zero_train_step(model, stage, mesh=mesh, optimizer=SGD, tensor_rules=rules,
                                         communication=communication, **options, **more)


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
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    expected, params = losses_of_plain_steps(step, layout, model, batches, start, policy)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    last = by_name(step.params(state))
    for name, leaf in named_leaves(params):
        np.testing.assert_allclose(last[name], leaf, rtol=0, atol=1e-4, err_msg=name)
    coarser, _ = losses_of_plain_steps(step, layout, model, batches, start, policy, 2 * policy.block)
    exact, _ = losses_of_plain_steps(step, layout, model, batches, start, dataclasses.replace(policy, block=65536))
    for control in (coarser, exact):
        assert np.abs(np.array(control) / expected - 1).max() > 1e-4


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


@pytest.mark.parametrize("name", ["cpu stage 3", *map(slow, (
    "h100 stage 3", "h100 stage 3, hpZ", "h100 stage 2", "h100 stage 3, unrolled", "h100 stage 3, odd",
    "h100 stage 3, 5 x 5", "v5e stage 3"))])
def test_weights_and_gradients_travel_as_codes(name):
    """And negative controls: one gather, or one reduction, of which is sent in bfloat16, and some that is not sent."""
    found = program(f"{name}, quantised")
    report = found.verify()
    for result in report.results[:2]:
        assert result.budget.code_bytes > 0.9 * result.budget.communication_bytes
        assert result.communication_bytes < 1.04 * result.budget.communication_bytes
    assert sent(found, "all-to-all", True) and not sent(found, "all-to-all", False)

    def widened(c):
        shapes = tuple(("f32", shape[1]) if shape[0] in CODES else shape for shape in c.shapes)
        return dataclasses.replace(c, shapes=shapes, payload_bytes=4 * c.payload_bytes)

    coded = [c for c in found.collectives if set(c.dtypes) & set(CODES)]
    for kind, what in (("all-gather", "parameters"), ("all-to-all", "gradients")):
        largest = max((c for c in coded if c.kind == kind), key=lambda c: c.payload_bytes)
        changed = [widened(c) if c is largest else c for c in found.collectives]
        told = [f"of {what} are {how}" for how in ("sent as", "gathered", "reduced")]
        assert any(text in line for line in contract.check(changed, found.contract).violations for text in told)
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
    ({}, "quantises nothing"), ({"weights": "int5"}, "is no format"), ({"gradients": ("int8", None)}, "is no format"),
    ({"gradients": ("int8",) * 3}, "or a pair"), ({"gradients": 8}, "is no format"), ({"gradients": ()}, "or a pair"),
    ({"weights": "fp4"}, "no format of weights"), ({"weights": "int8", "block": 100}, "a multiple of 16"),
    ({"weights": "int8", "block": 0}, "at least 16"), ({"weights": "int8", "block": 2**17}, "a multiple of 16"),
    ({"weights": "int8", "exclude": "("}, "expression")])
def test_a_policy_that_is_none_is_refused(arguments, message):
    with pytest.raises(zero_jax.UsageError, match=message):
        Communication(**arguments)
    Communication(weights="fp8", gradients=["int8", "fp4"], block=32, exclude="embed")  # negative control


@pytest.mark.parametrize(("stage", "data", "communication", "options", "message"), [
    (0, (8,), Communication("int8", "int8"), {}, "cannot be quantised at stage 0"),
    (3, (1,), Communication("int8"), {}, "one device has all shards"),
    (3, (8,), Communication(gradients=("int4", "int8")), {}, "there is one hop"),
    (2, (8,), Communication("int8"), {}, "master weights themselves"),
    (3, (2, 4), Communication("int8"), {"hpz_axes": "data_1", "gather": "step", "accumulate": 2}, "leave one of them"),
    (3, (8,), "int8", {}, "is a str")])
def test_what_cannot_take_effect_is_refused(stage, data, communication, options, message):
    with pytest.raises(zero_jax.UsageError, match=message):
        step_of(gpt2.build(NET), stage, data, options, communication).layout(token_batches(1, 16)[0])


def test_what_is_sent_as_it_is_is_listed():
    """And negative control: without a policy nothing is said of it."""
    batch = token_batches(1, 16)[0]
    policy = Communication("int8", "int4", block=256, exclude="wpe")
    layout = step_of(gpt2.build(NET), 3, (8,), {}, policy).layout(batch)
    text = layout.describe()
    assert "communication: weights int8, gradients int4, blocks of 256; " in text
    assert "wpe/embedding (excluded)" in text and "ln_f/scale (a vector)" in text
    assert "blocks/proj/kernel (fewer than 256 values on a device)" in text and "wte" not in text.split("sent as")[1]
    assert layout.quantized.gradients == layout.quantized.gathers.keys() >= {"wte/embedding", "blocks/up/kernel"}
    assert "communication" not in step_of(gpt2.build(NET), 3, (8,), {}, None).layout(batch).describe()


def test_the_copy_of_stage_2_is_what_numpy_rounds():
    """Bit for bit, in bfloat16; and negative control: a cast is another copy."""
    policy = Communication("int4", block=16)
    step = step_of(gpt2.build(NET), 2, (2, 4), {"precision": "bf16"}, policy)
    state = step.init(jax.random.key(0), token_batches(1, 16)[0])
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), step.params(state))
    copies, expected = by_name(state.weights), by_name(received(step, step.layout(), params, policy))
    for name, leaf in expected.items():
        np.testing.assert_array_equal(copies[name], leaf.astype(ml_dtypes.bfloat16), err_msg=name)
    assert (copies["wte/embedding"] != by_name(params)["wte/embedding"].astype(ml_dtypes.bfloat16)).any()
