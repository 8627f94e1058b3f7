"""What other programs keep in the folder is neither listed nor removed, and what is left of ours is."""

import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1
from support.saved import BATCH

import zero_jax
from zero_jax import Checkpoints

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Orbax's names differ between its releases
TREE = {"state": np.arange(5.0), "manifest": np.ones(3)}


def contents(root):
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@pytest.fixture
def others(tmp_path):
    """A folder with two checkpoints of plain Orbax, two of a CheckpointManager, and files of a user."""
    root = tmp_path / "others"
    v1.save_pytree(root / "3", TREE)
    v1.save_checkpointables(root / "40", TREE)
    with ocp.CheckpointManager(root) as manager:
        for number in (60, 100):
            manager.save(number, args=ocp.args.StandardSave(TREE))
    shutil.copytree(root / "3", root / "41.orbax-checkpoint-tmp")  # a save in progress
    for name in ("7", "notes", "8.orbax-checkpoint-tmp/state", "42/manifest"):
        (root / name).mkdir(parents=True)
    (root / "7/data.txt").write_text("mine")
    (root / "42/manifest/data.json").write_text('{"manifest": {"format": "another"}}')
    (root / "42/commit_success.txt").write_text("mine")
    (root / "43").write_text("a file")
    (root / "7.tmp").write_text("a file")
    return root


def test_what_is_not_ours_stays_as_it_is(others, trained_state):
    step, state = trained_state
    before = contents(others)
    assert Checkpoints(others).steps() == [] and Checkpoints(others).latest() is None
    with pytest.raises(zero_jax.CheckpointError, match="has no checkpoint: there is none"):
        Checkpoints(others).restore(step, BATCH, fallback=True)
    with Checkpoints(others, keep_last=1) as checkpoints:
        for number in (2, 5, 9):
            checkpoints.save(step, state, at=number, wait=True)
            assert checkpoints.steps() == [number]
        assert checkpoints.restore(step, BATCH, fallback=True).damaged == ()
        for number in (3, 7, 40, 42, 43, 60, 100):
            with pytest.raises(zero_jax.CheckpointError, match=rf"others/{number} is no checkpoint of zero_jax"):
                checkpoints.save(step, state, at=number)
        assert checkpoints.steps() == [9]
    shutil.rmtree(others / "9")
    assert contents(others) == before
    restored = v1.load_pytree(others / "3")
    np.testing.assert_array_equal(restored["state"], TREE["state"])


def test_what_is_left_of_ours_is_removed(others, trained_state):
    """The control: names of ours."""
    step, state = trained_state
    before = contents(others)
    Checkpoints(others).save(step, state, at=9, wait=True)
    for name in ("51.zero_jax-tmp.orbax-checkpoint-tmp/state", "52.zero_jax-tmp", "53.zero_jax-tmp-removed/state/d"):
        (others / name).mkdir(parents=True)
    Checkpoints(others, keep_last=1).save(step, state, at=10, wait=True)
    shutil.rmtree(others / "10")
    assert contents(others) == before


@pytest.mark.parametrize("lost, listed", [
    ("manifest/data.json", True), ("sizes.json", True), ("order.json", True), ("commit_success.txt", True),
    ("manifest/data.json sizes.json", True), ("manifest/data.json order.json", True),
    ("manifest/data.json sizes.json order.json", False)])
def test_a_damaged_one_of_ours_is_known_as_such(tmp_path, trained_state, lost, listed):
    step, state = trained_state
    for number in (1, 2):
        Checkpoints(tmp_path).save(step, state, at=number, wait=True)
    for name in lost.split():
        (tmp_path / "2" / name).unlink()
    found = Checkpoints(tmp_path, read_only=True).restore(step, BATCH, fallback=True)
    harmless = lost in ("sizes.json", "order.json")
    assert found.step == (2 if harmless else 1) and len(found.damaged) == (listed and not harmless)
    if listed and not harmless:
        assert lost.split()[0] in found.damaged[0]
        with pytest.raises(zero_jax.DamagedCheckpointError, match=lost.split()[0]):
            Checkpoints(tmp_path).restore(step, BATCH)
        Checkpoints(tmp_path, keep_last=1).save(step, state, at=2, data="new", wait=True)
        assert Checkpoints(tmp_path).steps() == [2] and Checkpoints(tmp_path).manifest().data == "new"
