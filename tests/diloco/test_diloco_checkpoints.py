"""Slices that train by themselves (DiLoCo): from checkpoints, in another number, and on as synchronous training."""

import dataclasses

import chex
import flax.linen as nn
import jax
import numpy as np
import pytest
from support.slices import STREAMING, VOCABULARY, batches, bits, make, trained

import zero_jax


@pytest.mark.slow
def test_a_restored_checkpoint_goes_on_bit_for_bit(tmp_path):
    """Control: the slices differ, so that a restore that mixed them up would be seen."""
    given, diloco = batches(6), make(**STREAMING)
    _, state = trained(diloco, given[:4])
    assert not np.array_equal(*bits(state)["params/Dense_0/kernel"])
    with zero_jax.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(diloco, state, wait=True)
        losses, end = trained(diloco, given[4:], state)
        restored = checkpoints.restore(diloco, given[0])
    assert restored.step == 4
    again, other = trained(diloco, given[4:], restored.state)
    np.testing.assert_array_equal(losses, again)
    left, right = bits(end), bits(other)
    assert all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_four_slices_go_on_from_a_checkpoint_of_two(stage, tmp_path):
    """Two slices of four devices become four of two, at another stage; control: the new slices draw other numbers."""
    given, two, four = batches(3), make(2, "nnx", every=2), make(stage, "nnx", replica=4, every=2)
    _, state = trained(two, given[:2])
    before = bits(dataclasses.replace(two.layout().load(state), weights=None))
    with zero_jax.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(two, state, wait=True)
        four.layout(given[0])
        saved = four.of_slices(2)
        resized = four.resized(checkpoints.restore(saved, given[0]).state, saved)
    after = bits(dataclasses.replace(four.layout().load(resized), weights=None))
    for name, leaf in after.items():
        is_shared = name == "step" or name.startswith(("frozen/", "opt_state/outer/"))
        is_key = before[name].dtype == np.uint32
        wanted = before[name] if is_shared else np.concatenate([before[name], before[name]])
        chosen = np.s_[:2] if is_key and not is_shared else np.s_[...]
        np.testing.assert_array_equal(leaf[chosen], wanted[chosen], err_msg=name)
    assert len(np.unique(after["rng"], axis=0)) == 4
    losses, _ = trained(four, given[2:], resized)
    assert losses.shape == (1, 4) and np.isfinite(losses).all()


@pytest.mark.slow
def test_synchronous_training_goes_on_from_the_outer_parameters():
    diloco = make(2, "nnx", step_options={"precision": "bf16"})
    given = batches(4)
    _, state = trained(diloco, given[:3])
    synchronous = diloco.synchronous(state)
    count = synchronous.opt_state[0].count
    assert int(count) == int(synchronous.step) == 3
    synchronous, metrics = diloco.step(synchronous, given[3])
    assert np.isfinite(metrics["loss"])


@pytest.mark.slow
def test_the_outer_parameters_alone(tmp_path):
    """Of a checkpoint with `only_params` as of one of the state; a larger model's are refused."""
    layers, given = [nn.Embed(VOCABULARY, 8), nn.Dense(VOCABULARY), nn.Dense(VOCABULARY)], batches(1)[0]
    plain = [zero_jax.make_zero_train_step(nn.Sequential(layers[:number]), 3) for number in (3, 2)]
    diloco = zero_jax.make_diloco_step(zero_jax.make_zero_train_step(
        nn.Sequential(layers), 3, mesh=zero_jax.make_mesh(replica=2)), every=2)
    with zero_jax.Checkpoints(tmp_path / "run") as checkpoints:
        state = diloco.init(jax.random.key(0), given)
        state = dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf + 1, state.params))
        checkpoints.save(diloco, state, at=0, wait=True)
        checkpoints.save(diloco, state, at=1, only_params=True, wait=True)
        for step, at in ((plain[0], 0), (plain[0], 1), (diloco, 1)):
            loaded, variables = checkpoints.load_params(step, given, at=at)
            chex.assert_trees_all_equal(loaded, diloco.params(state))
            assert variables == {}
        with pytest.raises(zero_jax.CheckpointError, match="params/layers_2/bias .* in the checkpoint and not in this"):
            checkpoints.load_params(plain[1], given)
