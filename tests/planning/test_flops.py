"""FLOPs of a step, as the model is written and as it is compiled, and what they come to in a time."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracle import slow
from support.programs import PROGRAMS, program
from support.targets import simulated

import zero_jax
from models import gpt2
from zero_jax.jaxpr.equations import inner_jaxprs
from zero_jax.jaxpr.primitives import CUDNN_ATTENTION
from zero_jax.planning.flops import StepFlops, frozen_flops, model_flops, step_flops, traced_flops
from zero_jax.xla import devices
from zero_jax.xla.live_chip import chip_of_kind
from zero_jax.xla.targets import known_targets, target_of


def test_rates_by_hand():
    flops = StepFlops(model=8e12, program=10e12, num_devices=4, peak=100e12)
    assert flops.tflops(0.5) == pytest.approx(4.0)  # 8 TFLOP in half a second on 4 devices
    assert flops.mfu(0.5) == pytest.approx(0.04) and flops.hfu(0.5) == pytest.approx(0.05)
    unknown = StepFlops(model=8e12, program=10e12, num_devices=4, peak=None)
    assert unknown.mfu(0.5) is None and unknown.hfu(0.5) is None and unknown.tflops(0.5) == pytest.approx(4.0)


@pytest.mark.parametrize(("name", "low", "high"), [
    ("h100 stage 3", 0.99, 1.01),
    # A block of GPT-2 that is recomputed repeats a forward pass of its products; the output layer is not in a block.
    slow("h100 stage 3, linen remat", 1.15, 1.34)])
def test_a_program_has_the_models_flops_and_what_it_recomputes(name, low, high):
    step, batch = PROGRAMS[name].make()
    written = model_flops(step, batch)
    flops = step_flops(written, program(name).schedule, num_devices=8, peak=None)
    assert low < flops.program / flops.model < high
    # Negative control: on half of the devices it is not the model.
    halved = step_flops(written, program(name).schedule, num_devices=4, peak=None)
    assert not low < halved.program / halved.model < high


def test_frozen_weights_have_no_gradient():
    """By hand: products of a weight, of its transpose and of slices of a stack in a loop, and of activations alone."""
    def fun(weight, stack, adapter, x):
        x = x @ weight @ (2 * weight.T) @ adapter
        x, _ = jax.lax.scan(lambda x, layer: (x @ layer, None), x, stack)
        return x @ x.T

    sizes = [np.ones(shape, np.float32) for shape in ((4, 6), (3, 4, 4), (4, 4), (5, 4))]
    traced = jax.make_jaxpr(fun)(*sizes)
    weight, stack, others = 2 * 2 * 5 * 4 * 6, 3 * 2 * 5 * 4 * 4, 2 * 5 * 4 * 4 + 2 * 5 * 5 * 4
    assert traced_flops(traced) == weight + stack + others
    assert frozen_flops(traced.jaxpr, [True, True, False, False]) == weight + stack
    assert frozen_flops(traced.jaxpr, [False, True, False, False]) == stack
    assert frozen_flops(traced.jaxpr, [False] * 4) == 0


@pytest.mark.parametrize("base", [None, slow("nf4")])
def test_a_step_of_adapters_has_two_thirds_of_the_flops(base):
    config = gpt2.Config(2, 64, 4, vocab_size=256, max_length=64)
    batch = {name: np.zeros((8, 64), np.int32) for name in ("inputs", "targets")}
    whole, adapted = (model_flops(zero_jax.make_zero_train_step(model, 3), batch) for model in (
        gpt2.build(config), zero_jax.lora(gpt2.build(config), 1, "qkv", base=base)))
    attention = 3 * 2 * 2 * 2 * 8 * 64 * 64 * 64  # layers, two products, of activations alone
    assert adapted == pytest.approx(2 / 3 * (whole - attention) + attention, rel=0.02)
    assert not adapted == pytest.approx(whole, rel=0.2)


def test_constants_of_a_checkpointed_layer_are_no_obstacle():
    """Rotary frequencies of LLaMA, say: `jax.checkpoint` leaves arrays of NumPy in the inner jaxpr."""
    table = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    traced = jax.make_jaxpr(jax.checkpoint(lambda x: x @ table))(np.ones((2, 3), np.float32))
    (inner,) = inner_jaxprs(traced.eqns[0])
    assert inner.constvars or traced.consts, "there is a constant"
    assert traced_flops(traced) == 2 * 2 * 3 * 4


@pytest.mark.parametrize("text", ["h100:8", *(slow(text) for text in known_targets() if text != "h100:8")])
def test_a_device_is_known_by_what_its_driver_calls_it(text):
    if extra := devices.missing_compiler(text):
        pytest.skip(f"needs {extra}")
    assert chip_of_kind(devices.target_devices(text)[0].device_kind) == target_of(text).chip


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H100", ""])
def test_another_device_has_no_peak(kind):
    assert chip_of_kind(kind) is None


def attention_flops(kernel, platform, causal=True, q_shape=(8, 256, 4, 64)):
    """The model's FLOPs of one attention of `zero_jax.attention` on the devices of `platform`."""
    with simulated(platform):
        array = jax.ShapeDtypeStruct(q_shape, jnp.bfloat16)
        compute = zero_jax.attention(zero_jax.make_mesh(), kernel=kernel)
        return traced_flops(jax.make_jaxpr(lambda q, k, v: compute(q, k, v, causal=causal))(array, array, array))


@pytest.mark.parametrize(("kernel", "platform"), [("xla", None), ("splash", "v5p:2x2x2")])
def test_causal_attention_counts_half_whatever_its_kernel(kernel, platform):
    """Control: all of it without a mask, and where nobody says that it is causal."""
    whole = 2 * 2 * 8 * 4 * 256 * 256 * 64  # two products
    whole //= 8 if kernel == "splash" else 1  # traced inside of a shard_map over 8 devices
    assert attention_flops(kernel, platform) == whole / 2 and attention_flops(kernel, platform, causal=False) == whole
    array = jax.ShapeDtypeStruct((8, 256, 4, 64), jnp.bfloat16)
    unknown = jax.make_jaxpr(lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True))(array)
    assert traced_flops(unknown) == 2 * 2 * 8 * 4 * 256 * 256 * 64


@pytest.mark.parametrize("mask", ["CAUSAL", "NO_MASK"])
def test_cudnns_causal_attention_counts_half(mask):
    def attention(q, k, v):
        return q

    array = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    eqn = types.SimpleNamespace(
        primitive=types.SimpleNamespace(name=CUDNN_ATTENTION), params={"mask_type": f"MaskType.{mask}"},
        invars=jax.make_jaxpr(attention)(array, array, array).jaxpr.invars, outvars=[],
        source_info=types.SimpleNamespace(name_stack=""))
    whole = 2 * 2 * 2 * 4 * 256 * 256 * 64
    assert traced_flops(types.SimpleNamespace(eqns=[eqn])) == (whole / 2 if mask == "CAUSAL" else whole)
