"""Gradients that a streamed update reads: in which dtype and in which order of dims they are in device memory."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from support.targets import mesh_of

import zero_jax
from zero_jax.offload.host_update import STREAM_SCOPE
from zero_jax.step import gradients
from zero_jax.step.functions import StepFunctions


class Wide(nn.Module):
    width: int = 256

    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(WideBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=8)
        x, _ = blocks(self.width, name="blocks")(nn.Embed(96, self.width)(x), None)
        return nn.Dense(96)(x)


class WideBlock(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(x))), None


def batch(rows):
    return {name: jax.ShapeDtypeStruct((rows, 8), jnp.int32) for name in ("inputs", "targets")}


@pytest.mark.slow
def test_gradients_are_made_wider_block_by_block(monkeypatch):
    """All of them in float32 would be the most that a step of a large model holds."""
    def temporaries():
        step = zero_jax.make_zero_train_step(
            Wide(), 3, mesh=mesh_of("h100:1"), precision="bf16",
            offload=zero_jax.Offload(parameters="host", buffer_bytes=2**18))
        return step.compile(batch(1)).memory_analysis().temp_size_in_bytes, step.layout(batch(1)).num_params

    size, params = temporaries()
    assert size < 3 * params
    update = StepFunctions.update

    def widened_before(self, state, output, grads, key, scale):
        return update(self, state, output, self.unscaled(state, grads), key)

    monkeypatch.setattr(StepFunctions, "update", widened_before)
    assert temporaries()[0] > size + 1.5 * params, "two bytes more for each parameter"


@pytest.mark.slow
def test_gradients_of_stacked_layers_are_read_as_they_are(monkeypatch):
    """XLA:GPU stacks them transposed unless told otherwise, and transposes the whole stack for the update."""
    def transposed():
        """Shapes of gradients of all layers that the update makes, and what the contract says."""
        step = zero_jax.make_zero_train_step(
            Wide(320), 3, mesh=mesh_of("h100:8"), precision="bf16", offload=zero_jax.Offload(buffer_bytes=2**18))
        compiled = step.compiled_step(batch(8))
        module = compiled.module
        return [array.dims for instruction in module.computations[module.entry].instructions.values()
                if STREAM_SCOPE in module.metadata(instruction)[0] and instruction.opcode in ("fusion", "copy")
                for array in instruction.arrays.values() if array.space == 0 and array.dtype == "bf16"
                and array.dims[:1] == (8,) and len(array.dims) == 3], compiled.report.violations

    assert transposed() == ([], ())
    monkeypatch.setattr(gradients, "order_stacked_gradients", lambda jaxpr, **options: jaxpr)
    assert transposed()[0] == [(8, 320, 160)], "the kernel that is sharded along its last dim"


def test_only_gradients_that_a_loop_stacks_get_an_order():
    """Not their sums: XLA reduces two reads of one weight at once, and would reduce each with a layout between."""
    def orders(model):
        step = zero_jax.make_zero_train_step(
            model, 3, precision="bf16", offload=zero_jax.Offload(buffer_bytes=2**16))
        return step.lower(batch(8)).as_text().count("LayoutConstraint")

    assert orders(Wide(64)) == 2
    assert orders(nn.Sequential([nn.Embed(96, 64), nn.Dense(64), nn.gelu, nn.Dense(96)])) == 0
