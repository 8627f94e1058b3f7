"""Whole weights gathered in chunks into the old ones, as on TPUs whose SparseCores send: the numbers of one gather."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.flat import flat_step
from support.targets import simulated
from support.workloads import token_batches

import zero_jax
from models import gpt2
from zero_jax.layout import compute_params
from zero_jax.layout.compute_params import Chunk, cut
from zero_jax.tree import named_leaves

EVEN = gpt2.Config(4, 32, 2, vocab_size=512, max_length=16)
ODD = gpt2.Config(3, 20, 2, vocab_size=385, max_length=17)
CASES = {
    "bf16": (2, EVEN, {}, {}), "fp32": (1, EVEN, {}, {"precision": "fp32"}), "odd": (2, ODD, {"data": (2, 4)}, {}),
    "odd, fp32": (1, ODD, {"data": (2, 4)}, {"precision": "fp32"}),
    "hybrid": (2, EVEN, {"data": (2, 2), "replica": 2}, {}), "tensor": (1, EVEN, {"data": 4, "tensor": 2}, {}),
    "int8": (2, EVEN, {}, {"communication": zero_jax.Communication(weights="int8")}),
    "long axis": (2, EVEN, {"data": (2, 4)}, {}), "long axis, odd": (1, ODD, {"data": (4, 2)}, {"precision": "fp32"}),
}  # fmt: skip


def trained(case, chunks, monkeypatch, *, wrong=False):
    """The leaves of the state after three steps, and the traced program of one."""
    stage, config, sizes, options = CASES[case]
    if chunks:
        monkeypatch.setattr(compute_params, "MIN_BYTES", 1)
        monkeypatch.setattr(compute_params, "CHUNK_BYTES", 2**12)
        if "long axis" in case:  # as on v5e: whole leaves over all axes but the last
            monkeypatch.setattr(compute_params, "LONG_AXIS", 2)
            begun, own = [], compute_params._gathered_first
            monkeypatch.setattr(compute_params, "_gathered_first", lambda spec, layout: begun.append(
                (spec, found := own(spec, layout))) or found)
    if wrong:
        right = compute_params.dynamic_update_slice_in_dim
        monkeypatch.setattr(compute_params, "dynamic_update_slice_in_dim", lambda into, value, start, dim: right(
            into, value, max(0, start - value.shape[dim]), dim))
    with simulated("v5e:2x4" if "long axis" in case else None):  # gathers over one axis after another
        step = flat_step(gpt2.build(config), stage, mesh=zero_jax.make_mesh(**sizes), **{
            "precision": "bf16", "tensor_rules": gpt2.tensor_rules(config) if "tensor" in sizes else ()} | options)
    batches = token_batches(3)
    step.functions.known_layout = dataclasses.replace(step.layout(batches[0]), gathers_in_chunks=chunks)
    state = step.init(jax.random.key(0), batches[0])
    text = str(step._jit(batches[0]).trace(step.abstract_state(batches[0]), step.abstract_batch(batches[0])).jaxpr)
    for batch in batches:
        state, _ = step(state, batch)
    assert not chunks or "long axis" not in case or any(spec != first for spec, first in begun)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state) if not name.startswith("rng")}, text


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[] if case in ("odd, fp32", "long axis") else pytest.mark.slow) for case in CASES])
def test_chunks_are_the_leaves_gathered_whole(case, monkeypatch):
    """Bit for bit. And negative control: chunks in the place of the one before."""
    with monkeypatch.context() as in_chunks:
        found, text = trained(case, True, in_chunks)
    once, other = trained(case, False, monkeypatch)
    assert text.count("dynamic_update_slice") > other.count("dynamic_update_slice") + 4 * (case != "int8")
    chex.assert_trees_all_equal(found, once)
    if case == "bf16":
        wrong = trained(case, True, monkeypatch, wrong=True)[0]
        assert any(not np.array_equal(wrong[name], once[name]) for name in once)


@pytest.mark.parametrize(("shape", "specs", "expected"), [
    ((4, 512, 256), (P(None, "data"), P()), [(0, 0, 2), (0, 2, 4)]),
    ((48, 512, 256), (P(None, "data"), P()), [(0, at, at + 16) for at in range(0, 48, 16)]),
    ((1000, 2048), (P(None, "data"), P()), [(0, at, min(at + 512, 1000)) for at in (0, 512)]),
    ((1024, 1000), (P("data"), P()), [(1, at, min(at + 512, 1000)) for at in (0, 512)]),
    ((3, 1024, 256), (P("data"), P(None, "tensor")), [(2, 0, 128), (2, 128, 256)]),
    ((2**20,), (P("data"), P()), []), ((1024, 100), (P("data"), P()), []), ((64, 64), (P(None, "data"), P()), [])])
def test_a_leaf_is_cut_along_a_dim_that_nothing_splits(shape, specs, expected):
    """In two chunks at least, and of the last dims whole tiles; small leaves and vectors are not."""
    size = 2 * int(np.prod(shape))
    assert cut("w", shape, specs, size, 2**22 if len(shape) == 3 else 2**30) == [
        Chunk("w", *each) for each in expected]


def test_chunks_of_large_models_are_larger():
    assert compute_params.chunk_bytes(2**20) == 2**25
    assert compute_params.chunk_bytes(64 * 2**27) == 2**27
