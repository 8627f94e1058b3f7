"""QLoRA: a frozen base of int8 or nf4 codes, against a quantiser written by hand in NumPy."""

import jax
import ml_dtypes
import numpy as np
import pytest
from support.hand_lora import applied, nested, plain_lora
from support.normed_net import losses_of
from support.oracle import ADAMW, by_name, slow
from support.programs import Row, compiled_once
from support.workloads import FLAVOURS, token_batches

import zero_jax
from models import gpt2

CONFIG = gpt2.Config(2, 72, 2, vocab_size=64, max_length=16)
TABLE = np.array([-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803,
                  0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], np.float32)
"""NormalFloat4, as the paper prints it (arXiv 2305.14314, appendix E)."""


def decoded_by_hand(kernel, name):
    """A (layers, in, out) kernel as its codes say: blocks of at most 64 along `in`, scales rounded up to bfloat16."""
    size, blocks = kernel.shape[1], -(-kernel.shape[1] // 64)
    width = -(-size // blocks)
    out = np.empty_like(kernel)
    for start in range(0, size, width + width % 2):
        block = kernel[:, start:start + width + width % 2]
        top = np.abs(block).max(1, keepdims=True) / (127 if name == "int8" else 1)
        scale = top.astype(ml_dtypes.bfloat16).astype(np.float32)
        scale = np.where(scale < top, np.nextafter(scale.astype(ml_dtypes.bfloat16), ml_dtypes.bfloat16(np.inf)).astype(
            np.float32), scale)
        scaled = block / scale
        codes = np.round(scaled) if name == "int8" else TABLE[np.abs(scaled[..., None] - TABLE).argmin(-1)]
        out[:, start:start + width + width % 2] = codes * scale
    return out


def tuned(flavour, name, stage, num_devices=8):
    model, batches = FLAVOURS[flavour](CONFIG), token_batches(3)
    plain = zero_jax.make_zero_train_step(model, 0, mesh=zero_jax.make_mesh(1))
    tree = plain.params(plain.init(jax.random.key(3), batches[0]))
    step = zero_jax.make_zero_train_step(
        zero_jax.lora(model, 3, "qkv", alpha=6.0, base=name), stage, mesh=zero_jax.make_mesh(num_devices),
        optimizer=ADAMW)
    state = step.init(jax.random.key(0), batches[0], params=tree)
    start, before = by_name(step.params(state)), by_name(state.frozen)
    losses, state = losses_of(step, state, batches)
    return step, state, start, before, losses, by_name(tree), model, batches


@pytest.mark.grid
@pytest.mark.parametrize("flavour, name, stage", [
    slow("linen", "nf4", 3), slow("nnx", "int8", 3), slow("nnx", "nf4", 2), slow("linen", "int8", 0)])
def test_numbers_of_codes_by_hand(flavour, name, stage):
    step, state, start, before, losses, base, model, batches = tuned(flavour, name, stage)
    kernels = [leaf for leaf in base if leaf.startswith("blocks") and leaf.endswith("/kernel")]
    coded = dict(base)
    for leaf in kernels:
        coded[leaf] = decoded_by_hand(base[leaf], name)
        stored = start[f"{leaf}_codes"]
        assert stored.dtype == np.uint8 and leaf not in start
        assert stored.nbytes <= (0.56 if name == "nf4" else 1.06) * base[leaf].size
    adapters = {leaf: value for leaf, value in start.items() if "_lora_" in leaf}
    expected, *_ = plain_lora(applied(model), coded | adapters, batches, scale=2.0)
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    for leaf, value in by_name(state.frozen).items():
        assert value.tobytes() == before[leaf].tobytes(), leaf
    merged = by_name(zero_jax.merge_lora(step, state))
    np.testing.assert_allclose(merged["blocks/up/kernel"], coded["blocks/up/kernel"], atol=1e-6)
    assert merged.keys() == base.keys()
    # Negative control: the base as it was is another one.
    exact, *_ = plain_lora(applied(model), base | adapters, batches, scale=2.0)
    assert np.abs(exact - expected).max() > 1e-5
    assert nested(base).keys() == nested(merged).keys()


@pytest.mark.grid
@pytest.mark.parametrize("target", [slow("h100:8"), slow("v5e:2x4")])
def test_codes_travel_and_not_what_they_decode_to(target):
    config = gpt2.Config(2, 256, 4, vocab_size=512, max_length=32)
    row = Row(target, 3, zero_jax.lora(gpt2.build(config), 8, "all-linear", base="nf4"))
    program = compiled_once(f"qlora {target}", row)
    report = program.verify()
    kernels = 2 * 12 * 256**2
    gathered = report.results[0].communication_bytes
    assert gathered < 2 * 7 / 8 * (0.54 * kernels + 2 * (program.num_params + 2 * 512 * 256))
    assert gathered < 2 * 7 / 8 * kernels  # in bfloat16 it would be twice this


def test_a_format_that_there_is_not():
    with pytest.raises(zero_jax.UsageError, match="base='int3': give None .*'int8' or 'nf4'"):
        zero_jax.lora(gpt2.build(CONFIG), 3, "qkv", base="int3")
