"""Bit for bit means every bit: signs of zero, subnormal numbers and payloads of NaN, in padded stacks, too."""

import jax
import numpy as np
import pytest
from support.covering import weekly
from support.oracle import slow
from support.saved import BATCH, difference, dump, make_step, muon_by_owner

import zero_jax
from zero_jax.checkpoint import logical_state
from zero_jax.tree import named_leaves

WORDS = np.array([0x80000000, 1, 0x80000001, 0x007FFFFF, 0x7F800001, 0xFFC00001, 0x7FA00000, 0x7F800000], np.uint32)
"""-0.0, three subnormal numbers, a signalling NaN, two NaNs with payloads, infinity."""


def muon_step(stage, count):
    mesh = zero_jax.make_mesh(devices=jax.devices()[:count])
    return make_step(stage, count, mesh=mesh, optimizer=muon_by_owner(mesh))


def with_odd_bits(step):
    """A state whose float32 leaves are filled with `WORDS`."""
    state = step.init(jax.random.key(0), BATCH)
    assert any("/owned/" in name for name, _ in named_leaves(state))

    def filled(leaf):
        if leaf.dtype != np.float32:
            return leaf
        value = np.resize(WORDS, leaf.shape).view(np.float32)
        return jax.device_put(value, leaf.sharding)

    return jax.tree.map(filled, state)


@pytest.mark.grid
@weekly("stage, count, other, others", [
    (3, 8, 1, 4), (1, 8, 1, 8), slow(1, 4, 1, 8), slow(3, 2, 3, 8), slow(2, 8, 0, 1), slow(0, 1, 2, 8)])
def test_odd_bits_in_stacks_by_owner(tmp_path, stage, count, other, others):
    step = muon_step(stage, count)
    state = with_odd_bits(step)
    before = dump(step, state)
    zero_jax.Checkpoints(tmp_path).save(step, state, wait=True)
    target = muon_step(other, others)
    assert difference(before, dump(target, zero_jax.Checkpoints(tmp_path).restore(target, BATCH).state)) == []


def test_moved_as_floats_they_would_change(tmp_path, monkeypatch):
    """The control."""
    monkeypatch.setattr(logical_state, "on_bits", lambda move, leaf: move(leaf))
    step = muon_step(1, 8)
    state = with_odd_bits(step)
    before = dump(step, state)
    zero_jax.Checkpoints(tmp_path).save(step, state, wait=True)
    changed = difference(before, dump(step, zero_jax.Checkpoints(tmp_path).restore(step, BATCH).state))
    assert changed and all("/owned/" in name for name in changed)
