"""The paper's arithmetic that only its tables need, against what the paper prints."""

import math

import pytest
from arithmetic import (
    arithmetic_intensity,
    communication_elements,
    max_params,
    megatron_step_flops,
    partitioned_gather_elements,
    tensor_parallel_elements,
    train_flops_per_token,
)
from runs import block_params

from models.gpt2 import PRESETS
from zero_jax.planning.formulas import DEEPSPEED, MEGATRON_FP32, PAPER, ZERO_JAX, checkpoint_elements, model_state_bytes
from zero_jax.stages import STAGES

GB = 1e9


def total(counts, stage, num_params, **degrees):
    return sum(model_state_bytes(counts, stage, num_params, **degrees).values())


def test_table_2_is_the_rounded_first_row_times_mp():
    """20 of 20 cells: 7.6B is exact to its digits, and what follows is its multiple."""
    first = [max_params(PAPER, stage, 32e9, data=64) / 1e9 for stage in range(4)]
    assert first == pytest.approx([2, 32 / (4 + 12 / 64), 32 / (2 + 14 / 64), 128])
    printed = {2: [4, 15.2, 28.8, 256], 4: [8, 30.4, 57.6, 500], 8: [16, 60.8, 115.2, 1000],
               16: [32, 121.6, 230.4, 2000]}
    for model, row in printed.items():
        multiples = [round(value, 1) * model for value in first]
        assert multiples[:3] == pytest.approx(row[:3])
        assert multiples[3] == pytest.approx(row[3], rel=0.03)
        exact = [max_params(PAPER, stage, 32e9, data=64, model=model) / 1e9 for stage in range(4)]
        assert exact == pytest.approx([value * model for value in first])
    assert round(max_params(PAPER, 1, 32e9, data=64, model=4) / 1e9, 1) != 30.4


@pytest.mark.parametrize("counts", [PAPER, DEEPSPEED, ZERO_JAX, MEGATRON_FP32])
@pytest.mark.parametrize("stage", range(4))
def test_what_fits_fills_the_memory(counts, stage):
    num_params = max_params(counts, stage, 32e9, data=64, model=2)
    assert total(counts, stage, num_params, data=64, model=2) == pytest.approx(32e9)


@pytest.mark.parametrize("stage", range(4))
def test_communication_is_the_stage_table(stage):
    sent = communication_elements(stage, 10)
    assert sum(sent.values()) == 10 * STAGES[stage].communication
    assert sent["reduce"] == 10 and sum(value > 0 for value in sent.values()) == STAGES[stage].communication


def test_partitioned_activations_add_a_twelfth():
    shape = dict(layers=3, hidden=64, batch=2, length=16)
    added, sent = partitioned_gather_elements(**shape), tensor_parallel_elements(**shape)
    assert sent == 12 * added == 12 * 3 * 64 * 2 * 16


def test_configurations_of_table_3():
    """GB of states and checkpoints per GPU, and the order of Figure 6."""
    expected = {"C1": (1, 1, "40b-50x8192", 24.7), "C2": (1, 16, "60b", 18.4), "C3": (2, 1, "50b", 24.6),
                "C4": (2, 16, "140b", 25.5), "C5": (2, math.inf, "150b", 24.1)}
    for stage, split, preset, printed in expected.values():
        config = PRESETS[preset]
        checkpoints = 2 * checkpoint_elements(config.num_layers, config.width, 16, 1024, model=split)
        states = total(PAPER, stage, block_params(config), data=25, model=16)
        assert (states + checkpoints) / GB == pytest.approx(printed, abs=0.1)
    order = sorted(expected, key=lambda name: block_params(PRESETS[expected[name][2]]))
    assert order == ["C1", "C3", "C2", "C4", "C5"]


def test_arithmetic_intensity():
    """At least 10K for GPT-2 or larger, linear in hidden; and the ratio that it says."""
    assert arithmetic_intensity(768) > 10_000 > arithmetic_intensity(400)
    flops = megatron_step_flops(1, 1600, 1, 1, 0) - 16  # without the scores of one token
    moved = 2 * 2 * checkpoint_elements(1, 1600, 1, 1)
    assert arithmetic_intensity(1600) == pytest.approx(flops / moved, rel=1e-3)


def test_the_two_counts_of_flops_agree():
    """Megatron's is the sum by token, with the output layer, which is not recomputed."""
    layers, hidden, batch, length, vocab = 125, 8192, 32, 1024, 50257
    token = train_flops_per_token(12 * layers * hidden**2, layers, hidden, length, recompute=True)
    step = megatron_step_flops(layers, hidden, batch, length, vocab)
    assert step == pytest.approx(batch * length * (token + 6 * vocab * hidden))
    once = train_flops_per_token(12 * layers * hidden**2, layers, hidden, length, recompute=False)
    assert token / once == pytest.approx(4 / 3)
