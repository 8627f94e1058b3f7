"""Products in float8: the numbers of layers written by hand, their weights sent as float8, cuBLAS's kernels on H100."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from support import fp8_dense
from support.oracle import oracle, slow, train
from support.programs import SMALL, program
from support.workloads import token_batches

import zero_jax
from models import gpt2
from zero_jax import Precision, UsageError
from zero_jax.contract import verify as contract
from zero_jax.contract.report import CODES
from zero_jax.gather.quantized.products import E4M3, E5M2, MatrixFormat, exponent, rounded, scale_of
from zero_jax.xla.events import totals
from zero_jax.xla.shapes import shape_bytes

FP8 = Precision(params=jnp.float32, compute=jnp.float32, fp8=True)
SGD = optax.sgd(0.05)


class Block(nn.Module):
    """Of two products, in layers of the class `dense`."""

    dense: Any

    @nn.compact
    def __call__(self, x, _=None):
        return x + self.dense(32, name="down")(nn.gelu(self.dense(64, name="up")(nn.LayerNorm(name="norm")(x)))), None


class Net(nn.Module):
    """Two blocks, in a loop over stacked parameters or not, and a head that is never in float8."""

    dense: Any = nn.Dense
    scanned: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(64, 32, name="embed")(x)
        if self.scanned:
            loop = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = loop(self.dense, name="blocks")(x, None)
        else:
            for number in range(2):
                x, _ = Block(self.dense, name=f"block_{number}")(x)
        return nn.Dense(64, name="head")(x)


@pytest.mark.parametrize(("kind", "dtype"), [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)])
@pytest.mark.parametrize("power", [-30, 0, 30])
def test_rounding_is_numpys_with_the_smallest_power_of_two(kind, dtype, power):
    """And negative controls: half of the scale overflows, and one that is no power of two is not exact in bfloat16."""
    values = np.random.default_rng(power + 50).normal(size=(64, 64)).astype(np.float32) * np.float32(2.0**power)
    values[0, :3] = 0, np.abs(values).max() * 1.7, 1e-38
    limit = float(ml_dtypes.finfo(dtype).max)
    scale = float(scale_of(exponent(jnp.max(jnp.abs(values)), kind)))
    assert np.log2(scale) % 1 == 0 and np.abs(values).max() / scale <= limit < np.abs(values).max() / (scale / 2)
    expected = (values / np.float32(scale)).astype(dtype).astype(np.float32) * np.float32(scale)
    np.testing.assert_array_equal(rounded(jnp.asarray(values), kind), expected)
    np.testing.assert_array_equal(expected.astype(jnp.bfloat16).astype(np.float32), expected)
    odd = (values / np.float32(1.1 * scale)).astype(dtype).astype(np.float32) * np.float32(1.1 * scale)
    assert (odd.astype(jnp.bfloat16).astype(np.float32) != odd).any()


@pytest.mark.parametrize(("largest", "scale"), [(448.0, 1), (448.1, 2), (0.0, 2.0**-126), (np.inf, np.inf)])
def test_scales_at_the_edges(largest, scale):
    """Of what fits just and just not, of zeros and of what is not finite, which stays so."""
    values = jnp.asarray([largest, 0.0], jnp.float32)
    assert float(scale_of(exponent(values[0], E4M3))) == scale
    assert np.isfinite(rounded(values, E4M3)).all() == np.isfinite(largest)


def test_messages_give_what_was_rounded():
    """Of two layers in three parts, whose scales are of layers; and negative control: a scale of each part differs."""
    rows = jax.random.normal(jax.random.key(0), (2, 3, 40)) * jnp.exp2(8.0 * jnp.arange(6).reshape(2, 3, 1))
    form = MatrixFormat(jnp.dtype(jnp.bfloat16))
    message = form.encode(rows, shared=1)
    assert message.dtype == jnp.uint8 and message.shape == (2, 3, form.message_bytes(40))
    found = form.decode(message, 40, jnp.bfloat16, shared=1)
    cast = rows.astype(jnp.bfloat16)
    expected = jnp.stack([rounded(layer, E4M3) for layer in cast])
    np.testing.assert_array_equal(found, expected)
    parts = jnp.stack([jnp.stack([rounded(part, E4M3) for part in layer]) for layer in cast])
    assert (np.asarray(parts) != np.asarray(expected)).any()


@pytest.mark.parametrize(("stage", "devices", "scanned", "options"), [
    (3, 8, True, {}),
    slow(0, 8, True, {}), slow(2, 8, True, {}), slow(3, 1, True, {}), slow(3, 8, False, {}),
    slow(3, (2, 4), True, {"hpz_axes": "data_1"}), slow(3, 8, True, {"remat": "full"})])
def test_a_step_has_the_numbers_of_layers_written_by_hand(stage, devices, scanned, options):
    """The first losses and gradients; and negative control: products in float32 have others.

    Later sums in another order change what rounds up or down, a sixteenth of a value.
    """
    batches = token_batches(2, 16, 8, vocab=64)
    expected = oracle(Net(fp8_dense.Fp8Dense, scanned), batches=batches, optimizer=SGD)
    control = oracle(Net(scanned=scanned), batches=batches, optimizer=SGD)
    found = train(Net(scanned=scanned), stage, devices, batches=batches, optimizer=SGD, precision=FP8, **options)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=5e-6)
    np.testing.assert_allclose(found.norms[0], expected.norms[0], rtol=1e-4)
    assert np.abs(control.losses / expected.losses - 1).max() > 5e-5
    assert abs(control.norms[0] / expected.norms[0] - 1) > 5e-4
    evaluated = float(found.step.evaluator()(found.state, batches[0]))
    plain = oracle(Net(fp8_dense.Fp8Dense, scanned), batches=[*batches, batches[0]], optimizer=SGD)
    np.testing.assert_allclose(evaluated, plain.losses[2], rtol=1e-5)


@pytest.mark.slow
def test_a_copy_of_a_step_is_what_each_use_gathers():
    """In microbatches, whose scales are others than the batch's; and negative control: products in float32."""
    batches = token_batches(2, 16, 8, vocab=64)
    whole, every, once, control = (train(Net(), 3, 8, batches=batches, optimizer=SGD, precision=precision, **options)
                                   for precision, options in (
        (FP8, {}), (FP8, {"accumulate": 2}), (FP8, {"accumulate": 2, "gather": "step"}), ("fp32", {})))
    for found in (every, once):
        np.testing.assert_allclose(found.losses, whole.losses, rtol=5e-6)
    assert np.abs(control.losses / whole.losses - 1).max() > 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_tensor_parallelism_it_keeps_its_contract(sequence_parallel):
    """And the numbers of one device; negative control: what these products send over `tensor`, not promised."""
    config = gpt2.Config(2, 32, 4, vocab_size=64, max_length=8)
    batches = token_batches(2, 16, 8, vocab=64)
    alone = train(gpt2.build(config), 3, 1, batches=batches, optimizer=SGD, precision=FP8)
    found = train(gpt2.build(config), 3, zero_jax.make_mesh(4, tensor=2), batches=batches, optimizer=SGD, precision=FP8,
                  tensor_rules=gpt2.tensor_rules(config), sequence_parallel=sequence_parallel)
    np.testing.assert_allclose(found.losses, alone.losses, rtol=5e-6)
    compiled = found.step.compiled_step(batches[0])
    compiled.verify()
    budgets = tuple(dataclasses.replace(each, communication_bytes=each.communication_bytes / 5)
                    if each.key == "activations" else each for each in compiled.contract.budgets)
    lines = contract.check(compiled.collectives, dataclasses.replace(compiled.contract, budgets=budgets)).violations
    assert any("bytes of activations travel" in line for line in lines)


