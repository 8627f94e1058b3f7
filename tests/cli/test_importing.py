"""`import`: a published checkpoint as a file in our names, and back, bit for bit; other models' are refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy
from flax import traverse_util
from support.command_line import refused, run
from support.numpy_gpt2 import hugging_face

from models import gpt2
from zero_jax import Names, export_params, import_params, make_zero_train_step
from zero_jax.cli.model_lookup import ModelChoice
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.weights.export_command import import_command
from zero_jax.cli.weights.file_configs import ImportConfig
from zero_jax.interop.params_io import export_tree
from zero_jax.interop.safetensors_file import find_tensors

TINY = gpt2.PRESETS["tiny"]
TENSORS = hugging_face(TINY)


def folder_of(path, tensors=TENSORS, **changes):
    """A checkpoint of gpt2:tiny as Hugging Face has them, in two files."""
    path.mkdir()
    names = list(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, inside in parts.items():
        safetensors_numpy.save_file({name: tensors[name] for name in inside}, path / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(gpt2.huggingface_config(TINY) | changes))
    return path


def test_there_and_back(tmp_path):
    folder = folder_of(tmp_path / "theirs")
    done = run("import", "--model", "gpt2:tiny", "--weights", str(folder), "--out", str(tmp_path / "own.safetensors"))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'own.safetensors'}\n"), done.stderr
    own = safetensors_numpy.load_file(tmp_path / "own.safetensors")
    np.testing.assert_array_equal(own["blocks/up/kernel"][1], TENSORS["transformer.h.1.mlp.c_fc.weight"])
    names = Names(**gpt2.huggingface(TINY))
    params = jax.tree.map(jnp.asarray, traverse_util.unflatten_dict(own, sep="/"))
    (path,) = export_tree(tmp_path / "again.safetensors", params, names=names)
    again = safetensors_numpy.load_file(path)
    assert again.keys() == TENSORS.keys()
    assert all(again[name].tobytes() == value.tobytes() for name, value in TENSORS.items())
    assert any(own["blocks/qkv/kernel"][0].tobytes() != value.tobytes() for name, value in TENSORS.items()
               if name.endswith("0.attn.c_attn.weight")), "its columns are in another order"


def test_dtypes(tmp_path):
    (path,) = import_command(ImportConfig("gpt2:tiny", folder_of(tmp_path / "theirs"), tmp_path / "x.safetensors",
                                          dtype="bf16"))
    found = safetensors_numpy.load_file(path)["wte/embedding"]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found, TENSORS["transformer.wte.weight"].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("changes", "told"), [
    ({"model_type": "gpt_neo"}, "is of a model of type 'gpt_neo', and gpt2:tiny is of type 'gpt2'"),
    ({"n_head": 2}, "says n_head=2, and gpt2:tiny has 4"),
    ({"layer_norm_epsilon": 1e-3}, "says layer_norm_epsilon=0.001, and gpt2:tiny has 1e-05"),
    ({"n_layer": 3}, "says n_layer=3, and gpt2:tiny has 2"),
])
def test_a_checkpoint_of_another_model(tmp_path, changes, told):
    folder = folder_of(tmp_path / "theirs", **changes)
    assert told in refused("import", "--model", "gpt2:tiny", "--weights", str(folder), "--out",
                           str(tmp_path / "x.safetensors"))
    assert not (tmp_path / "x.safetensors").exists()
    with pytest.raises(ValueError, match=told.split(",")[0]):
        TrainConfig(model="gpt2:tiny", seq_len=16, init_from=folder, out=tmp_path / "out").check()


def test_a_file_that_there_is_stays(tmp_path):
    """As the one that is read: it would be replaced by one in our names, and the original lost."""
    folder = folder_of(tmp_path / "theirs")
    for out, there in (("a.safetensors", "a.safetensors"), ("model.safetensors", "model.safetensors.index.json")):
        before = (folder / there).read_bytes()
        said = refused("import", "--model", "gpt2:tiny", "--weights", str(folder), "--out", str(folder / out))
        assert f"{there} exists, and is not replaced" in said
        assert (folder / there).read_bytes() == before


def test_tensors_of_another_model(tmp_path):
    tensors = {name: value for name, value in TENSORS.items() if "ln_f" not in name}
    with pytest.raises(ValueError, match=r"lacks 2 \(ln_f.bias, ln_f.weight\) of the 28 tensors"):
        import_command(ImportConfig("gpt2:tiny", folder_of(tmp_path / "theirs", tensors), tmp_path / "x.safetensors"))
    assert not (tmp_path / "x.safetensors").exists()


def test_the_configuration_goes_with_the_weights(tmp_path):
    """An imported file is of a model with these heads, not of one whose tensors have the same names and shapes."""
    folder = folder_of(tmp_path / "theirs")
    (path,) = import_command(ImportConfig("gpt2:tiny", folder, tmp_path / "own.safetensors"))
    other = dataclasses.replace(TINY, num_heads=2)
    batch = {name: jnp.zeros((8, 16), jnp.int32) for name in ("inputs", "targets")}

    step_of = functools.cache(lambda config: make_zero_train_step(gpt2.build(config), 3))

    def loaded(config, names, file=path):
        step = step_of(config)
        state = import_params(file, step, step.init(jax.random.key(0), batch), batch, names=names)
        return export_params(tmp_path / "again.safetensors", state, step.layout(batch), names=names)

    (again,) = loaded(TINY, Names(config=gpt2.huggingface_config(TINY)))
    for file in (path, again):
        assert loaded(TINY, Names(config=gpt2.huggingface_config(TINY)), file) == [again]
        with pytest.raises(ValueError, match="safetensors says n_head=4, and this model has 2"):
            loaded(other, Names(config=gpt2.huggingface_config(other)), file)
        with pytest.raises(ValueError, match="says of which model it is, and of this model that is not known"):
            loaded(other, Names(), file)
    with pytest.raises(ValueError, match="config.json says n_head=4, and this model has 2"):
        loaded(other, Names(**gpt2.huggingface(other)), folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="theirs has no config.json"):
        loaded(TINY, Names(**gpt2.huggingface(TINY)), folder)
    loaded(other, Names(rules=gpt2.huggingface(other)["rules"], prefix="transformer."), folder)  # the control
    with pytest.raises(ValueError, match="says n_head=4, and gpt2:tiny has 2"):
        ModelChoice("gpt2:tiny", other, gpt2.build, file_config=gpt2.huggingface_config).check_weights(
            path, find_tensors(path))
