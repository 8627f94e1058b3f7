"""Pre-trained models on pictures of another number of classes: the head alone is new, and that is said."""

import io
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from PIL import Image
from rich.console import Console

from models import vit
from zero_jax import Names, export_params, import_params, init_from_file, lora, make_mesh, make_zero_train_step
from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train
from zero_jax.cli.weights.export_command import export_command
from zero_jax.cli.weights.file_configs import ExportConfig
from zero_jax.errors import UsageError
from zero_jax.tree import named_leaves

MANY = vit.Config(2, 32, 2, 48, image_size=8, patch_size=4, num_classes=1000)
FEW = vit.Config(2, 32, 2, 48, image_size=8, patch_size=4, num_classes=3)
HEAD = {"head/kernel": (32, 3), "head/bias": (3,)}
CONSOLE = Console(file=io.StringIO(), width=1000)


def step_of(config, model=None):
    model = vit.build(config) if model is None else model
    return make_zero_train_step(model, 3, loss=vit.loss, mesh=make_mesh()), vit.batch_shapes(config, 8, None)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder of Hugging Face's with a ViT of 1000 classes, none of whose values are those of an initialisation."""
    folder = tmp_path_factory.mktemp("pretrained")
    step, batch = step_of(MANY)
    state = step.init(jax.random.key(3), batch)
    state = step.with_params(state, jax.tree.map(lambda leaf: np.asarray(leaf) + 0.25, step.params(state)))
    export_params(folder / "model.safetensors", state, step.layout(), names=Names(**vit.huggingface(MANY)))
    (folder / "config.json").write_text(json.dumps(vit.huggingface_config(MANY)))
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of pictures for each of three classes."""
    folder, noise = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name in ("ash", "elm", "oak"):
        (folder / name).mkdir()
        for number in range(8):
            Image.fromarray(noise.integers(0, 255, (9, 9, 3), np.uint8)).save(folder / name / f"{number}.png")
    return folder


def tensors(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def values(step, state):
    return {name: np.asarray(leaf) for name, leaf in named_leaves(step.params(state))}


def test_only_what_is_named_is_new(pretrained):
    """Everything else has the file's values. Without `new` the head is refused; patterns match something."""
    step, batch = step_of(FEW)
    names = Names(**vit.huggingface(FEW))
    drawn = values(step, step.init(jax.random.key(5), batch))
    found = values(step, init_from_file(pretrained, step, jax.random.key(5), batch, names=names, new=["^head/"]))
    many, wide = step_of(MANY)
    read = values(many, init_from_file(pretrained, many, jax.random.key(5), wide, names=Names(**vit.huggingface(MANY))))
    for name, value in found.items():
        expected = drawn if name in HEAD else read
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
        assert name in HEAD or np.abs(value - drawn[name]).max() > 0.1, name
    with pytest.raises(ValueError, match=r"classifier.* has shape \(1000,"):
        init_from_file(pretrained, step, jax.random.key(5), batch, names=names)
    with pytest.raises(UsageError, match="new: 'tail' matches no parameter"):
        init_from_file(pretrained, step, jax.random.key(5), batch, names=names, new=["tail"])
    adapted, batch = step_of(FEW, lora(vit.build(FEW), rank=2, targets="[qkv]"))
    with pytest.raises(UsageError, match="would stay as they are drawn"):
        init_from_file(pretrained, adapted, jax.random.key(5), batch, names=names, new=["^head/"])


def test_a_refused_file_leaves_the_state_alive(pretrained):
    step, batch = step_of(FEW)
    state = step.init(jax.random.key(5), batch)
    with pytest.raises(ValueError, match="has shape"):
        import_params(pretrained, step, state, batch, names=Names(**vit.huggingface(FEW)), new=["^head/bias"])
    state = import_params(pretrained, step, state, batch, names=Names(**vit.huggingface(FEW)), new=["^head/"])
    shapes = {name: leaf.shape for name, leaf in values(step, state).items() if name in HEAD}
    assert shapes == HEAD


def saved(config, classes):
    step, batch = step_of(vit.Config(**{**vars(MANY), "num_classes": classes}))
    params, _ = Checkpoints(config.checkpoints, read_only=True).load_params(step, batch)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(params)}


def trained(pretrained, pictures, out, classes, **options):
    """(What a run says, the parameters after a step that moves none of them)."""
    config = TrainConfig(model=str(pretrained), init_from=pretrained, data=(str(pictures),), batch_size=8, steps=1,
                         learning_rate=0.0, samples=0, html=False, devices=8, out=out, **options)
    CONSOLE.file = io.StringIO()
    train(config, console=CONSOLE)
    return CONSOLE.file.getvalue(), saved(config, classes)


def test_a_run_on_three_classes_says_that_its_head_is_new(pretrained, pictures, tmp_path):
    """And one that asks for the number that the file has reads its head, and says nothing."""
    text, params = trained(pretrained, pictures, tmp_path / "few", 3)
    assert f"Initialised anew, of 3 classes: head/bias, head/kernel. {pretrained} has 1000 classes" in text
    theirs = tensors(pretrained)
    np.testing.assert_array_equal(params["patches/bias"], theirs["vit.embeddings.patch_embeddings.projection.bias"])
    assert not params["head/kernel"].any() and params["head/kernel"].shape == (32, 3)
    text, params = trained(pretrained, pictures, tmp_path / "many", 1000, num_classes=1000)
    assert "Initialised anew" not in text
    np.testing.assert_array_equal(params["head/kernel"], theirs["classifier.weight"].T)
    export_command(ExportConfig(str(tmp_path / "few"), tmp_path / "exported", names="huggingface"),
                   devices=jax.devices())
    assert len(json.loads((tmp_path / "exported" / "config.json").read_text())["id2label"]) == 3
    assert tensors(tmp_path / "exported")["classifier.weight"].shape == (3, 32)


def test_a_preset_and_too_few_classes(pretrained, pictures, tmp_path):
    """A preset keeps its number; more classes than it has are refused with the option that mends it."""
    options = {"data": (str(pictures),), "batch_size": 8, "out": tmp_path}
    assert objective_of(TrainConfig(model="vit:tiny", **options)).choice.config.num_classes == 8
    assert objective_of(TrainConfig(model="vit:tiny", num_classes=5, **options)).choice.config.num_classes == 5
    with pytest.raises(UsageError, match="give --num-classes 3, or a model"):
        objective_of(TrainConfig(model="vit:tiny", num_classes=2, **options))
    with pytest.raises(UsageError, match="has no field 'num_classes'"):
        objective_of(TrainConfig(model="gpt2:tiny", num_classes=2, seq_len=16, out=tmp_path))
