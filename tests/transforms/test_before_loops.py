"""Products of gradients that a loop over layers waits for, as on TPU v5p: the numbers stay, and logits do not."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracle import VIEW, loss_difference, oracle, param_difference, slow, train
from support.targets import mesh_of
from support.workloads import KEY_BIAS, token_batches

import zero_jax
from models import gpt2, gpt2_nnx, llama
from zero_jax.step import gradients
from zero_jax.step.overlap import multiplies_before_loops
from zero_jax.transforms import before_loops

CONFIG = {"vocab_size": 64, "max_length": 16}
GPT2 = gpt2.Config(2, 32, 2, **CONFIG, remat=True)
BATCHES = token_batches(3, size=64)
LLAMA = llama.build(llama.Config(2, 32, num_heads=4, num_kv_heads=2, hidden=64, **CONFIG))
CASES = {
    "linen": (gpt2.build(GPT2), 1, {}),
    "llama": (LLAMA, 1, {}),
    "nnx": (gpt2_nnx.build(GPT2), 1, {"stage": 1}),
    "stage 3": (gpt2.build(GPT2), 1, {"stage": 3}),
    "bf16": (gpt2.build(GPT2), 1, {"precision": "bf16"}),
    "microbatches": (LLAMA, 1, {"stage": 3, "accumulate": 2}),
    "no loop": (gpt2.build(gpt2.Config(2, 32, 2, **CONFIG, scan_layers=False)), 0, {}),
    "tensor": (gpt2.build(GPT2), 0, {"mesh": {"data": 4, "tensor": 2}, "tensor_rules": gpt2.tensor_rules(GPT2)}),
    "context": (gpt2.build(GPT2), 0, {"mesh": {"data": 4, "context": 2}}),
    "replicas": (LLAMA, 1, {"mesh": {"data": (2, 2), "replica": 2}}),
    "uneven": (gpt2.build(gpt2.Config(2, 20, 2, vocab_size=65, max_length=17, remat=True)), 1, {"stage": 3}),
}


@pytest.fixture
def before(monkeypatch):
    """Lets simulated devices do it, and counts the products that loops wait for in `number`."""
    found, waited = types.SimpleNamespace(number=0), before_loops._waited

    def counted(loop, products):
        found.number += len(products)
        return waited(loop, products)

    monkeypatch.setitem(VIEW, "view", "global")
    monkeypatch.setattr(gradients, "multiplies_before_loops", lambda *_: True)
    monkeypatch.setattr(before_loops, "_waited", counted)
    return found


def run(case):
    model, _, options = CASES[case]
    options = {"stage": 2, "mesh": {"data": (2, 4)}, **options}
    mesh = zero_jax.make_mesh(**options.pop("mesh"))
    return train(model, options.pop("stage"), mesh, batches=BATCHES, **options)


@pytest.mark.grid
@pytest.mark.parametrize("case", [case if case in ("linen", "llama") else slow(case) for case in CASES])
def test_the_numbers_are_those_of_a_plain_loop(case, before):
    model, expected_number, options = CASES[case]
    found, expected = run(case), oracle(model, batches=BATCHES, precision=options.get("precision"))
    assert before.number == expected_number
    loss, params = (2e-3, 2e-3) if "precision" in options else (2e-6, 2e-5)
    assert loss_difference(found, expected) < loss
    np.testing.assert_allclose(found.norms, expected.norms, rtol=10 * loss)
    assert param_difference(found, expected, KEY_BIAS) < params


def test_a_wrong_one_is_found(before, monkeypatch):
    """The control: of each device's part only half is kept."""
    class Half(before_loops.PartialGradient):
        def own(self, values, bind=None):
            return super().own(values, bind) / 2

    monkeypatch.setattr(before_loops, "PartialGradient", Half)
    found, expected = run("linen"), oracle(CASES["linen"][0], batches=BATCHES)
    assert before.number and np.abs(found.norms / expected.norms - 1).min() > 1e-2


def test_products_that_leave_more_than_they_take_are_left(before):
    """Here the gradient of the vocabulary is larger than the logits of a device."""
    train(CASES["linen"][0], 2, zero_jax.make_mesh((2, 4)), batches=token_batches(1, size=8))
    assert not before.number


@pytest.mark.parametrize(("target", "options", "expected"), [
    ("v5p:2x2x2", {}, True), ("v6e:2x4", {}, True), ("v5p:2x2x2", {"overlap": False}, False), ("v5e:4x4", {}, False),
    ("h100:8", {}, False)])
def test_it_is_for_v5p_and_v6e(target, options, expected):
    step = zero_jax.make_zero_train_step(gpt2.build(GPT2), 2, mesh=mesh_of(target), **options)
    assert multiplies_before_loops(step.options, step.layout(BATCHES[0])) == expected


@pytest.mark.slow
def test_logits_are_not_alive_in_backward(monkeypatch):
    """The control makes the head's gradient when XLA pleases: behind the loop."""
    def temporaries():
        model = gpt2.build(gpt2.Config(16, 512, 8, vocab_size=8192, max_length=512, remat=True))
        step = zero_jax.make_zero_train_step(model, 3, mesh=mesh_of("v5p:2x2x2"), precision="bf16")
        tokens = jax.ShapeDtypeStruct((32, 512), jnp.int32)
        program = step.compiled_step({"inputs": tokens, "targets": tokens})
        assert not program.report.violations
        return program.memory.temp_size_in_bytes

    found = temporaries()
    monkeypatch.setattr(gradients, "multiplies_before_loops", lambda *_: False)
    assert found < 0.85 * temporaries()
