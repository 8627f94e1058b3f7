"""The arithmetic of ZeRO-Offload and ZeRO-Infinity against the figures that the papers print."""

import offload_formulas as formulas
import pytest

FIGURE_2A = (
    # layers, hidden, heads, then in TiB: model states, all checkpoints; in GiB of a layer: states, activations
    (80, 10240, 128, 1.83, 0.05, None, 1.63), (100, 20480, 160, 9.16, 0.12, 6.25, 2.50),
    (128, 25600, 256, 18.31, 0.20, 9.77, 3.56), (195, 65536, 512, 182.81, 0.76, 64.00, 8.00),
    (315, 163840, 1024, 1845.70, 3.08, 400.00, 18.00))
"""ZeRO-Infinity, Figure 2a: batch 32 for the checkpoints, 4 for the activations of a layer, 1024 tokens."""
TIB, GIB = 2**40, 2**30


def memory_of(layers, hidden, heads):
    return (formulas.model_state_bytes(layers, hidden) / TIB,
            formulas.checkpoint_bytes(layers, hidden, 32, 1024) / TIB,
            formulas.layer_state_bytes(hidden) / GIB,
            formulas.layer_activation_bytes(hidden, heads, 4, 1024) / GIB)


def agrees(row, computed):
    return all(printed is None or abs(printed - value) <= 0.0051 for printed, value in zip(row, computed, strict=True))


@pytest.mark.parametrize("layers, hidden, heads, states, checkpoints, layer, activations", FIGURE_2A)
def test_memory_of_massive_models(layers, hidden, heads, states, checkpoints, layer, activations):
    printed = states, checkpoints, layer, activations
    computed = memory_of(layers, hidden, heads)
    assert agrees(printed, computed)
    assert not agrees(printed, (computed[0] * 16 / 20, *computed[1:])), "without gradients and parameters in float32"
    assert not agrees(printed, memory_of(layers, hidden, heads // 2))


V100 = 70e12
"""What a V100 reaches in the paper's section 4.2."""


@pytest.mark.parametrize("intensity, bandwidth, share", [
    (formulas.params_intensity(1, 1024), 70e9, 0.5), (formulas.optimizer_intensity(2, 1024), 1.5e12, 0.9)])
def test_bandwidth_for_an_efficiency(intensity, bandwidth, share):
    """70 GB/s for half of the peak with one sequence, nearly 1.5 TB/s for 90 % with two (section 4.2)."""
    assert share <= formulas.efficiency(intensity, bandwidth, V100) < share + 0.02
    assert formulas.needed_bandwidth(intensity, share, V100) <= bandwidth
    assert formulas.efficiency(intensity, formulas.needed_bandwidth(intensity, share, V100), V100) == pytest.approx(
        share)
    assert not share <= formulas.efficiency(intensity / 4, bandwidth, V100) < share + 0.02
    assert not share <= formulas.efficiency(intensity * 4, bandwidth, V100) < share + 0.02


@pytest.mark.parametrize("times, bandwidth", [(1, 70e9), (10, 700e9), (100, 7000e9)])
def test_bandwidth_between_faster_accelerators(times, bandwidth):
    """Table 3: devices of 10 and 100 times the rate."""
    needed = formulas.needed_bandwidth(formulas.params_intensity(1, 1024), 0.5, times * V100)
    assert 0.97 * bandwidth < needed <= bandwidth


SCALE = (  # published: parameters, and where the states of a DGX-2's 16 GPUs are; bytes that hold them
    (1.4e9, formulas.StateBytes(20), 1, 32e9, 0, 0), (13e9, formulas.StateBytes(2, host=18), 1, 32e9, 1.5e12, 0),
    (20e9, formulas.StateBytes(20), 16, 32e9, 0, 0), (70e9, formulas.StateBytes(0, host=20), 16, 32e9, 1.5e12 / 16, 0),
    (1e12, formulas.StateBytes(0, disk=20), 16, 32e9, 1.5e12 / 16, 28e12 / 16),
    (32e12, formulas.StateBytes(0, disk=20), 512, 32e9, 1.5e12 / 16, 28e12 / 16))


@pytest.mark.parametrize("published, states, devices, device, host, disk", SCALE)
def test_published_models_are_just_below_the_bound(published, states, devices, device, host, disk):
    bound = states.largest_model(devices, device=device, host=host, disk=disk)
    assert published <= bound < 1.45 * published
    half = formulas.StateBytes(states.device / 2, states.host / 2, states.disk / 2)
    assert not half.largest_model(devices, device=device, host=host, disk=disk) < 1.45 * published


def test_width_without_tiles():
    """Figure 6b: contiguous memory of 2 GB at most, widths that are powers of two."""
    assert 2**13 <= formulas.largest_hidden(2e9) < 2**14
    assert formulas.largest_hidden(2e9, tiles=16) == 4 * formulas.largest_hidden(2e9)
    assert not 2**13 <= formulas.largest_hidden(16e9) < 2**14
    assert formulas.layer_state_bytes(int(formulas.largest_hidden(2e9))) <= 2e9


def test_a_bound_is_the_scarcest_memory():
    ours = formulas.ZERO_JAX["optimizer"]
    assert ours.largest_model(8, device=4e9, host=1e12) == 8e9
    assert ours.largest_model(8, device=1e12, host=12e9) == 8e9
    assert formulas.transformer_params(128, 25600) == pytest.approx(1.0066e12, rel=1e-4)
    assert formulas.checkpoints_intensity(2048, interval=2) == 2 * 24 * 2048
