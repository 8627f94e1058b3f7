"""`export`: from a checkpoint that `train` saved to a file that others read."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy

from models import gpt2
from zero_jax import Names, export_params
from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.export_command import export_command
from zero_jax.cli.export_config import ExportConfig
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.resume import fixed
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig

ROOT = Path(__file__).parents[2]
RUN = TrainConfig(model="gpt2:tiny", stage=2, precision="bf16", ema=0.5, batch_size=8, seq_len=16,
                  grad_clip_norm=np.inf)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of checkpoints, the state in one, its layout), as `train` saves them."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    step = step_of(RUN, find_model(RUN.model), jax.devices())
    batch = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
    state = step.init(jax.random.key(0), batch)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(step, state, at=3, config=fixed(RUN), wait=True)
        checkpoints.save(step, state, at=4, config={"model": "mine:small"} | {
            name: value for name, value in fixed(RUN).items() if name != "model"}, wait=True)
        checkpoints.save(step, state, at=5, config="by hand", wait=True)
    return folder, state, step.layout(batch)


@pytest.mark.parametrize(("dtype", "names", "ema"), [
    ("bf16", "huggingface", False), ("fp32", "own", True)])
def test_what_is_exported_is_what_was_saved(tmp_path, saved, dtype, names, ema):
    folder, state, layout = saved
    config = ExportConfig(str(folder), tmp_path / "x.safetensors", at=3, dtype=dtype, names=names, ema=ema)
    assert export_command(config, devices=jax.devices()[:2]) == [tmp_path / "x.safetensors"]
    (path,) = export_params(tmp_path / "y.safetensors", state, layout, ema=ema, **(
        {"names": Names(**gpt2.huggingface(gpt2.PRESETS["tiny"]))} if names == "huggingface" else {}))
    found, expected = (safetensors_numpy.load_file(path) for path in (tmp_path / "x.safetensors", path))
    assert found.keys() == expected.keys()
    assert ("transformer.wte.weight" in found) == (names == "huggingface")
    kind = ml_dtypes.bfloat16 if dtype == "bf16" else np.float32
    for name, value in expected.items():
        assert found[name].dtype == kind and value.dtype == np.float32
        np.testing.assert_array_equal(found[name], value.astype(kind))
    assert any((value != value.astype(ml_dtypes.bfloat16)).any() for value in expected.values()), "bf16 would not show"


@pytest.mark.parametrize(("options", "message"), [
    ({"at": 4}, "names the model 'mine:small', whose module would run .* give --model mine:small"),
    ({"at": 5}, "was not saved by the command train"),
    ({"at": 6}, "no checkpoint 6: there are 3, 4, 5"),
    ({"at": 3, "model": "gpt2:bytes"}, "does not fit this step: params/blocks"),
    ({"at": 3, "model": "resnet:tiny", "names": "huggingface"}, "has no function huggingface"),
])
def test_what_cannot_be_exported(tmp_path, saved, options, message):
    config = ExportConfig(str(saved[0]), tmp_path / "x.safetensors", **options)
    with pytest.raises(ValueError, match=message):
        export_command(config, devices=jax.devices()[:2])
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_command_writes_many_files_and_an_index(tmp_path, saved):
    command = [sys.executable, "-W", "error", "-m", "zero_jax", "export", "--checkpoint", str(saved[0]), "--at", "3",
               "--out", str(tmp_path / "x.safetensors"), "--max-file-bytes", "200000", "--dtype", "stored"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    written = [Path(line) for line in done.stdout.splitlines()]
    assert written[-1].name == "x.safetensors.index.json" and len(written) > 2
    assert sorted(written) == sorted(tmp_path.iterdir())
