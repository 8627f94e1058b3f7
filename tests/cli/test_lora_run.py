"""LoRA from the command line: from a checkpoint of Hugging Face's to adapters, a merged model and text."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy
from rich.console import Console
from support import command_line
from support.oracle import by_name

import zero_jax
from models import llama
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.terminal_text import shown_text
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train
from zero_jax.data.tokenizer import ByteTokenizer
from zero_jax.interop.naming import Names
from zero_jax.interop.params_io import export_tree, init_from_file

TINY = llama.PRESETS["tiny"]
NAMES = Names(**llama.huggingface(TINY))
RUN = TrainConfig(model="llama:tiny", batch_size=8, seq_len=16, max_bytes=50_000, steps=4, eval_every=4, eval_batches=1,
                  samples=0, save_every=2, html=False, lora_rank=3, lora_alpha=6.0, lora_base="nf4", lora_dropout=0.1,
                  lora_targets=("attn/[qv]", "mlp"), learning_rate=0.02)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(a folder of Hugging Face's, its parameters)."""
    folder = tmp_path_factory.mktemp("base")
    params = jax.jit(llama.build(TINY).init)(jax.random.key(3), jnp.zeros((1, 8), jnp.int32))["params"]
    export_tree(folder / "model.safetensors", params, names=NAMES)
    (folder / "config.json").write_text(json.dumps(llama.huggingface_config(TINY)))
    return folder, params


@pytest.mark.grid
@pytest.mark.parametrize("codes, stage", [
    ("nf4", 3), *(pytest.param(codes, stage, marks=pytest.mark.slow) for codes, stage in
                  (("int8", 0), (None, 3)))])
def test_a_file_becomes_the_base_as_its_values_do(base, codes, stage):
    folder, params = base
    step = zero_jax.make_zero_train_step(
        zero_jax.lora(llama.build(TINY), 3, "all-linear", base=codes), stage, precision="bf16")
    batch = {name: jnp.zeros((8, 16), jnp.int32) for name in ("inputs", "targets")}
    state = init_from_file(folder, step, jax.random.key(0), batch, names=NAMES)
    expected = step.init(jax.random.key(0), batch, params=params)
    found, wanted = by_name(step.params(state)), by_name(step.params(expected))
    assert found.keys() == wanted.keys() and any(name.endswith("_codes") for name in found) == (codes is not None)
    assert not any("embedding_" in name for name in found), "tables have no adapters and no codes"
    for name, value in wanted.items():
        assert value.tobytes() == found[name].tobytes(), name
    # Negative control: another model is told apart.
    other = by_name(step.params(step.init(jax.random.key(0), batch, params=jax.tree.map(lambda leaf: -leaf, params))))
    assert any(other[name].tobytes() != found[name].tobytes() for name in found)


@pytest.mark.slow
def test_a_run_from_a_folder_to_adapters_a_model_and_text(base, tmp_path, monkeypatch):
    for module in ("weights.generate_command", "weights.export_command"):  # there are 8 devices already
        monkeypatch.setattr(f"zero_jax.cli.{module}.simulate_devices", lambda number: None)
    run = dataclasses.replace(RUN, init_from=base[0], out=tmp_path / "run")
    quiet = Console(quiet=True)
    whole = train(run, console=quiet)
    # Resumed from the state after two steps, at another stage: the same losses.
    part = dataclasses.replace(run, out=tmp_path / "part")
    shutil.copytree(tmp_path / "run", part.out)
    shutil.rmtree(part.out / "checkpoints" / "4")
    again = train(dataclasses.replace(part, resume=True, stage=2), console=quiet)
    assert json.loads((part.out / "train.jsonl").read_text().splitlines()[-1])["summary"]["steps"] == 4
    np.testing.assert_allclose([again.loss, again.validation_loss], [whole.loss, whole.validation_loss], rtol=1e-5)

    checkpoints = str(tmp_path / "run" / "checkpoints")

    def command(*args):
        done = command_line.run(*args)
        assert done.returncode == 0, done.stderr
        return done.stdout

    command("export", "--checkpoint", checkpoints, "--out", str(tmp_path / "adapter"))
    command("export", "--checkpoint", checkpoints, "--merge", "--names", "huggingface", "--out",
            str(tmp_path / "whole"))
    adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["base_model_name_or_path"]) == (3, 6.0, str(base[0]))
    # The merged model, evaluated as a model of its own, has the run's loss; the base alone has another.
    plain = dataclasses.replace(TrainConfig(), **{
        name: getattr(RUN, name) for name in ("model", "batch_size", "seq_len", "max_bytes", "eval_batches", "samples",
                                              "html")}, steps=1, save_every=0, learning_rate=1e-9)
    merged, base_alone = (
        train(dataclasses.replace(plain, init_from=start, out=tmp_path / name, save_every=save), console=quiet)
        for name, start, save in (("merged", tmp_path / "whole", 1), ("alone", base[0], 0)))
    np.testing.assert_allclose(merged.validation_loss, whole.validation_loss, rtol=2e-4)
    assert abs(base_alone.validation_loss - whole.validation_loss) > 0.01
    # A run with adapters starts from another run as from a file: B is zero, so that its loss is that run's.
    tuned = train(dataclasses.replace(plain, init_from=tmp_path / "merged", out=tmp_path / "tuned", lora_rank=2),
                  console=quiet)
    np.testing.assert_allclose(tuned.validation_loss, merged.validation_loss, rtol=1e-5)
    # Generated with adapters and codes: as of the merged model.
    tensors = safetensors_numpy.load_file(tmp_path / "whole" / "model.safetensors")
    assert tensors["model.layers.1.mlp.gate_proj.weight"].shape == (TINY.hidden, TINY.width)
    said = command("generate", "--checkpoint", checkpoints, "--prompt", "def", "--tokens", "8", "--temperature", "0")
    step = step_of(dataclasses.replace(plain, stage=0), find_model("llama:tiny"), jax.devices())
    batch = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
    merged = step.params(init_from_file(tmp_path / "whole", step, jax.random.key(0), batch, names=NAMES))
    ids, forward = list(b"def"), jax.jit(lambda tokens: llama.build(TINY).apply({"params": merged}, tokens))
    for _ in range(8):
        padded = np.pad(np.array([ids], np.int32), ((0, 0), (0, 11 - len(ids))))
        ids.append(int(forward(padded)[0, len(ids) - 1].argmax()))
    assert said == f"--- def\n{shown_text(ByteTokenizer().decode(ids[3:]))}\n"
    for args, message in (
            (("train", "--model", "llama:tiny", "--seq-len", "16", "--init-from", str(tmp_path / "run")),
             "is of a run of adapters: write the whole model"),
            (("export", "--checkpoint", checkpoints, "--out", "x.safetensors"), "are written to a folder (PEFT's)"),
            (("export", "--checkpoint", checkpoints, "--out", "x", "--dtype", "bf16"), "are one file of float32"),
            (("export", "--checkpoint", str(tmp_path / "merged" / "checkpoints"), "--merge", "--out",
              "x.safetensors"),
             "trained the model and no adapters")):
        refused = command_line.run(*args)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr
