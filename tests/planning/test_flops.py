"""FLOPs of a step, as the model is written and as it is compiled, and what they come to in a time."""

import jax
import numpy as np
import pytest
from support.oracle import slow
from support.programs import PROGRAMS, program

from zero_jax.jaxpr.equations import inner_jaxprs
from zero_jax.planning.flops import StepFlops, step_flops, traced_flops
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
    forward = step.trace_forward(batch)
    flops = step_flops(forward, program(name).schedule, num_devices=8, peak=None)
    assert low < flops.program / flops.model < high
    # Negative control: on half of the devices it is not the model.
    halved = step_flops(forward, program(name).schedule, num_devices=4, peak=None)
    assert not low < halved.program / halved.model < high


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