@pytest.mark.slow
def test_with_offloaded_masters_it_reads_the_same_weights():
    """And negative control: bf16 alone has other losses."""
    batches = token_batches(2, 16, 8, vocab=64)
    plain, offloaded, control = (train(Net(), 3, 8, batches=batches, optimizer=SGD, precision=precision, **options)
                                 for precision, options in (
        ("bf16-fp8", {}), ("bf16-fp8", {"offload": "optimizer"}), ("bf16", {})))
    np.testing.assert_array_equal(offloaded.losses, plain.losses)
    assert (control.losses != plain.losses).all()


def test_the_scale_of_activations_is_of_each_device():
    """One example is so large that those beside it vanish: on its device; and negative control: on one device, all."""
    x = jax.random.normal(jax.random.key(0), (8, 64)).at[3].multiply(2.0**30)
    weight = jax.random.normal(jax.random.key(1), (64, 32))

    def loss(params, batch):
        return jnp.mean(jnp.where(jnp.arange(8)[:, None] == 3, 0.0, jnp.abs(batch["x"] @ params["w"])))

    def value(devices):
        step = zero_jax.make_zero_train_step(
            params={"w": weight}, loss=loss, precision=Precision(compute=jnp.float32, fp8="w"), optimizer=SGD,
            mesh=zero_jax.make_mesh(devices=jax.devices()[:devices]))
        return float(step(step.init(jax.random.key(0), {"x": x}), {"x": x})[1]["loss"])

    alone = jnp.where(jnp.arange(8)[:, None] == 3, 0.0, x)
    assert value(1) == 0
    np.testing.assert_allclose(value(8), loss({"w": weight}, {"x": alone}), rtol=0.02)


