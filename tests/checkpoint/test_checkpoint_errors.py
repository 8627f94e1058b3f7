"""What does not fit is refused before an array is read: one message with the leaf and both values, nothing lost."""

import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from support.saved import BATCH, WORDS, difference, dump, make_step, trained

import zero_jax
from zero_jax import Checkpoints
from zero_jax.checkpoint import integrity, retention
from zero_jax.checkpoint.manifest import check_names
from zero_jax.checkpoint.plain_params import export_orbax
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import CheckpointError
from zero_jax.files import checksum


class Model(nn.Module):
    """The model of the tests with parts that can be another way."""

    width: int = 24
    name_of_hidden: str = "hidden"
    bias: bool = True
    more: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, 16, name="embed")(tokens)
        x = nn.gelu(nn.Dense(self.width, name=self.name_of_hidden)(x))
        if self.more:
            x = nn.Dense(self.width, name="extra")(x)
        return nn.Dense(WORDS, name="head", use_bias=self.bias)(x)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root, step = tmp_path_factory.mktemp("saved"), make_step(3, 8, Model(), ema=0.9)
    state = trained(step)
    Checkpoints(root).save(step, state, wait=True, config={"width": 24})
    return root, step, dump(step, state)


OTHERS = {
    "width": (dict(model=Model(width=32)), r"params/embed|params/hidden/bias is float32 \[24\] in the checkpoint and "
              r"float32 \[32\] in this step.*and \d+ more leaves.*The model is another one"),
    "renamed": (dict(model=Model(name_of_hidden="hiden")),
                r"params/hiden/bias \(float32 \[24\]\) is not in the checkpoint; it has params/hidden/bias "
                r"\(float32 \[24\]\), which this step lacks: was it renamed\?"),
    "missing": (dict(model=Model(more=True)), r"params/extra/bias \(float32 \[24\]\) is not in the checkpoint"),
    "extra": (dict(model=Model(bias=False)), r"params/head/bias \(float32 \[61\]\) is in the checkpoint and not"),
    "dtype": (dict(precision=zero_jax.Precision(params=jnp.bfloat16)),
              r"params/embed/embedding is float32 \[61, 16\] in the checkpoint and bfloat16 \[61, 16\].*cast=True"),
    "sgd": (dict(optimizer=optax.sgd(0.1, momentum=0.9)), r"opt_state/0/trace/embed/embedding.*optimizer is another"),
    "chain": (dict(optimizer=optax.chain(optax.clip(1.0), optax.adamw(1e-3))), r"opt_state/1/0/count.*optimizer is"),
    "adafactor": (dict(optimizer=optax.adafactor(1e-3)), r"opt_state/0/v_row/.*optimizer is another one.*load_params"),
    "bf16 momentum": (dict(optimizer=optax.adamw(1e-3, mu_dtype=jnp.bfloat16)),
                      r"opt_state/0/mu/embed/embedding is float32 \[61, 16\] in the checkpoint and bfloat16"),
    "no average": (dict(ema=None), r"ema/embed/embedding .*is in the checkpoint and not in this step.*with the ema"),
    "guard": (dict(guard=zero_jax.Guard()), r"guard/bad \(int32 \[\]\) is not in the checkpoint.*with the guard"),
    "loss scale": (dict(precision="fp16"), r"guard/\w+ \(\w+ \[\]\) is not in the checkpoint"),
    "frozen": (dict(frozen=("embed",)), r"frozen/embed/embedding \(float32 \[61, 16\]\) is not in the checkpoint"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_that_does_not_fit(saved, monkeypatch, name):
    root, _, _ = saved
    options, message = OTHERS[name]
    monkeypatch.setattr(integrity.storage, "read", lambda *args: pytest.fail("an array was read"))
    step = make_step(1, 4, **{"model": Model(), "ema": 0.9, **options})
    with pytest.raises(CheckpointError, match=message) as found:
        Checkpoints(root).restore(step, BATCH)
    assert not isinstance(found.value, zero_jax.DamagedCheckpointError)
    assert str(root) in str(found.value) and "\n" not in str(found.value)


def test_what_fits_is_not_refused(saved):
    root, step, before = saved
    other = make_step(1, 4, Model(), ema=0.99, optimizer=optax.adamw(1.0))  # numbers may change, leaves may not
    assert difference(before, dump(other, Checkpoints(root).restore(other, BATCH).state)) == []
    assert Checkpoints(root).manifest().config == {"width": 24}


@pytest.mark.parametrize("name", [
    "../../etc/passwd", "params/../x", "/params/x", "params//x", "", "params/.", "params\\x", "C:/x", "params/a\nb",
    "params/\x00", "params/\u202ex"])
def test_a_name_that_leads_elsewhere(saved, tmp_path, name):
    root, step, before = saved
    shutil.copytree(root, tmp_path / "copy")

    def rename(body):
        body["leaves"][name] = body["leaves"].pop("params/embed/embedding")

    rewrite(tmp_path / "copy", rename)
    with pytest.raises(CheckpointError, match="is no name of a leaf"):
        Checkpoints(tmp_path / "copy").restore(step, BATCH)


def rewrite(root, change, *, seal=True):
    """Changes a manifest as one could who knows its checksum."""
    path = root / "3/manifest/data.json"
    whole = json.loads(path.read_text())
    change(whole["manifest"])
    if seal:
        del whole["manifest"]["checksum"]
        whole["manifest"]["checksum"] = checksum(whole["manifest"])
    path.write_text(json.dumps(whole))


def leaf(**changes):
    return lambda body: body["leaves"]["params/embed/embedding"].update(changes)


CHANGES = {
    "shape": (leaf(shape=[1 << 40, 1 << 20]), r"params/embed/embedding is float32 \[1099511627776, 1048576\] in the"),
    "negative": (leaf(shape=[-1, 16]), r"has shape=\[-1, 16\], which is none"),
    "no shape": (leaf(shape=["a"]), r"has shape=\['a'\], which is none"),
    "dtype": (leaf(dtype="object"), "is object .* in the checkpoint and float32"),
    "digest": (leaf(digest="../x"), "has digest='../x', which is none"),
    "other digest": (leaf(digest="0" * 16), "params/embed/embedding .* has the digest .*0000000000000000 was saved"),
    "format": (lambda body: body.update(format="zero_jax checkpoint 3"),
               "by another version of zero_jax, as 'zero_jax checkpoint 3', and this one reads 'zero_jax check"),
    "step": (lambda body: body.update(step=4), "3 holds checkpoint 4"),
    "gone": (lambda body: body["leaves"].pop("rng"), r"rng \(key<fry> \[\]\) is not in the checkpoint"),
    "key": (lambda body: body["leaves"]["rng"].update(dtype="key<rbg>"), r"rng is key<rbg> \[\] in the checkpoint"),
    "field": (lambda body: body.pop("run"), "lacks what a manifest has"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_was_changed(saved, tmp_path, name):
    root, step, before = saved
    change, message = CHANGES[name]
    shutil.copytree(root, tmp_path / "sealed")
    rewrite(tmp_path / "sealed", change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(tmp_path / "sealed").restore(step, BATCH)
    shutil.copytree(root, tmp_path / "open")
    rewrite(tmp_path / "open", change, seal=False)
    with pytest.raises(zero_jax.DamagedCheckpointError, match="its checksum is"):
        Checkpoints(tmp_path / "open").restore(step, BATCH)
    assert difference(before, dump(step, Checkpoints(root).restore(step, BATCH).state)) == []


@pytest.mark.parametrize("call, message", [
    (lambda root, step, state: Checkpoints(root / "nowhere").restore(step, BATCH), "has no checkpoint: there is"),
    (lambda root, step, state: Checkpoints(root).restore(step, BATCH, at=7), "has no checkpoint 7: there are 3"),
    (lambda root, step, state: Checkpoints(root).restore(step, BATCH, at=-1), "has no checkpoint -1"),
    (lambda root, step, state: Checkpoints(root).restore(step, BATCH, at=3.0), r"at=3.0 is not a .* one of \[3\]"),
    (lambda root, step, state: Checkpoints(root).manifest("3"), "at='3' is not a checkpoint number: give an integer"),
    (lambda root, step, state: Checkpoints(root / "3").restore(step, BATCH), "has no checkpoint"),
    (lambda root, step, state: Checkpoints(root).save(step, state), "has a checkpoint 3 already"),
    (lambda root, step, state: Checkpoints(root).save(step, state, at=-1), "at=-1: give at least 0"),
    (lambda root, step, state: Checkpoints(root).save(step, state, at=True), "at=True: give a whole number"),
    (lambda root, step, state: Checkpoints(root).save(step, state, at=9, data={1: 2}), "data={1: 2} is not plain"),
    (lambda root, step, state: Checkpoints(root).save(step, state, at=9, config=root), "config=.* is not plain"),
    (lambda root, step, state: Checkpoints(root).save(step, state, at=9, data=float("nan")), "data=nan is not"),
    (lambda root, step, state: Checkpoints(root, keep_last=0), "keep_last=0"),
    (lambda root, step, state: Checkpoints(root, keep_every=1.5), "keep_every=1.5"),
    (lambda root, step, state: Checkpoints(root).save(make_step(0, 1), state), "no layout yet"),
    (lambda root, step, state: Checkpoints(root / "3/manifest/data.json").save(step, state), "could not be"),
    (lambda root, step, state: Checkpoints(root / "3/manifest/data.json").restore(step, BATCH), "no check"),
    (lambda root, step, state: Checkpoints("").steps(), "is an empty text: give the path"),
])
def test_bad_arguments(saved, call, message):
    root, step, before = saved
    state = Checkpoints(root).restore(step, BATCH).state
    with pytest.raises(ValueError, match=message):
        call(root, step, state)
    assert Checkpoints(root).steps() == [3] and [path.name for path in root.iterdir()] == ["3"]
    assert difference(before, dump(step, Checkpoints(root).restore(step, BATCH).state)) == []


@pytest.mark.parametrize("name", ["lr=[0.1]", "a\\b", "what?", "*"])
def test_a_path_whose_arrays_could_not_be_read_again(saved, tmp_path, monkeypatch, name):
    """Orbax takes it for a pattern, finds nothing to merge, and reports success; TensorStore writes to another one."""
    root, step, _ = saved
    state = Checkpoints(root, read_only=True).restore(step, BATCH).state
    for call in (Checkpoints(tmp_path / name / "run").lock, lambda: Checkpoints(tmp_path / name).save(step, state),
                 lambda: export_orbax(tmp_path / name, step.params(state)),
                 TrainConfig(out=tmp_path / name)._check_checkpoints):
        with pytest.raises(zero_jax.UsageError, match="cannot be read again: give a folder whose whole path has no"
                           ) as told:
            call()
        assert not isinstance(told.value, zero_jax.CheckpointError), "as if the disk were full"
    assert not list(tmp_path.iterdir())
    if name == "lr=[0.1]":  # the control
        monkeypatch.setattr(retention, "check_target", lambda path: None)
        Checkpoints(tmp_path / name).save(step, state, wait=True)
        with pytest.raises(zero_jax.DamagedCheckpointError, match="cannot be read"):
            Checkpoints(tmp_path / name).restore(step, BATCH)


def test_names_that_would_meet_in_one_file():
    check_names(["a/b", "a/c", "ab", "a.b"], "here")
    with pytest.raises(CheckpointError, match="two leaves are called a/b"):
        check_names(["a/b", "a/b"], "here")
    with pytest.raises(CheckpointError, match="here: a is a leaf, and a/b/c is below it"):
        check_names(["a", "a/b/c"], "here")


def test_a_model_whose_names_cannot_be_saved(tmp_path):
    class Bad(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Embed(WORDS, WORDS, name="..")(tokens)

    step = make_step(0, 1, Bad())
    state = step.init(jax.random.key(0), BATCH)
    with pytest.raises(CheckpointError, match=r"'params/../embedding' is no name of a leaf"):
        Checkpoints(tmp_path / "new").save(step, state)
    assert not (tmp_path / "new").exists()
