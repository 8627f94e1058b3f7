"""Factored and low-precision optimizer states: counted as they are, and told beside AdamW's."""

import json
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.command_line import run
from support.oracle import loss_difference, oracle, param_difference, slow, train
from support.workloads import KEY_BIAS, token_batches

import zero_jax
from models import gpt2
from zero_jax.cli.options.of_step import Optimizer
from zero_jax.cli.reports.report import optimizer_bytes, optimizer_text
from zero_jax.cli.train_config import TrainConfig
from zero_jax.optim.presets import NAMES, OPTIMIZERS
from zero_jax.planning.memory import memory_report
from zero_jax.xla import devices as xla_devices

CONFIG = gpt2.Config(2, 256, 4, vocab_size=512, max_length=16)  # every leaf divides by eight
SMALL = gpt2.Config(1, 128, 2, vocab_size=64, max_length=16)
BATCH = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}


def layout_of(name, stage=3):
    optimizer = OPTIMIZERS[name](learning_rate=1e-3, weight_decay=0.1)
    return zero_jax.make_zero_train_step(gpt2.build(CONFIG), stage, optimizer=optimizer).layout(BATCH)


PSI = CONFIG.num_params


@pytest.mark.parametrize(("name", "bytes_per_param"), [
    ("adamw", 8), ("adamw-bf16-momentum", 6), ("lion", 4), ("lion-bf16-momentum", 2), ("sgd-momentum", 4), ("lamb", 8)])
def test_bytes_per_parameter(name, bytes_per_param):
    held, usual = optimizer_bytes(layout_of(name))
    assert usual == 8 * PSI // 8 + 4
    assert held in (bytes_per_param * PSI // 8, bytes_per_param * PSI // 8 + 4)  # and a count of steps
    fewer = f"{usual - held:,} fewer than" if bytes_per_param < 8 else "as"
    assert f"{held:,} bytes on each device, {fewer} AdamW in fp32 ({usual:,})" in optimizer_text(layout_of(name))


def test_a_factored_state_holds_rows_and_columns():
    layout = layout_of("adafactor")
    expected = 4  # the count of steps
    for leaf in jax.tree.leaves(layout.state.params):
        rows, columns = sorted(leaf.shape)[-2:] if leaf.ndim > 1 else (0, 0)
        if rows >= 128:  # optax factors the two largest dims, from this size on
            stacked = leaf.size // rows // columns
            expected += 4 * (stacked * (rows + columns) // 8 + 1)  # and a single number instead of the matrix
        else:
            expected += 4 * (leaf.size // 8 + 2)
    assert optimizer_bytes(layout)[0] == expected
    assert expected < 0.02 * PSI  # AdamW: 1.0 psi on each of eight devices


def test_the_memory_report_tells_what_is_stored():
    report = memory_report(layout_of("adamw-bf16-momentum"))
    assert report["momentum"].placed == 2 * PSI / 8 and report["momentum"].formula == 4 * PSI / 8
    assert report["variance"].placed == 4 * PSI / 8
    assert "bfloat16" in report["momentum"].note


@pytest.mark.grid
@pytest.mark.parametrize("name", [  # the table has the others
    slow("adamw-bf16-momentum"), slow("adafactor"), slow("lion-bf16-momentum")])
def test_trajectory_is_one_device(name):
    model, optimizer = gpt2.build(SMALL), OPTIMIZERS[name](learning_rate=1e-3, weight_decay=0.1)
    one = oracle(model, batches=token_batches(3), optimizer=optimizer)
    many = train(model, 3, 8, batches=token_batches(3), optimizer=optimizer)
    assert loss_difference(many, one) < 1e-5
    # Adam and Lion turn a gradient that rounds to another sign into steps of the rate.
    moved = np.mean([np.mean(np.abs(many.params[leaf] - one.params[leaf])) for leaf in one.params if "qkv" not in leaf])
    assert moved < 1e-5
    assert param_difference(many, one, KEY_BIAS) < 1e-2


def test_the_command_line_knows_the_same_names():
    assert set(get_args(Optimizer)) == set(NAMES) and len(NAMES) == len(OPTIMIZERS) + 1  # and muon, which takes a mesh
    with pytest.raises(ValueError, match="optimizer='adam' is unknown. Did you mean 'adamw'"):
        TrainConfig(optimizer="adam")


@pytest.mark.slow
def test_a_plan_tells_the_bytes_saved():
    if extra := xla_devices.missing_compiler("h100:8"):
        pytest.skip(f"needs {extra}")
    done = run("plan", "--model", "gpt2:tiny", "--target", "h100:8", "--optimizer", "lion-bf16-momentum",
               "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["plan"]
    assert 3.9 < found["adamw_bytes"] / found["optimizer_bytes"] < 4.1
