"""Copies on a disk of the host: what continues from the last checkpoint is restored, and nothing else is."""

import dataclasses

import pytest
from rich.console import Console
from support.covering import weekly
from support.saved import BATCH, advanced, dump, step_for, trained

from zero_jax import Checkpoints
from zero_jax.checkpoint.local_copies import LocalCopies
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train


def copied(path, step, *numbers, heads=(None,), config="run"):
    """The states of which copies were made, by number; their arrays are deleted then, as a step donates them."""
    copies, states = LocalCopies(path, config), {}
    for number in numbers:
        state = trained(step, 1, seed=number)
        states[number] = dump(step, state)
        copies.save(step, state, at=number, data={"at": number}, heads=list(heads))
    copies.wait()
    return states


def found(path, step, heads=(None,), config="run"):
    return LocalCopies(path, config).restore(step, BATCH, heads=list(heads))


@weekly("stage, count", [(3, 2), (1, 4)])
def test_the_last_copy_is_restored_bit_for_bit(tmp_path, stage, count):
    step = step_for(stage, count)
    states = copied(tmp_path, step, 4, 5, 6)
    assert len(list(tmp_path.glob("*/*.copy"))) == 2
    restored = found(tmp_path, step)
    assert (restored.step, restored.data) == (6, {"at": 6})
    assert dump(step, restored.state) == states[6] != states[5]
    again, losses = advanced(step, restored.state, [6])
    assert losses == advanced(step, trained(step, 1, seed=6), [6])[1]


@pytest.mark.parametrize("damage", ["a bit", "half", "header", "empty"])
def test_a_damaged_copy_is_passed_over(tmp_path, damage):
    step = step_for(3, 2)
    states = copied(tmp_path, step, 4, 5)
    path = max(tmp_path.glob("*/*.copy"))
    raw = bytearray(path.read_bytes())
    raw[{"a bit": -9, "header": 30}.get(damage, 0)] ^= 1 if damage in ("a bit", "header") else 0
    path.write_bytes({"half": raw[: len(raw) // 2], "empty": b""}.get(damage, raw))
    restored = found(tmp_path, step)
    assert restored.step == 4 and dump(step, restored.state) == states[4]


def test_what_does_not_continue_from_the_last_checkpoint_is_passed_over(tmp_path):
    """Another run, other devices, an older copy, a branch that a roll back has abandoned."""
    step, heads = step_for(3, 2), ((10, 1), (20, 2))
    copied(tmp_path, step, 25, heads=heads)
    assert found(tmp_path, step, ((20, 2),)).step == 25  # the control
    assert found(tmp_path, step, ((10, 1),)).step == 25  # the checkpoint 20 was not complete
    for head in (None, (10, 3), (20, 3), (30, 3)):
        assert found(tmp_path, step, (head,)) is None
    assert found(tmp_path, step, ((20, 2),), config="another") is None
    assert found(tmp_path, step_for(3, 4), ((20, 2),)) is None
    copied(tmp_path, step, 19, 20, heads=heads)
    assert found(tmp_path, step, ((20, 2),)) is None


def test_the_heads_of_a_folder(tmp_path):
    step = step_for(3, 2)
    state = trained(step, 1)
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.heads() == [None]
        for number in (10, 20):
            checkpoints.save(step, state, at=number)
        assert checkpoints.heads() == [(10, 1), (20, 2)]
    assert Checkpoints(tmp_path / "run").heads() == [(20, 2)]
    rolled_back = Checkpoints(tmp_path / "run")
    rolled_back.restore(step, BATCH, at=10)
    assert rolled_back.heads() == [(10, 3)]


@pytest.mark.parametrize("by", ["save", "clear"])
def test_what_killed_processes_left_is_removed(tmp_path, by):
    """And the controls: the copies of this run stay until `clear`, and what is not of copies always."""
    step = step_for(3, 2)
    copied(tmp_path, step, 4)
    (here,) = tmp_path.iterdir()
    others = tmp_path / "process-1-of-9"
    others.mkdir()
    for path in (here / "000000000007.tmp", others / "000000000003.tmp", others / "000000000002.copy", others / "mine"):
        path.write_bytes(b"x" * 100)
    if by == "save":
        copied(tmp_path, step, 5)
        assert sorted(path.name for path in here.iterdir()) == ["000000000000.copy", "000000000001.copy"]
        assert found(tmp_path, step).step == 5
    else:
        LocalCopies(tmp_path, "run").clear()
        assert not [*here.iterdir()] and [*others.iterdir()] == [others / "mine"]


def test_what_cannot_be_written_is_logged(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    copied(tmp_path / "file", step_for(3, 2), 1)
    assert "A local copy cannot be written" in caplog.text


class Died(Exception):
    pass


@pytest.mark.parametrize("local", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_its_last_copy(tmp_path, monkeypatch, capsys, local):
    """With the losses of the run that nothing interrupted; without copies, the control, from its last checkpoint."""
    options = {"local_checkpoints": tmp_path / "copies", "local_every": 1} if local else {}
    config = TrainConfig(model="support.pairs:small", batch_size=8, seq_len=8, max_bytes=50_000, samples=0, steps=6,
                         save_every=2, eval_every=6, html=False, out=tmp_path / "run", **options)
    whole = train(dataclasses.replace(config, out=tmp_path / "whole", local_checkpoints=None, local_every=None),
                  console=Console(quiet=True))
    from zero_jax.cli.training import loop

    record = loop.Loop._record
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_record", lambda self, number, metrics: record(self, number, metrics)
                      if number < 6 else (_ for _ in ()).throw(Died))
        with pytest.raises(Died):
            train(config, console=Console(quiet=True))
    copies = list((tmp_path / "copies").glob("*/*.copy"))
    assert len(copies) == (2 if local else 0)
    with pytest.raises(ValueError, match="belongs to another run: seed=0 saved but seed=1 given"):
        train(dataclasses.replace(config, resume=True, seed=1), console=Console(quiet=True))
    assert list((tmp_path / "copies").glob("*/*.copy")) == copies  # a wrong option loses nothing
    resumed = train(dataclasses.replace(config, resume=True))
    told = capsys.readouterr().out
    assert ("Resumed after step 5 of 6 from the copies in" in told) == local
    assert ("Resumed after step 4 of 6, which was saved at" in told) == (not local)
    assert resumed.loss == whole.loss and resumed.validation_loss == whole.validation_loss
    assert not list((tmp_path / "copies").glob("*/*.copy"))
