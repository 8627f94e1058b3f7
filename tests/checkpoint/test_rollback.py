"""Rolling back: the newest save wins, whatever its number; what is abandoned stays until as much is saved anew."""

import json
import shutil
import time

import pytest
from support.saved import BATCH

import zero_jax
from zero_jax import Checkpoints
from zero_jax.checkpoint.history import PLACE, History, Place, parse_place


@pytest.fixture(scope="module")
def three(tmp_path_factory, trained_state):
    """A folder with the checkpoints 10, 20 and 30."""
    root, (step, state) = tmp_path_factory.mktemp("three"), trained_state
    with Checkpoints(root) as checkpoints:
        for number in (10, 20, 30):
            checkpoints.save(step, state, at=number, data=number)
    return root


@pytest.fixture
def copy(three, tmp_path):
    return shutil.copytree(three, tmp_path / "copy")


def names(root):
    return sorted((path.name for path in root.iterdir()), key=lambda name: (len(name), name))


def test_after_a_rollback_the_new_branch_is_resumed(copy, trained_state):
    step, state = trained_state
    checkpoints = Checkpoints(copy)
    assert checkpoints.latest() == 30
    assert checkpoints.restore(step, BATCH, at=20).data == 20
    assert checkpoints.latest() == 20 and Checkpoints(copy).latest() == 20 and Checkpoints(copy).steps() == [10, 20, 30]
    assert Checkpoints(copy).restore(step, BATCH).data == 20
    checkpoints.save(step, state, at=25, data="new", wait=True)
    found = Checkpoints(copy).restore(step, BATCH)
    assert (found.step, found.data) == (25, "new") and Checkpoints(copy).manifest().step == 25
    assert names(copy) == ["10", "20", "25"]


def test_what_is_abandoned_stays_until_as_many_are_saved(copy, trained_state, caplog):
    step, state = trained_state
    checkpoints = Checkpoints(copy)
    checkpoints.restore(step, BATCH, at=10)
    assert "30, 20 are abandoned" in caplog.text
    checkpoints.save(step, state, at=15, wait=True)
    assert checkpoints.steps() == [10, 15, 20, 30] and checkpoints.latest() == 15
    # The way back: 30 is still there, and what leads up to it is not abandoned then.
    back = Checkpoints(shutil.copytree(copy, copy.with_name("back")))
    assert back.restore(step, BATCH, at=30).data == 30 and back.latest() == 30
    back.save(step, state, at=40, wait=True)
    assert back.steps() == [20, 30, 40]
    checkpoints.save(step, state, at=18, wait=True)
    assert checkpoints.steps() == [10, 15, 18]


def test_a_number_of_the_abandoned_branch_is_saved_anew(copy, trained_state):
    step, state = trained_state
    checkpoints = Checkpoints(copy)
    checkpoints.restore(step, BATCH, at=20)
    with pytest.raises(zero_jax.CheckpointError, match="has a checkpoint 10 already"):
        checkpoints.save(step, state, at=10)
    checkpoints.save(step, state, at=30, data="new", wait=True)
    assert Checkpoints(copy).restore(step, BATCH).data == "new" and names(copy) == ["10", "20", "30"]
    with pytest.raises(zero_jax.CheckpointError, match="has a checkpoint 30 already"):
        checkpoints.save(step, state, at=30)


def test_a_save_that_fails_keeps_the_abandoned_one(copy, trained_state, monkeypatch):
    from zero_jax.checkpoint import orbax_store

    step, state = trained_state
    checkpoints = Checkpoints(copy)
    checkpoints.restore(step, BATCH, at=20)

    def fails(folder):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(orbax_store, "sync_tree", fails)
        with pytest.raises(zero_jax.CheckpointError, match="30 could not be written .*No space left"):
            checkpoints.save(step, state, at=30, data="new", wait=True)
    assert names(copy) == ["10", "20", "30"] and Checkpoints(copy).latest() == 20
    assert Checkpoints(copy, read_only=True).restore(step, BATCH, at=30).data == 30


@pytest.mark.parametrize("keep_last, numbers, kept", [(1, (5, 1), [1]), (2, (5, 6, 1, 2), [1, 2]), (3, (9, 3), [3])])
def test_the_newest_save_wins(tmp_path, trained_state, keep_last, numbers, kept):
    step, state = trained_state
    checkpoints = Checkpoints(tmp_path, keep_last=keep_last)
    for number in numbers:
        checkpoints.save(step, state, at=number, wait=True)
        assert Checkpoints(tmp_path).latest() == number
    assert Checkpoints(tmp_path).steps() == kept


