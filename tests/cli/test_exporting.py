"""`export`: from a checkpoint that `train` saved to a file that others read."""

import dataclasses
import json
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
from support.covering import weekly

from models import gpt2
from zero_jax import Names, export_params
from zero_jax.checkpoint import checkpoint
from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.environment import checkpoints_of
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.resume import fixed
from zero_jax.cli.weights.export_command import export_command
from zero_jax.cli.weights.file_configs import ExportConfig, GenerateConfig
from zero_jax.cli.weights.generate_command import generate_command
from zero_jax.data.conversations import Conversation, SimpleTemplate, load_template

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
        earlier = {name: value for name, value in fixed(RUN).items() if name not in ("schedule", "decay", "eval_data")}
        checkpoints.save(step, state, at=3, config=earlier, wait=True)  # as version 0.1, which had none of these
        checkpoints.save(step, state, at=4, config={"model": "mine:small"} | {
            name: value for name, value in fixed(RUN).items() if name != "model"}, wait=True)
        checkpoints.save(step, state, at=5, config="by hand", wait=True)
    return folder, state, step.layout(batch)


@weekly("dtype, names, ema", [
    ("fp32", "own", True), ("bf16", "huggingface", False)])
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


@pytest.mark.slow
def test_generate_reads_parameters_alone_but_for_the_average(saved, monkeypatch):
    # There are 8 already.
    monkeypatch.setattr("zero_jax.cli.weights.saved_model.simulate_devices", lambda number: None)
    read, kinds = checkpoint.read_arrays, []

    def noted(path, arrays):
        kinds.append({name.partition("/")[0] for name in arrays})
        return read(path, arrays)

    monkeypatch.setattr(checkpoint, "read_arrays", noted)
    texts = [generate_command(GenerateConfig(str(saved[0]), prompt=("a",), tokens=2, temperature=0, at=3, ema=ema))
             for ema in (False, True)]
    assert kinds[0] == {"params"} and {"params", "ema", "opt_state"} <= kinds[1]
    assert texts[0] == texts[1]  # before the first step the average is the parameters


@pytest.mark.parametrize(("options", "message"), [
    ({"at": 4}, "names the model 'mine:small', whose module would run .* give --model mine:small"),
    ({"at": 5}, "was not saved by the command train"),
    ({"at": 6}, "no checkpoint 6: there are 3, 4, 5"),
    ({"at": 2**70}, "no checkpoint 1180591620717411303424: there are 3, 4, 5"),
    ({"at": -1}, "at=-1: give at least 0"),
    ({"at": 3, "model": "gpt2:bytes"}, "does not fit this step: params/blocks"),
    ({"at": 3, "model": "nameless:tiny", "names": "huggingface"}, "has no function huggingface"),
])
def test_what_cannot_be_exported(tmp_path, tmp_path_factory, monkeypatch, saved, options, message):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "nameless.py").write_text("from models.gpt2 import PRESETS, build")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ValueError, match=message):
        export_command(ExportConfig(str(saved[0]), tmp_path / "x.safetensors", **options), devices=jax.devices()[:2])
    assert not [*tmp_path.iterdir()]


def test_a_folder_for_transformers(tmp_path, saved):
    """It has the config of the model; what lies there stays, and weights or a model that are others are refused."""
    expected = gpt2.huggingface_config(gpt2.PRESETS["tiny"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/tokenizer.json").write_text("theirs")
    config = ExportConfig(str(saved[0]), tmp_path / "out", at=3, names="huggingface", dtype="bf16")
    files = export_command(config, devices=jax.devices()[:2])
    assert [file.name for file in files] == ["model.safetensors", "config.json"]
    assert json.loads(files[1].read_text()) == expected | {"torch_dtype": "bfloat16"}
    assert (tmp_path / "out/tokenizer.json").read_text() == "theirs"
    mine = json.dumps(expected | {"n_ctx": 64})
    files[1].write_text(mine)
    with pytest.raises(ValueError, match="model.safetensors exists, and is not replaced: remove it"):
        export_command(config, devices=jax.devices()[:2])
    files[0].unlink()
    assert export_command(config, devices=jax.devices()[:2]) == files[:1] and files[1].read_text() == mine
    files[1].write_text(json.dumps(expected | {"n_head": 2}))
    files[0].unlink()
    with pytest.raises(ValueError, match="says n_head=2, and gpt2:tiny has 4"):
        export_command(config, devices=jax.devices()[:2])
    assert not files[0].exists()


def tokenizer_folder(folder, *, eos=8, size=256):
    """A tokenizer with a chat template whose turns end with a token that is not its end of text."""
    tokenizers = pytest.importorskip("tokenizers")
    ids = {"<|im_end|>": 7, "<stop>": eos, "<bos>": 1 + eos, "<pad>": 2 + eos, "[UNK]": size - 1}
    vocab = ids | {f"w{i}": i for i in range(size) if i not in ids.values()}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*ids][:4])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<stop>", "bos_token": "<bos>"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}")
    return folder


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory):
    """(folder of checkpoints of llama:tiny, the tokenizer's folder): of a run on text, 1, on messages, 2 and 3."""
    folder, run = tmp_path_factory.mktemp("chat"), dataclasses.replace(RUN, model="llama:tiny", ema=None)
    tokenizer = tokenizer_folder(folder / "tokenizer")
    step = step_of(run, find_model(run.model), jax.devices())
    batch = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for at, chat in ((1, None), (2, load_template(tokenizer).fingerprint), (3, SimpleTemplate.fingerprint)):
            said = {"objective": "causal"} if chat is None else {"objective": "instruct", "chat": chat}
            checkpoints.save(step, step.init(jax.random.key(0), batch), at=at, wait=True,
                             config=fixed(run) | said | {"tokenizer": str(tokenizer)})
    return folder / "checkpoints", tokenizer


