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

import models
import zero_jax
from models import llama
from zero_jax.cli.environment import shown_text
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train
from zero_jax.cli.weights.export_command import export_command
from zero_jax.cli.weights.file_configs import ExportConfig
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
    monkeypatch.setattr("zero_jax.cli.weights.saved_model.simulate_devices", lambda number: None)  # there are 8
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


UNLISTED = llama.Config(3, 24, 6, 3, 40, head_dim=4, vocab_size=50, max_length=32, rope_theta=1e4, window=5,
                        family="mistral")


def unlisted(folder):
    """A folder of Hugging Face's whose shape no preset has, and a file of ids beside it; returns the ids' name."""
    folder.mkdir()
    params = jax.jit(llama.build(UNLISTED).init)(jax.random.key(3), jnp.zeros((1, 8), jnp.int32))["params"]
    params = jax.tree.map(lambda leaf: 5 * leaf if leaf.ndim > 2 else leaf, params)
    export_tree(folder / "model.safetensors", params, names=Names(**llama.huggingface(UNLISTED)))
    (folder / "config.json").write_text(json.dumps(llama.huggingface_config(UNLISTED) | {"eos_token_id": 7}))
    np.save(folder.parent / "ids.npy", np.random.default_rng(0).integers(0, 50, 4000).astype(np.uint16))
    return str(folder.parent / "ids.npy")


def test_text_for_a_folder_is_read_by_its_tokenizer(tmp_path):
    """The controls: ids of a file, images, another tokenizer, a folder without one."""
    folder, ids = tmp_path / "base", tmp_path / "ids.npy"
    folder.mkdir()
    np.save(ids, np.zeros(100, np.uint16))

    def chosen(**options):
        return TrainConfig(model=str(folder), **options).tokenizer

    assert chosen() is None
    (folder / "config.json").write_text(json.dumps(llama.huggingface_config(UNLISTED)))
    (folder / "tokenizer.json").write_text("{}")
    assert chosen() == chosen(data=(str(tmp_path / "some.jsonl"),)) == folder
    assert chosen(data=(str(ids),)) is None and chosen(data=("digits",)) is None
    assert chosen(tokenizer=tmp_path / "other.json") == tmp_path / "other.json"


@pytest.mark.slow
def test_a_folder_of_a_shape_that_no_preset_has(tmp_path, monkeypatch):
    """Planned, trained with adapters and exported by its folder alone; generation ends where the base's did."""
    monkeypatch.setattr("zero_jax.cli.weights.saved_model.simulate_devices", lambda number: None)  # there are 8
    folder, ends = tmp_path / "base", {"eos_token_id": [7, 9], "bos_token_id": 3, "temperature": 0.5}
    ids = unlisted(folder)
    (folder / "generation_config.json").write_text(json.dumps(ends))

    def command(*args, code=0):
        done = command_line.run(*args)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    run = ("train", "--model", str(folder), "--data", ids, "--batch-size", "8", "--seq-len", "16",
           "--steps", "3", "--eval-every", "3", "--eval-batches", "1", "--samples", "0", "--save-every", "3",
           "--learning-rate", "0.05", "--lora-rank", "2", "--lora-alpha", "8", "--no-html", "--init-from", str(folder))
    planned = command("plan", "--model", str(folder), "--target", "h100:8", "--seq-len", "16")
    assert "Fits" in planned and f"{UNLISTED.num_params:,} parameters" in planned
    command(*run, "--out", str(tmp_path / "run"))
    export = ("export", "--checkpoint", str(tmp_path / "run"), "--out")
    command(*export, str(tmp_path / "adapter"))
    adapter = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (adapter["task_type"], adapter["base_model_name_or_path"]) == ("CAUSAL_LM", str(folder))
    whole = (*export, str(tmp_path / "whole"), "--merge", "--names", "huggingface")
    command(*whole)
    config, generation = (json.loads((tmp_path / "whole" / name).read_text()) for name in (
        "config.json", "generation_config.json"))
    assert (config["model_type"], config["sliding_window"], config["bos_token_id"]) == ("mistral", 5, 3)
    assert config["eos_token_id"] == [7, 9] and generation == ends
    assert models.from_huggingface(tmp_path / "whole")[1] == UNLISTED
    # Negative controls: another config.json in the base's place; none.
    (folder / "config.json").write_text(json.dumps(llama.huggingface_config(dataclasses.replace(UNLISTED, window=6))))
    shutil.rmtree(tmp_path / "run/checkpoints")
    said = command(*run[:-2], "--init-from", str(tmp_path / "whole"), "--out", str(tmp_path / "other"), code=2)
    assert "sliding_window=5" in said and "has 6" in said
    (folder / "config.json").unlink()
    assert "has no config.json, and tensors do not show" in command(*run, "--out", str(tmp_path / "none"), code=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_stops_where_the_base_did(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path / "base"
    run = dataclasses.replace(RUN, data=(unlisted(folder),), model=str(folder), init_from=folder, lora_rank=2,
                              lora_base="model", max_bytes=None, steps=2, eval_every=2, out=tmp_path / "run")
    train(run, console=Console(quiet=True))

    def generated(out, ends):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        export_command(ExportConfig(str(run.out), out, merge=True, names="huggingface"), devices=jax.devices()[:2])
        model = transformers.AutoModelForCausalLM.from_pretrained(out)
        return model.generate(torch.arange(5)[None] + 3, max_new_tokens=20, do_sample=False)[0, 5:].tolist()

    whole = generated(tmp_path / "endless", [-1])
    assert len(whole) == 20  # the control: nothing that ends it
    assert generated(tmp_path / "ending", [49, whole[3]]) == whole[:whole.index(whole[3]) + 1]
    ids = torch.arange(12)[None] + 3
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ending")(ids).logits.detach().numpy()
    module, config = models.from_huggingface(tmp_path / "ending")
    step = zero_jax.make_zero_train_step(module.build(config), 3)
    batch = {name: np.repeat(ids.numpy().astype(np.int32), 8, 0) for name in ("inputs", "targets")}
    names = Names(**module.huggingface(config))
    state = init_from_file(tmp_path / "ending", step, jax.random.key(0), batch, names=names)
    ours = step.evaluator(lambda model, batch: model(batch["inputs"]))(state, batch)
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-4)