def test_h100_multiplies_and_gathers_float8():
    """Each product of the blocks, three times, in cuBLAS's kernel of float8; and a byte for each gathered value.

    And negative controls: bf16's program has no such kernel, and twice the bytes.
    """
    found, control = program("h100 stage 3, float8"), program("h100 stage 3")
    kernel = "__cublas$lt$matmul$f8"
    assert found.text.count(f'custom_call_target="{kernel}"') >= 3 * 4 and kernel not in control.text
    tokens = SMALL.max_length
    blocks = 3 * 2 * tokens * 12 * SMALL.width**2 * SMALL.num_layers
    flops, others = (sum(each for dtype, each in totals(each.schedule).flops.items() if dtype.startswith("f8"))
                     for each in (found, control))
    assert flops == blocks and not others

    def gathered(program, codes):
        return sum(c.communication_bytes * c.count * shape_bytes(*shape) / c.payload_bytes
                   for c in program.collectives if c.kind == "all-gather"
                   for shape in c.shapes if (shape[0] in CODES) == codes)

    values = 2 * 12 * SMALL.width**2 * SMALL.num_layers * 7 / 8  # forward and backward, of a ring of eight
    assert values <= gathered(found, True) < 1.01 * values and not gathered(control, True)
    assert gathered(control, False) - gathered(found, False) > 1.95 * values
    assert found.verify()


class Tied(nn.Module):
    """A matrix that two products use, and one that one does."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(32, name="twice")
        return nn.Dense(64, name="head")(dense(dense(nn.Embed(64, 32, name="embed")(x))))


@pytest.mark.parametrize(("model", "fp8", "message"), [
    (Net(), "nowhere", "no parameter's name matches 'nowhere'"),
    (Net(), ("up/kernel", "embed"), "embed/embedding is not multiplied in float8: it has another use than a product"),
    (Net(), "up/bias", "up/bias is not multiplied"),
    (Tied(), "twice/kernel", "2 matrix products use it"),
    (Tied(), True, "fp8 would change nothing"),
])
def test_what_cannot_be_in_float8_is_refused(model, fp8, message):
    """And negative control: what one product alone uses, wherever it is, is taken by its name."""
    def layout(fp8):
        precision = Precision(compute=jnp.bfloat16, fp8=fp8)
        return zero_jax.make_zero_train_step(model, 3, precision=precision).layout(token_batches(1, 16, 8, vocab=64)[0])

    with pytest.raises(UsageError, match=message):
        layout(fp8)
    taken = layout("head/kernel")
    assert taken.fp8 == {"head/kernel"} and "products in float8: head/kernel" in taken.describe()


@pytest.mark.parametrize("compute", [jnp.float16, None])
def test_float8_needs_the_exponents_of_float32(compute):
    with pytest.raises(UsageError, match="give compute=jnp.bfloat16"):
        Precision(compute=compute, fp8=True)
    assert Precision(compute=jnp.bfloat16, fp8=True).fp8  # negative control


def test_blocks_are_found_by_their_loops_and_their_numbers():
    names = {f"{block}/{name}/kernel" for block in ("block_0", "block_1") for name in ("up", "down")}
    for scanned, expected in ((True, {"blocks/up/kernel", "blocks/down/kernel"}), (False, names)):
        step = zero_jax.make_zero_train_step(Net(scanned=scanned), 3, precision="bf16-fp8")
        layout = step.layout(token_batches(1, 16, 8, vocab=64)[0])
        assert layout.fp8 == expected and layout.quantized.gathers.keys() == expected