def exported(run, out, **options):
    """The files of a folder for transformers, JSON as what it says."""
    config = ExportConfig(str(run[0]), out, names="huggingface", **options)
    paths = export_command(config, devices=jax.devices()[:2])
    return {path.name: json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes() for path in paths}


def test_a_folder_has_the_tokenizer_and_the_ends_of_the_run(tmp_path, chat_run):
    ids = {"eos_token_id": 8, "bos_token_id": 9, "pad_token_id": 10}
    (chat_run[1] / "generation_config.json").write_text(json.dumps({"eos_token_id": [5], "temperature": 0.5}))
    text, chat = (exported(chat_run, tmp_path / str(at), at=at) for at in (1, 2))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "2" / name).read_bytes() == (chat_run[1] / name).read_bytes()
    assert {name: text["config.json"][name] for name in ids} == ids
    assert text["generation_config.json"] == ids | {"eos_token_id": [5, 8], "temperature": 0.5}
    assert chat["config.json"]["eos_token_id"] == [8, 7]  # the turn's, which that of the text has not
    assert chat["generation_config.json"]["eos_token_id"] == [5, 8, 7]
    again = exported(chat_run, tmp_path / "again", at=1, tokenizer=tokenizer_folder(tmp_path / "other", eos=20))
    assert again["generation_config.json"]["eos_token_id"] == 20  # the control: another tokenizer
    for options, message in (({"tokenizer": tmp_path / "none"}, "which is not there: give its folder"),
                             ({"tokenizer": tokenizer_folder(tmp_path / "large", size=300)}, "has 300 ids")):
        with pytest.raises(ValueError, match=message):
            exported(chat_run, tmp_path / "refused", at=1, **options)
        assert not (tmp_path / "refused").exists()
    with pytest.raises(ValueError, match="only a folder that transformers loads has one"):
        exported(chat_run, tmp_path / "x.safetensors", at=1, tokenizer=chat_run[1])
    (tmp_path / "1/model.safetensors").unlink()
    with pytest.raises(ValueError, match="tokenizer.json is not the tokenizer of the run"):
        exported(chat_run, tmp_path / "1", at=1, tokenizer=tmp_path / "other")


def test_a_tokenizer_without_a_template_gets_that_of_the_run(tmp_path, chat_run):
    jinja2 = pytest.importorskip("jinja2")
    folder = tokenizer_folder(tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    assert "chat_template.jinja" not in exported(chat_run, tmp_path / "text", at=1, tokenizer=folder)
    files = exported(chat_run, tmp_path / "chat", at=3, tokenizer=folder)
    with pytest.raises(ValueError, match="by another template than <.role.>, then the text: give the folder"):
        exported(chat_run, tmp_path / "refused", at=2, tokenizer=folder)
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"},
                {"role": "user", "content": "why?"}]
    (spans,) = SimpleTemplate().examples(Conversation(messages), "here")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers has it
    rendered = environment.from_string(files["chat_template.jinja"].decode()).render(
        messages=messages, eos_token="<stop>", add_generation_prompt=True)
    assert rendered == "".join(span.text + "<stop>" * span.ends for span in spans) + "<|assistant|>\n"
    assert files["generation_config.json"]["eos_token_id"] == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_stops_where_the_run_does(tmp_path, chat_run):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    exported(chat_run, tmp_path / "out", at=1)

    def generated():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        return model.generate(torch.arange(5)[None] + 60, max_new_tokens=40, do_sample=False)[0, 5:].tolist()

    (tmp_path / "out/generation_config.json").write_text(json.dumps({"eos_token_id": -1}))
    whole = generated()
    assert len(whole) == 40  # the control: nothing that ends it
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    eos = whole[5]
    exported(chat_run, tmp_path / "out", at=1, tokenizer=tokenizer_folder(tmp_path / "tokenizer", eos=eos))
    assert generated() == whole[:whole.index(eos) + 1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (eos, eos + 1)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False) == "user w1<|im_end|>\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_generates_from_it(tmp_path, saved):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = ExportConfig(str(saved[0]), tmp_path / "out", at=3, names="huggingface")
    export_command(config, devices=jax.devices()[:2])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = torch.arange(5)[None]
    tokens = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 9)
    step = step_of(RUN, find_model(RUN.model), jax.devices())
    found = step.evaluator(lambda model, batch: model(batch["inputs"]).astype(jnp.float32))(
        saved[1], {name: np.repeat(prompt.numpy(), 8, 0) for name in ("inputs", "targets")})
    np.testing.assert_allclose(found[0], model(prompt).logits[0].detach().numpy(), 0.1, 0.02)  # the run is in bf16


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


def test_a_run_stands_for_its_checkpoints(tmp_path):
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for given, expected in (("run", "run/checkpoints"), ("run/checkpoints", "run/checkpoints"), ("other", "other")):
        assert checkpoints_of(str(tmp_path / given)) == str(tmp_path / expected)
        assert ExportConfig(str(tmp_path / given), tmp_path / "x.safetensors").checkpoint == str(tmp_path / expected)
    assert checkpoints_of("gs://bucket/run") == "gs://bucket/run"
