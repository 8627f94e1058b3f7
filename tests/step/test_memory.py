"""Bytes on each device, as the compiler counts them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support.covering import weekly
from support.oracle import slow
from support.programs import DEEP, program
from support.targets import mesh_of
from support.workloads import FLAVOURS

import zero_jax
from models import gpt2
from zero_jax.stages import STAGES
from zero_jax.tree import leaf_bytes, named_leaves
from zero_jax.xla.devices import compiled_for

BATCH = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
EVEN = gpt2.Config(2, 64, 2, vocab_size=64, max_length=16)


@weekly("num_devices", [2, 4, 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_state_bytes_are_the_formula(stage, precision, num_devices):
    """Exactly, where dims divide."""
    layout = zero_jax.make_zero_train_step(
        gpt2.build(EVEN), stage, mesh=zero_jax.make_mesh(num_devices), precision=precision).layout(BATCH)
    scalars = sum(row.bytes for row in layout.placements() if not row.shape)
    formula = STAGES[stage].state_bytes(EVEN.num_params, num_devices, low_precision=precision == "bf16")
    assert layout.device_bytes - scalars == formula


@pytest.mark.grid
@weekly("stage, precision", [
    row if row in {(1, "fp32"), (3, "bf16")} else slow(*row)
    for row in ((stage, precision) for stage in range(4) for precision in ("fp32", "bf16"))])
def test_the_compiled_steps_arguments_are_that_state_and_updated_in_place(stage, precision):
    step = zero_jax.make_zero_train_step(gpt2.build(EVEN), stage, mesh=zero_jax.make_mesh(8), precision=precision)
    memory, layout = step.compile(BATCH).memory_analysis(), step.layout(BATCH)
    batch = 2 * 16 * 4  # one sequence of inputs and one of targets, int32
    assert memory.argument_size_in_bytes == layout.device_bytes + batch
    assert memory.alias_size_in_bytes == layout.device_bytes


@functools.cache
def init_memory(flavour, scanned, stage):
    """(layout, memory of the compiled init)."""
    mesh = mesh_of("h100:8")
    config = gpt2.Config(2, 256, 4, vocab_size=1024, max_length=64, scan_layers=scanned)
    step = zero_jax.make_zero_train_step(FLAVOURS[flavour](config), stage, mesh=mesh, precision="bf16")
    compiled = compiled_for(step.lower_init(BATCH), mesh.devices.flat[0], {})
    return step.layout(BATCH), compiled.memory_analysis()


@pytest.mark.grid
@pytest.mark.parametrize(("flavour", "scanned"), [
    ("linen", True), slow("linen", False), slow("nnx", True), slow("nnx", False)])
def test_the_state_is_initialised_sharded(flavour, scanned):
    """The compiled init holds its part of the state and next to nothing beside it."""
    layout, memory = init_memory(flavour, scanned, 3)
    largest = max(leaf_bytes(leaf.shape, leaf.dtype) for _, leaf in named_leaves(layout.state.params))
    assert memory.output_size_in_bytes < 1.001 * layout.device_bytes
    assert memory.temp_size_in_bytes < largest / 8


def test_a_state_that_is_replicated_is_told():
    """Negative control: stage 0."""
    sharded, whole = (init_memory("linen", True, stage)[1].output_size_in_bytes for stage in (3, 0))
    assert whole > 7 * sharded


LAYER = 12 * DEEP.width**2
GATHERED_LAYER = 2 * LAYER  # bfloat16
GRADIENT_SHARD = 4 * LAYER // 8  # float32, one eighth


def temporaries(layers, rest=""):
    """Bytes of temporaries of stage 3 on eight H100s; activations are tiny (16 tokens on each)."""
    return program(f"h100 stage 3, {layers} layers{rest}").memory.temp_size_in_bytes


def activation_bytes(remat):
    """What a layer keeps of 16 tokens, per device: its input, or (measured from above) at most 48 widths of float32."""
    return 16 * DEEP.width * (2 if remat else 4 * 24)


def grows_with_depth(less, more, rest="", remat=False):
    """Bytes per layer beyond activations and sharded gradients."""
    growth = (temporaries(more, rest) - temporaries(less, rest)) / (more - less)
    return growth - GRADIENT_SHARD - activation_bytes(remat)


@pytest.mark.grid
@pytest.mark.parametrize(("less", "more", "flavour", "remat"), [
    slow(4, 12, "", False), slow(24, 48, " linen", True), slow(24, 48, " nnx", False)])
def test_temporaries_do_not_grow_with_depth(less, more, flavour, remat):
    rest = f"{flavour}{' remat' if remat else ''}"
    assert grows_with_depth(less, more, rest, remat) < 0.02 * GATHERED_LAYER
    assert temporaries(less, rest) - less * (GRADIENT_SHARD + activation_bytes(remat)) < 2 * GATHERED_LAYER


@pytest.mark.slow
def test_weights_kept_for_backward_are_told():
    """Negative control: all layers, where the step holds two at most."""
    assert temporaries(12, ", kept") - temporaries(12) > 0.9 * (12 - 2) * GATHERED_LAYER


@pytest.mark.slow
def test_weights_kept_for_backward_grow_with_depth():
    """By less than they have: gradients and activations take less than is counted."""
    assert grows_with_depth(24, 48, ", kept") > 0.75 * GATHERED_LAYER


@pytest.mark.slow
def test_plain_annotation_holds_more():
    """Negative control."""
    annotated, ours = (program(name).memory.temp_size_in_bytes for name in (
        "h100 stage 3, annotated", "h100 stage 3"))
    assert annotated > 1.3 * ours


@pytest.mark.slow
def test_plain_annotation_of_a_deep_model_holds_more():
    assert temporaries(24, ", annotated") > temporaries(24, " linen remat")
