"""What a policy keeps, counted in the traced step, against arithmetic, the compiled program, and a device's peak."""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from oracle import slow
from test_contract import described

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax import buffers, gradients
from zero_jax.accounting import backward_peak_bytes
from zero_jax.kept import kept, weight_bytes

LAYERS, WIDTH, LENGTH, SEQUENCES = 8, 256, 256, 3
CONFIG = gpt2.Config(LAYERS, WIDTH, 4, vocab_size=512, max_length=LENGTH)
STREAM = LAYERS * SEQUENCES * LENGTH * WIDTH * 2
"""Bytes of what enters each block, on one device."""
FLAVOURS = {"linen": gpt2, "nnx": gpt2_nnx}
KEPT = {"full": ("full", 1), "dots": ("dots", 1 + 3 + 1 + 4), "names": (("attention",), 1 + 1),
        "every 2": (zero_jax.Remat(every=2), 1 / 2), "every 4": (zero_jax.Remat(every=4), 1 / 4),
        "both": (zero_jax.Remat(("attention",), every=2), 1 / 2 + 1), "sqrt": (zero_jax.Remat(every="sqrt"), 1 / 2)}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    import policy_table

    return policy_table


def step_of(remat, mesh=None, model=gpt2, config=CONFIG, stage=3, **options):
    return zero_jax.make_zero_train_step(
        model.build(config), stage, mesh=mesh or zero_jax.make_mesh(), precision="bf16", remat=remat, **options)


def batch_of(devices=8):
    return {name: jax.ShapeDtypeStruct((SEQUENCES * devices, LENGTH), jnp.int32) for name in ("inputs", "targets")}


@functools.cache
def compiled(name, named=True):
    """The step for described H100s; `named`: whether what loops carry has names."""
    with pytest.MonkeyPatch.context() as patch:
        if not named:
            patch.setattr(gradients, "name_carried", lambda jaxpr: jaxpr)
        return step_of(KEPT[name][0], described("h100:8")).compile(batch_of())


def stacked(text, rounds):
    """Bytes of the streams that loops of so many rounds carry, where most of them are alive."""
    found = buffers.Buffers(text)
    _, alive = found.at_peak(each for each in found.temporaries
                             if each.values[0].array.dims[:3] == (rounds, SEQUENCES, LENGTH))
    return sum(each.bytes for each in alive)


@pytest.mark.parametrize("name, flavour", [
    row if row in {("dots", "linen"), ("both", "linen"), ("every 4", "nnx")} else slow(*row)
    for row in itertools.product(KEPT, FLAVOURS)])
def test_what_is_kept_is_what_the_policy_says(name, flavour):
    remat, streams = KEPT[name]
    found = kept(step_of(remat, model=FLAVOURS[flavour]), batch_of())
    assert found.stacked == streams * STREAM
    assert found.rounds == (LAYERS // remat.group(LAYERS) if isinstance(remat, zero_jax.Remat) else LAYERS)
    assert found.largest == SEQUENCES * LENGTH * CONFIG.vocab_size * 4 < found.other  # logits
    assert found.total == found.stacked + found.other


def test_a_model_that_checkpoints_itself_keeps_the_same():
    own = kept(step_of(None, config=dataclasses.replace(CONFIG, remat=True)), batch_of())
    assert own == kept(step_of("full"), batch_of())
    assert kept(step_of(None), batch_of()).stacked > 40 * own.stacked


def test_without_names_groups_of_blocks_keep_every_block(monkeypatch):
    """The control: a policy that cannot name what enters a group keeps what leaves each block."""
    monkeypatch.setattr(gradients, "name_carried", lambda jaxpr: jaxpr)
    assert kept(step_of(zero_jax.Remat(every=4)), batch_of()).stacked == STREAM


@pytest.mark.parametrize("name", ["every 2", slow("full"), slow("dots")])
def test_the_compiled_loop_carries_that_once(name):
    found = kept(step_of(KEPT[name][0]), batch_of())
    assert stacked(compiled(name).as_text(), found.rounds) == found.stacked


@pytest.mark.slow
def test_the_compiled_loop_without_names_carries_it_twice():
    assert stacked(compiled("full", named=False).as_text(), LAYERS) == 2 * STREAM


def test_two_moments():
    sizes = {"state": 100, "gradients": 10, "stacked": 5, "other": 7, "largest": 6, "block": 9}
    assert backward_peak_bytes(**sizes) == {"loss": 128, "block": 124}
    assert backward_peak_bytes(**sizes, every=3, weights=2, waiting=1) == {"loss": 128, "block": 115 + 4 * 9 + 7}


def test_weights_of_a_block_and_the_largest_other_gradient():
    block, largest = weight_bytes(step_of("full").layout(batch_of()))
    assert block == 2 * (CONFIG.num_block_params // LAYERS + 13 * WIDTH)
    assert largest == 2 * CONFIG.vocab_size * WIDTH


@pytest.mark.parametrize("changes", [{"stage": 2}, {"accumulate": 2}, {"mesh": zero_jax.make_mesh(1)}])
def test_steps_without_one_backward_pass_are_refused(changes):
    with pytest.raises(ValueError, match="^kept: "):
        kept(step_of("full", **changes), batch_of())


def test_a_row(script):
    """Temporaries alone, for one in which they are most of the memory; by another policy's formula they are not it."""
    mesh, batch = described("h100:8"), batch_of()
    state = step_of("full", mesh).layout(batch).device_bytes

    def off(remat):
        _, needed, _, _ = script.formula(CONFIG, remat, mesh, batch)
        return abs((needed - state) / compiled("every 2").memory_analysis().temp_size_in_bytes - 1)

    assert off(KEPT["every 2"][0]) <= script.TOLERANCE
    assert off("full") > script.TOLERANCE < off(None)


def test_a_row_that_is_off_is_told(script, monkeypatch, tmp_path, capsys):
    def row(name, policy, mesh):
        compiled = 100.0 if policy == "full" else 89.0
        return None if policy == "sqrt" else script.Row(name, 1, policy, 10, 1, 1, "loss", 100.0, compiled, True, 1)

    described("h100:8")
    monkeypatch.setattr(script, "measure", row)
    assert script.main(["--models", "1.5b", "--policies", "full", "sqrt", "--out", str(tmp_path / "rows.md")])
    assert "48 blocks do not divide for 'sqrt'" in capsys.readouterr().out
    assert (tmp_path / "rows.md").read_text().count("\n| 1.5b | 1 | full |") == 1
    assert not script.main(["--models", "1.5b", "--policies", "full", "dots"])
    assert "1.5b, dots: the formula is +12.4% off" in capsys.readouterr().out


@pytest.mark.slow
def test_a_preset(script):
    """As a user runs it; beside one that waits for the logits and one that waits for a block."""
    described("h100:8")
    assert script.main(["--models", "1.5b", "--policies", "full", "every 2"])
