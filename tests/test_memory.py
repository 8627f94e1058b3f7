"""Bytes on each device, as the compiler counts them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from oracle import slow
from test_contract import described

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax import hardware
from zero_jax.stages import STAGES
from zero_jax.tree import leaf_bytes, named_leaves

BATCH = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
FLAVOURS = {"linen": gpt2.build, "nnx": gpt2_nnx.build}


@pytest.mark.parametrize("num_devices", [slow(2), slow(4), 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_state_bytes_are_the_formula(stage, precision, num_devices):
    """Exactly, where dims divide; the compiled step's arguments are that state, and it is updated in place."""
    config = gpt2.Config(2, 64, 2, vocab_size=64, max_length=16)
    step = zero_jax.make_zero_train_step(
        gpt2.build(config), stage, mesh=zero_jax.make_mesh(num_devices), precision=precision)
    layout = step.layout(BATCH)
    scalars = sum(row.bytes for row in layout.placements() if not row.shape)
    formula = STAGES[stage].state_bytes(config.num_params, num_devices, low_precision=precision == "bf16")
    assert layout.device_bytes - scalars == formula
    if num_devices == 8:
        memory = step.lower(BATCH).compile().memory_analysis()
        batch = 2 * 16 * 4  # one sequence of inputs and one of targets, int32
        assert memory.argument_size_in_bytes == layout.device_bytes + batch
        assert memory.alias_size_in_bytes == layout.device_bytes


@pytest.mark.parametrize(("flavour", "scanned"), [
    ("linen", True), slow("linen", False), slow("nnx", True), ("nnx", False)])
def test_the_state_is_born_sharded(flavour, scanned):
    """The compiled init holds its part of the state and next to nothing beside it."""
    mesh = described("h100:8")
    config = gpt2.Config(2, 256, 4, vocab_size=1024, max_length=64, scan_layers=scanned)

    def init_memory(stage):
        step = zero_jax.make_zero_train_step(FLAVOURS[flavour](config), stage, mesh=mesh, precision="bf16")
        compiled = step.lower_init(BATCH).compile(compiler_options=hardware.compiler_options(mesh.devices.flat[0]))
        return step.layout(BATCH), compiled.memory_analysis()

    layout, memory = init_memory(3)
    largest = max(leaf_bytes(leaf.shape, leaf.dtype) for _, leaf in named_leaves(layout.state.params))
    assert memory.output_size_in_bytes < 1.001 * layout.device_bytes
    assert memory.temp_size_in_bytes < largest / 8
    _, whole = init_memory(0)  # negative control: the check can fail
    assert whole.output_size_in_bytes > 7 * memory.output_size_in_bytes


WIDTH = 512
LAYER = 12 * WIDTH**2
GATHERED_LAYER = 2 * LAYER  # bfloat16
GRADIENT_SHARD = 4 * LAYER // 8  # float32, one eighth


@functools.cache
def temporaries(num_layers, flavour, remat, variant="zero"):
    """Bytes of temporaries of stage 3 on eight described H100s; activations are tiny (16 tokens on each)."""
    mesh = described("h100:8")
    config = gpt2.Config(num_layers, WIDTH, 8, vocab_size=512, max_length=16, remat=remat)
    step = zero_jax.make_zero_train_step(
        FLAVOURS[flavour](config), 3, mesh=mesh, precision="bf16", optimizer=optax.adamw(1e-3))
    layout = step.layout(BATCH)
    if variant == "annotated":
        step._layout = dataclasses.replace(layout, uses=jax.tree.map(lambda _: None, layout.state.params))
    if variant == "kept":
        step._layout = dataclasses.replace(layout, stage=dataclasses.replace(layout.stage, shards_params=False))
    compiled = step.lower(BATCH).compile(compiler_options=hardware.compiler_options(mesh.devices.flat[0]))
    return compiled.memory_analysis().temp_size_in_bytes


def activation_bytes(remat):
    """What a layer keeps of 16 tokens, per device: its input, or (measured from above) at most 48 widths of float32."""
    return 16 * WIDTH * (2 if remat else 4 * 24)


def grows_with_depth(flavour, remat, variant="zero"):
    """Bytes per layer beyond activations and sharded gradients, from 24 to 48 layers."""
    growth = (temporaries(48, flavour, remat, variant) - temporaries(24, flavour, remat, variant)) / 24
    return growth - GRADIENT_SHARD - activation_bytes(remat)


@pytest.mark.parametrize(("flavour", "remat"), [
    ("linen", True), slow("linen", False), slow("nnx", True), slow("nnx", False)])
def test_temporaries_do_not_grow_with_depth(flavour, remat):
    assert grows_with_depth(flavour, remat) < 0.02 * GATHERED_LAYER
    held = temporaries(24, flavour, remat) - 24 * (GRADIENT_SHARD + activation_bytes(remat))
    assert held < 2 * GATHERED_LAYER


def test_programs_that_hold_more_are_told():
    """Negative controls: gathered weights kept for backward; and plain annotation."""
    assert grows_with_depth("linen", False, "kept") > 0.9 * GATHERED_LAYER
    annotated = temporaries(24, "linen", True, "annotated")
    assert annotated > temporaries(24, "linen", True)
