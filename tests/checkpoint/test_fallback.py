"""A restore falls back past every manifest that is none, past one of another checkpoint, and past an empty folder."""

import json
import shutil

import pytest
from support.saved import BATCH

import zero_jax
from zero_jax import Checkpoints
from zero_jax.files import checksum


def odd(**values):
    """The text of a manifest with the right checksum and some values that are none."""
    def change(text):
        body = json.loads(text)["manifest"] | values
        del body["checksum"]
        return json.dumps({"manifest": body | {"checksum": checksum(body)}})

    return change


def whole(value):
    """The text of a manifest that is not a dict."""
    return lambda _: json.dumps({"manifest": value})


ODD = {
    "empty": lambda _: "", "null": lambda _: "null", "list": lambda _: "[]", "text": lambda _: '"x"',
    "number": lambda _: "3", "dict": lambda _: "{}", "null inside": whole(None), "list inside": whole([]),
    "text inside": whole("x"), "another step": odd(step=1), "step as text": odd(step="2"), "no step": odd(step=None),
    "true": odd(step=True), "leaves": odd(leaves=[]), "leaf": odd(leaves={"step": 3}), "no leaf": odd(leaves=None),
    "shape": odd(leaves={"step": {"shape": "ab", "dtype": "int32", "digest": "0" * 16}}),
    "dtype": odd(leaves={"step": {"shape": [], "dtype": 5, "digest": "0" * 16}}),
    "digest": odd(leaves={"step": {"shape": [], "dtype": "int32", "digest": None}}),
    "name": odd(leaves={"../x": {"shape": [], "dtype": "int32", "digest": "0" * 16}}),
    "run": odd(run=None), "versions": odd(versions=3), "kind": odd(kind=["state"]),
    "format": odd(format=["zero_jax checkpoint"]), "bytes": lambda _: b"\xff\xfe\x00", "deep": lambda _: "[" * 100_000,
    "cut": lambda _: "{", "one inside": whole(1), "zeros": lambda _: "\x00" * 9,
    "of old": lambda _: '{"manifest": {}, "sha256": ""}',
}


@pytest.mark.parametrize("name", [*ODD, "folder", "gone"])
def test_fallback_falls_back(tmp_path_factory, trained_state, name):
    step, state = trained_state
    root = tmp_path_factory.getbasetemp() / "two"
    if not root.exists():
        for number in (1, 2):
            Checkpoints(root).save(step, state, at=number, wait=True)
    copy = shutil.copytree(root, tmp_path_factory.mktemp("odd") / "copy")
    path = copy / "2/manifest/data.json"
    if name in ODD:
        text = ODD[name](path.read_text())
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    else:
        path.unlink()
        if name == "folder":
            path.mkdir()
    with pytest.raises(zero_jax.DamagedCheckpointError, match="2"):
        Checkpoints(copy).restore(step, BATCH)
    found = Checkpoints(copy).restore(step, BATCH, fallback=True)
    assert found.step == 1 and len(found.damaged) == 1 and str(copy / "2") in found.damaged[0]


def test_an_empty_folder_is_reported_and_passed(tmp_path, trained_state, caplog):
    step, state = trained_state
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(step, state, at=1, wait=True)
    (tmp_path / "2").mkdir()
    for fallback in (False, True):
        found = Checkpoints(tmp_path).restore(step, BATCH, fallback=fallback)
        assert found.step == 1
        assert found.damaged == (f"{tmp_path / '2'} is empty: if it was a checkpoint, that is lost.",)
    checkpoints.save(step, state, at=2, wait=True)
    assert checkpoints.steps() == [1, 2] and Checkpoints(tmp_path).restore(step, BATCH).damaged == ()


def test_a_manifest_of_another_version_is_no_damage(tmp_path, trained_state):
    """The control: what a newer zero_jax saved is not passed over."""
    step, state = trained_state
    for number in (1, 2):
        Checkpoints(tmp_path).save(step, state, at=number, wait=True)
    path = tmp_path / "2/manifest/data.json"
    path.write_text(odd(format="zero_jax checkpoint 3")(path.read_text()))
    with pytest.raises(zero_jax.CheckpointError, match="by another version of zero_jax, as .zero_jax checkpoint 3"):
        Checkpoints(tmp_path).restore(step, BATCH, fallback=True)
