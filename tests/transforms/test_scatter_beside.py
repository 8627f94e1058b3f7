"""Gradients that are scattered beside the next product, as on TPU v5e: the numbers stay, and where it is done."""

import types

import jax
import numpy as np
import pytest
from support.oracle import VIEW, loss_difference, oracle, param_difference, slow, train
from support.programs import program
from support.slices import MODELS, batches, trained
from support.targets import mesh_of
from support.workloads import KEY_BIAS, token_batches

import zero_jax
from models import gpt2, gpt2_nnx, llama
from zero_jax.step import gradients
from zero_jax.step.overlap import scatters_beside_products
from zero_jax.transforms import scatter_beside

CONFIG = {"vocab_size": 64, "max_length": 16}
GPT2 = gpt2.Config(2, 32, 2, **CONFIG, remat=True)
BATCHES = token_batches(3, size=16)
LLAMA = llama.build(llama.Config(2, 32, num_heads=4, num_kv_heads=2, hidden=64, **CONFIG))
CASES = {
    "linen": (gpt2.build(GPT2), 4, {}),
    "llama": (LLAMA, 7, {}),
    "nnx": (gpt2_nnx.build(GPT2), 4, {"stage": 1}),
    "no loop": (gpt2.build(gpt2.Config(2, 32, 2, **CONFIG, scan_layers=False)), 8, {}),
    "bf16": (gpt2.build(GPT2), 4, {"precision": "bf16"}),
    "microbatches": (gpt2.build(GPT2), 4, {"accumulate": 2}),
    "context": (gpt2.build(GPT2), 4, {"mesh": {"data": 4, "context": 2}}),
    "replicas": (gpt2.build(GPT2), 4, {"mesh": {"data": (2, 2), "replica": 2}}),
    "uneven": (gpt2.build(gpt2.Config(2, 20, 2, vocab_size=65, max_length=17, remat=True)), 4, {}),
}


@pytest.fixture
def beside(monkeypatch):
    """Lets simulated devices do it, and counts the gradients that are sent so in `number`."""
    found, eqn = types.SimpleNamespace(number=0), scatter_beside._Beside.eqn

    def counted(each):
        found.number += 1
        return eqn(each)

    monkeypatch.setitem(VIEW, "view", "global")
    monkeypatch.setattr(gradients, "scatters_beside_products", lambda *_: True)
    monkeypatch.setattr(scatter_beside._Beside, "eqn", counted)
    return found


def run(case):
    model, _, options = CASES[case]
    options = {"stage": 2, "mesh": {"data": (2, 4)}, **options}
    mesh = zero_jax.make_mesh(**options.pop("mesh"))
    return train(model, options.pop("stage"), mesh, batches=BATCHES, **options)


@pytest.mark.grid
@pytest.mark.parametrize("case", [case if case == "linen" else slow(case) for case in CASES])
def test_the_numbers_are_those_of_a_plain_loop(case, beside):
    model, expected_number, options = CASES[case]
    found, expected = run(case), oracle(model, batches=BATCHES, precision=options.get("precision"))
    assert beside.number == expected_number
    loss, params = (2e-3, 2e-3) if "precision" in options else (2e-6, 2e-5)
    assert loss_difference(found, expected) < loss
    np.testing.assert_allclose(found.norms, expected.norms, rtol=10 * loss)
    assert param_difference(found, expected, KEY_BIAS) < params


@pytest.mark.parametrize("part", ["gradient", "product"])
def test_wrong_ones_are_found(part, beside, monkeypatch):
    """The controls: gradients are means over the first axis, or the product has the other sign."""
    if part == "gradient":
        monkeypatch.setattr(scatter_beside, "reduce_parts", lambda value, *_, behind_first, right=(
            scatter_beside.reduce_parts), **options: right(
                value / jax.lax.psum(1, "data_0"), *_, behind_first=behind_first, **options))
    else:
        bound = scatter_beside.bind_in_scope
        monkeypatch.setattr(scatter_beside, "bind_in_scope", lambda *args: [-each for each in bound(*args)])
    found, expected = run("linen"), oracle(CASES["linen"][0], batches=BATCHES)
    assert beside.number
    if part == "gradient":
        assert np.abs(found.norms / expected.norms - 1).min() > 1e-2
    else:
        assert param_difference(found, expected, KEY_BIAS) > 1e-4


def test_slices_that_train_by_themselves_do_it_too(beside, monkeypatch):
    """Their losses are those without it, which tests/diloco compares with plain loops."""
    def losses():
        step = zero_jax.make_zero_train_step(MODELS["wide"], 2, mesh=zero_jax.make_mesh((2, 2), replica=2))
        return trained(zero_jax.make_diloco_step(step, every=2), batches(3))[0]

    found = losses()
    assert beside.number
    monkeypatch.undo()
    np.testing.assert_allclose(found, losses(), rtol=2e-6)


def test_one_axis_does_not(beside):
    train(CASES["linen"][0], 2, 8, batches=BATCHES[:1])
    assert not beside.number


@pytest.mark.parametrize(("stage", "target", "options", "expected"), [
    (2, "v5e:4x4", {}, True), (1, "v5e:4x4", {"overlap": True}, True), (2, "v5e:4x4", {"overlap": False}, False),
    (3, "v5e:4x4", {}, False), (2, "v5p:2x2x2", {}, False)])
def test_it_is_for_v5e(stage, target, options, expected):
    step = zero_jax.make_zero_train_step(gpt2.build(GPT2), stage, mesh=mesh_of(target), **options)
    assert scatters_beside_products(step.options, step.layout(BATCHES[0])) == expected


@pytest.mark.slow
def test_v5e_sends_more_of_two_axes_beside_products():
    """All of a loop's reductions of whole weights. The control makes each gradient when XLA pleases."""
    found, plain = (program(f"v5e:4x4 stage 2, 4 layers{name}") for name in ("", ", gradients last"))
    assert not found.report.violations and found.sent() == pytest.approx(plain.sent(), rel=1e-3)
    for each, expected in ((found, True), (plain, False)):
        reductions = [c for c in each.collectives if c.kind == "reduce-scatter" and c.in_loop]
        assert len(reductions) == 8 and all(c.asynchronous for c in reductions) == expected