@pytest.mark.parametrize("read_first", ["nothing", "steps", "load_params", "an earlier restore", "restore", "rollback"])
def test_a_run_that_does_not_continue_another_removes_nothing_of_it(copy, trained_state, read_first):
    """The controls: one that has restored from there may go back, and the older ones are then those that need not stay.

    What is saved by another object after a restore is of another run, too.
    """
    step, state = trained_state
    checkpoints = Checkpoints(copy)
    {"steps": checkpoints.steps, "load_params": lambda: checkpoints.load_params(step, BATCH),
     "restore": lambda: checkpoints.restore(step, BATCH), "rollback": lambda: checkpoints.restore(step, BATCH, at=10),
     "an earlier restore": lambda: checkpoints.restore(step, BATCH)}.get(read_first, lambda: None)()
    if read_first == "an earlier restore":
        Checkpoints(copy).save(step, state, at=40, wait=True)
    before = names(copy)
    if read_first in ("restore", "rollback"):
        for number in (11, 12, 13):
            checkpoints.save(step, state, at=number, wait=True)
        assert names(copy) == ["11", "12", "13"]
        return
    for number in (1, 12, 29, 35)[:4 if read_first == "an earlier restore" else 3]:
        with pytest.raises(zero_jax.CheckpointError, match=f"has a checkpoint {before[-1]} of another run"):
            checkpoints.save(step, state, at=number, wait=True)
    assert names(copy) == before


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"))])  # of writes that end after Orbax has given the save up
def test_two_objects_of_a_process_save_one_after_the_other(tmp_path, trained_state, monkeypatch, shared):
    """A notebook's cell that is run again: the save in progress of the first object stays, and so does its number.

    Where each object knows of its own saves alone (the control) the second removes it.
    """
    from zero_jax.checkpoint import orbax_store, retention

    step, state = trained_state
    (tmp_path / "link").symlink_to(tmp_path / "run")
    sync = orbax_store.sync_tree
    monkeypatch.setattr(orbax_store, "sync_tree", lambda folder: (time.sleep(0.5), sync(folder)))
    first = Checkpoints(tmp_path / "run", keep_last=None)
    first.save(step, state, at=0, data=0)
    if not shared:
        monkeypatch.setattr(retention, "_FOLDERS", {})
    second = Checkpoints(tmp_path / "link", keep_last=None)
    second.save(step, state, at=1, data=1)
    if not shared:
        with pytest.raises(zero_jax.CheckpointError, match="could not be written"):
            first.close()
            second.close()
        return
    for number in (0, 1):
        with pytest.raises(zero_jax.CheckpointError, match="has a checkpoint [01] "):
            first.save(step, state, at=number)
    first.close()
    second.close()
    assert Checkpoints(tmp_path / "run").steps() == [0, 1] and names(tmp_path / "run") == ["0", "1"]
    assert Checkpoints(tmp_path / "run", read_only=True).restore(step, BATCH, at=0).data == 0


def test_fallback_follows_the_branch_and_abandoned_ones_come_last(copy, trained_state):
    step, state = trained_state
    checkpoints = Checkpoints(copy)
    checkpoints.restore(step, BATCH, at=10)
    checkpoints.save(step, state, at=15, data="new", wait=True)
    for number, expected in ((15, 10), (10, 30), (30, 20)):
        (copy / f"{number}/manifest/data.json").write_text("")
        found = Checkpoints(copy, read_only=True).restore(step, BATCH, fallback=True)
        assert found.step == expected
        assert f"{copy / str(number)}/manifest/data.json is damaged" in " ".join(found.damaged)


def test_reading_alone_abandons_nothing(copy, trained_state):
    step, state = trained_state
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    Checkpoints(copy).load_params(step, BATCH, at=10)
    reader = Checkpoints(copy, read_only=True)
    assert reader.restore(step, BATCH, at=10).data == 10 and reader.latest() == 30
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    with pytest.raises(ValueError, match="read_only=True"):
        reader.save(step, state, at=40)
    # The control: without it the same call rolls back.
    Checkpoints(copy).restore(step, BATCH, at=10)
    assert Checkpoints(copy).latest() == 10


def replaced_place(path, text):
    """Damages or deletes (None) the file of a checkpoint's place."""
    (path / PLACE).unlink() if text is None else (path / PLACE).write_text(text)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"sha256": 1}', "\0", None])
def test_the_manifest_has_the_place_too(copy, trained_state, text):
    step, state = trained_state
    checkpoints = Checkpoints(copy)
    checkpoints.restore(step, BATCH, at=20)
    checkpoints.save(step, state, at=25, wait=True)
    for number in (10, 20, 25):
        replaced_place(copy / str(number), text)
    assert Checkpoints(copy).latest() == 25
    # The control: where both are damaged, the number decides, and what is damaged is tried and reported.
    (copy / "20/manifest/data.json").write_text("")
    (copy / "25/manifest/data.json").write_text("")
    found = Checkpoints(copy, read_only=True).restore(step, BATCH, fallback=True)
    assert found.step == 10 and len(found.damaged) == 2


def test_a_place_whose_bits_changed_is_none():
    place = Place(3, 0, (10, 20)).to_json()
    assert parse_place(json.loads(json.dumps(place))) == Place(3, 0, (10, 20))
    assert parse_place(place | {"saved": 9}) is None and parse_place(None) is None and parse_place([1]) is None


def test_histories():
    history = History({10: Place(1, 0, ()), 20: Place(2, 4, (10,)), 30: Place(3, 0, (10, 20))})
    assert (history.head, history.branch(20), history.abandoned()) == (20, [20, 10], [30])
    assert history.candidates(None) == [20, 10, 30] and history.candidates(30) == [30, 20, 10]
    assert history.candidates(10) == [10] and history.candidates(15) == []
    assert history.new_place(25, 20) == Place(5, 0, (10, 20)) and history.restored_place(10) == Place(1, 5, ())
    assert History({}).head is None and History({}).candidates(None) == [] and History({}).new_place(1, None).saved == 1
    # The control: by numbers alone 30 would be the latest.
    assert max((10, 20, 30)) != history.head
