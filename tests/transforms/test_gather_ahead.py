"""Loops that carry the next round's first weight, as on TPU v5e: the numbers stay, and which loops do it."""

import types

import pytest
from support.oracle import VIEW, loss_difference, oracle, param_difference, slow, train
from support.targets import mesh_of
from support.workloads import KEY_BIAS, token_batches

import zero_jax
from models import gpt2, gpt2_nnx, llama
from zero_jax.step import gradients
from zero_jax.step.overlap import gathers_ahead
from zero_jax.transforms import gather_ahead

GPT2 = gpt2.Config(4, 32, 2, vocab_size=64, max_length=16, remat=True)
LLAMA = llama.Config(4, 32, num_heads=4, num_kv_heads=2, hidden=64, vocab_size=64, max_length=16)
BATCHES = token_batches(3, size=16)
CASES = {
    "linen": (gpt2.build(GPT2), {}),
    "nnx": (gpt2_nnx.build(GPT2), {}),
    "llama, no checkpoints": (llama.build(LLAMA), {}),
    "microbatches": (gpt2.build(GPT2), {"accumulate": 2}),
    "bf16": (gpt2.build(GPT2), {"precision": "bf16"}),
    "uneven": (gpt2.build(gpt2.Config(4, 20, 2, vocab_size=65, max_length=17, remat=True)), {}),
}


@pytest.fixture
def ahead(monkeypatch):
    """Lets small loops on simulated devices gather ahead, and counts those that do in `loops`."""
    found, run = types.SimpleNamespace(loops=0), gather_ahead._Loop.run

    def counted(loop, *args):
        found.loops += 1
        return run(loop, *args)

    monkeypatch.setitem(VIEW, "view", "global")
    monkeypatch.setattr(gradients, "gathers_ahead", lambda *_: True)
    monkeypatch.setattr(gather_ahead, "MAX_WASTE", 1)
    monkeypatch.setattr(gather_ahead._Loop, "run", counted)
    return found


@pytest.mark.grid
@pytest.mark.parametrize("case", [case if case == "linen" else slow(case) for case in CASES])
def test_the_numbers_are_those_of_a_plain_loop(case, ahead):
    """Every loop over layers does it, forward and backward."""
    model, options = CASES[case]
    found = train(model, 3, 8, batches=BATCHES, **options)
    assert ahead.loops == 2
    expected = oracle(model, batches=BATCHES, precision=options.get("precision"))
    loss, params = (2e-3, 2e-3) if "precision" in options else (2e-6, 2e-5)
    assert loss_difference(found, expected) < loss
    assert param_difference(found, expected, KEY_BIAS) < params


def test_the_weight_of_another_round_is_found(ahead, monkeypatch):
    """The control: each round gathers the first layer's weight for the next one."""
    monkeypatch.setattr(gather_ahead, "dynamic_index_in_dim", lambda shards, number, **_: shards[0])
    model, _ = CASES["linen"]
    assert loss_difference(train(model, 3, 8, batches=BATCHES), oracle(model, batches=BATCHES)) > 1e-4
    assert ahead.loops == 2


def test_few_rounds_do_not(ahead, monkeypatch):
    """Of 4 rounds the last would gather a 16th of what a loop gathers, and nobody would read it."""
    monkeypatch.setattr(gather_ahead, "MAX_WASTE", 1 / 32)
    train(gpt2.build(GPT2), 3, 8, batches=BATCHES[:1])
    assert not ahead.loops


@pytest.mark.parametrize(("stage", "target", "overlap", "expected"), [
    (3, "v5e:2x4", True, True), (3, "v5e:2x4", "auto", True), (3, "v5e:2x4", {"xla_tpu_x": 1}, True),
    (3, "v5e:2x4", False, False), (2, "v5e:2x4", "auto", False), (3, "v5p:2x2x2", "auto", False)])
def test_it_is_for_v5e(stage, target, overlap, expected):
    step = zero_jax.make_zero_train_step(gpt2.build(GPT2), stage, mesh=mesh_of(target), overlap=overlap)
    assert gathers_ahead(step.options, step.layout(BATCHES[0])) == expected
