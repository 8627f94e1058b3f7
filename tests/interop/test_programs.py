"""Programs to serve a trained model with: run where neither zero_jax nor Flax can be imported, with its numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.command_line import message, run

import zero_jax
from models import gpt2, llama
from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.resume import fixed
from zero_jax.cli.weights.export_command import export_command, model_programs, weights_of
from zero_jax.cli.weights.file_configs import ExportConfig
from zero_jax.frontends.model_functions import to_model_functions
from zero_jax.interop import program_loader

LINEAR = {"kernel": jnp.arange(6.0).reshape(3, 2), "inner": {"bias": jnp.ones((1, 2))}}

SERVE = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("zero_jax", "flax", "models", "optax", "orbax", "safetensors"):
            raise ImportError(f"{name} is not needed to serve")
sys.meta_path.insert(0, Refused())
import numpy as np
import load
served = load.load(sys.argv[1])
prompts = np.load(sys.argv[2])
found = {"logits": served.forward(prompts)}
if "decode" in served.exported:
    cache, parts = served.new_cache(len(prompts)), []
    for part in np.split(prompts, [4, 5], axis=1):
        logits, cache = served.decode(cache, part)
        parts.append(logits)
    found |= {"decoded": np.concatenate(parts, axis=1), "tokens": served.generate(prompts, 6)}
np.savez(sys.argv[3], **found)
assert not {"zero_jax", "flax", "models"} & sys.modules.keys()
"""


def linear(params, x):
    return x @ params["kernel"] + params["inner"]["bias"]


def rows():
    return jax.ShapeDtypeStruct(export.symbolic_shape("batch, 3"), jnp.float32)


def test_any_function_of_parameters_is_a_program_of_any_batch_and_platform(tmp_path):
    for weights in ("beside", "inside"):
        files = zero_jax.export_programs(tmp_path / weights, {"linear": (linear, (rows(),))}, LINEAR, weights=weights)
        assert {file.name for file in files} == {
            "README.md", "linear.jax_export", "load.py", "manifest.json",
            *["weights.safetensors"] * (weights == "beside")}
        served = program_loader.load(tmp_path / weights)
        for batch in (1, 5):
            x = np.random.default_rng(batch).normal(size=(batch, 3)).astype(np.float32)
            np.testing.assert_array_equal(served.call("linear", x), linear(LINEAR, x))
        assert set(served.weights) == ({"kernel", "inner/bias"} if weights == "beside" else set())
    assert served.exported["linear"].platforms == ("cpu", "cuda", "tpu")
    # For one device, and yet on all of them, where the weights are sharded.
    mesh = zero_jax.make_mesh()
    spread = program_loader.load(tmp_path / "beside", place=lambda name, value: jax.device_put(
        value, NamedSharding(mesh, P(None, None))))
    np.testing.assert_array_equal(spread.call("linear", x), linear(LINEAR, x))
    two = zero_jax.make_mesh(devices=jax.devices()[:2])
    spread = program_loader.load(tmp_path / "beside", place=lambda name, value: jax.device_put(
        value, NamedSharding(two, P(None, "data"))))
    assert spread.weights["kernel"].addressable_shards[0].data.shape == (3, 1)
    np.testing.assert_allclose(spread.call("linear", x), linear(LINEAR, x), 1e-6)
    # Negative control: other weights, other numbers.
    other = jax.tree.map(lambda leaf: -leaf, LINEAR)
    zero_jax.export_programs(tmp_path / "other", {"linear": (linear, (rows(),))}, other, dtype="bfloat16")
    again = program_loader.load(tmp_path / "other")
    assert again.weights["kernel"].dtype == jnp.bfloat16
    assert not np.allclose(again.call("linear", x), linear(LINEAR, x))


def test_what_cannot_be_written_or_read(tmp_path, monkeypatch):
    programs = {"linear": (linear, (rows(),))}
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    for options, error in (({"path": tmp_path / "full"}, "not an empty folder"),
                           ({"programs": {}}, "give at least one"),
                           ({"programs": {"a/b": programs["linear"]}}, "letters and digits"),
                           ({"weights": "orbax"}, "give beside or inside"), ({"platforms": "cpu"}, "give a list"),
                           ({"programs": {"both": (lambda p, x: x if x.shape[0] > 2 else -x, (rows(),))}},
                            "cannot be traced with symbolic dims")):
        with pytest.raises(zero_jax.UsageError, match=error):
            zero_jax.export_programs(**({"path": tmp_path / "out", "programs": programs, "params": LINEAR} | options))
        assert [path.name for path in tmp_path.iterdir()] == ["full"]
    monkeypatch.setattr("zero_jax.interop.programs.export_tree", lambda *args, **options: 1 / 0)  # as on a full disk
    with pytest.raises(ZeroDivisionError):
        zero_jax.export_programs(tmp_path / "out", programs, LINEAR)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has no manifest.json"):
        program_loader.load(tmp_path / "full")


def signed(folder, **changes):
    """Writes `changes` of a folder's manifest, with digests that fit: what is no damage, and may be hostile."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(manifest | {"sha256": program_loader.manifest_digest(manifest)}))


def test_a_flipped_bit_in_any_file_is_refused(tmp_path):
    out = tmp_path / "out"
    zero_jax.export_programs(out, {"linear": (linear, (rows(),))}, LINEAR, max_file_bytes=8, model={"sizes": {10: 1.5}})
    files = [file for file in sorted(out.iterdir()) if file.suffix in (".jax_export", ".safetensors")]
    assert len(files) == 3, "weights in two files"
    draw = np.random.default_rng(0)
    for file in [*files, out / "manifest.json"]:
        whole = file.read_bytes()
        for byte in [0, len(whole) - 1, *draw.integers(len(whole), size=20)]:
            damaged = bytearray(whole)
            damaged[byte] ^= 1 << draw.integers(8)
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"damaged|is of format"):
                program_loader.load(out)
        file.write_bytes(whole[:-2])
        with pytest.raises(ValueError, match=f"{file.name} is damaged"):
            program_loader.load(out)
        file.write_bytes(whole)
    # Negative control: the loader serves other numbers where the digest is that of the damaged file.
    before = program_loader.load(out).call("linear", jnp.ones((1, 3)))
    whole = bytearray(files[-1].read_bytes())
    whole[-2] ^= 1
    files[-1].write_bytes(whole)
    signed(out, weights=[{"file": file.name, "sha256": program_loader.file_digest(file)} for file in files[1:]])
    assert not np.array_equal(program_loader.load(out).call("linear", jnp.ones((1, 3))), before)


def test_hostile_folders_are_refused_in_one_line(tmp_path):
    out = tmp_path / "out"
    zero_jax.export_programs(out, {"linear": (linear, (rows(),))}, LINEAR)
    shutil.copy(out / "weights.safetensors", tmp_path / "x")
    (out / "below").mkdir()
    shutil.copy(out / "weights.safetensors", out / "below/x")
    os.mkfifo(out / "pipe")
    manifest = json.loads((out / "manifest.json").read_text())
    entry, size = manifest["weights"][0], (out / "weights.safetensors").stat().st_size
    for name in ("../x", "..", ".", "", "below/x", str(tmp_path / "x"), "..\\x", "x\0", "pipe",
                 "missing", 7, None, ["x"]):
        for wrong in ({"weights": [entry | {"file": name}]},
                      {"programs": {"linear": manifest["programs"]["linear"] | {"file": name}}}):
            signed(out, **wrong)
            with pytest.raises(ValueError, match=r"only files of its folder|missing, or no file|not as zero_jax"):
                program_loader.load(out)
    for wrong in ({"weights": "x"}, {"programs": []}, {"model": None}, {"num_weights": 3}, {"weights": [{}]}):
        signed(out, **manifest | wrong)
        with pytest.raises(ValueError, match=r"not as zero_jax|its manifest.json says"):
            program_loader.load(out)

    def header(**tensor):
        text = json.dumps({"kernel": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | tensor}).encode()
        return len(text).to_bytes(8, "little") + text + bytes(8)

    for content, error in (
            *(((announced).to_bytes(8, "little") + bytes(size - 8), "announces a header")
              for announced in (size, 10**8, 2**40, 2**63, 2**64 - 1)),
            (b"", "announces"), (header(dtype="F31"), "not as zero_jax"), (header(shape=[2**40]), "does not fit"),
            (header(data_offsets=[0, 2**40]), "does not fit"), (header(data_offsets=[8, 0]), "does not fit"),
            (header(data_offsets=[-8, 0]), "does not fit"), (header(shape=[-1, -2]), "does not fit"),
            (header(data_offsets=None), "not as zero_jax"), ((2).to_bytes(8, "little") + b"[]", "no object"),
            ((9**4).to_bytes(8, "little") + b"[" * 9**4, "JSON"), ((2).to_bytes(8, "little") + b"\xff{", "JSON")):
        (out / "weights.safetensors").write_bytes(content)
        signed(out, **manifest | {"weights": [
            entry | {"sha256": program_loader.file_digest(out / "weights.safetensors")}]})
        with pytest.raises(ValueError, match=error) as told:
            program_loader.load(out)
        assert len(str(told.value).splitlines()) == 1 and len(str(told.value)) < 500
    (out / "linear.jax_export").write_bytes(b"x" * 99)
    signed(out, **manifest | {"weights": [], "programs": {
        "linear": {"file": "linear.jax_export", "sha256": program_loader.file_digest(out / "linear.jax_export")}}})
    with pytest.raises(ValueError, match="no program that jax"):
        program_loader.load(out)
    os.truncate(out / "manifest.json", 2**40)
    with pytest.raises(ValueError, match="1,099,511,627,776 bytes, and such a file"):
        program_loader.load(out)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function of a model's name to (folder of checkpoints, the state in it, its step), as `train` saves them."""
    def save(name):
        config = TrainConfig(model=name, batch_size=8, seq_len=16, ema=0.5)
        step = step_of(config, find_model(name), jax.devices())
        batch = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
        state = step.init(jax.random.key(0), batch)
        # Weights of an initialisation hardly tell tokens apart: larger ones do.
        state = step.init(jax.random.key(0), batch, params=jax.tree.map(lambda leaf: 4 * leaf, step.params(state)))
        folder = tmp_path_factory.mktemp("run") / "checkpoints"
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(step, state, at=2, config=fixed(config), wait=True)
        return folder, state, step

    return save


def greedy(model, params, tokens, number):
    for _ in range(number):
        logits = model.apply({"params": params}, tokens)
        tokens = np.concatenate([tokens, np.asarray(logits[:, -1].argmax(-1))[:, None]], axis=1)
    return tokens[:, -number:]


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("module", "flavour"), [(gpt2, "gpt2"), (llama, "llama"), (llama, "llama_nnx")])
def test_a_trained_model_is_served_by_jax_alone(tmp_path, saved, module, flavour):
    folder, state, step = saved(f"{flavour}:tiny")
    out = tmp_path / "programs"
    config = ExportConfig(str(folder), out, format="programs")
    assert out / "load.py" in export_command(config, devices=jax.devices()[:2])
    prompts = np.random.default_rng(0).integers(0, 256, (3, 7)).astype(np.int32)
    np.save(tmp_path / "prompts.npy", prompts)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SERVE, str(out), str(tmp_path / "prompts.npy"), str(tmp_path / "x.npz")],
        cwd=out, env=os.environ | {"PYTHONPATH": str(out), "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
        timeout=300)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "x.npz") as file:
        found = dict(file)
    model, params = module.build(module.PRESETS["tiny"]), jax.device_get(step.params(state))
    expected = np.asarray(model.apply({"params": params}, prompts))
    np.testing.assert_allclose(found["logits"], expected, 1e-5, 1e-5 * np.abs(expected).max())
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["model"] == {"name": f"{flavour}:tiny", "checkpoint": 2, "vocab_size": 256, "max_length": 64}
    np.testing.assert_allclose(found["decoded"], expected, 1e-4, 1e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(found["tokens"], greedy(model, params, prompts, 6))
    # Negative controls: other parameters, and the prompt in another order, are neither of these.
    for other in (model.apply({"params": jax.tree.map(lambda leaf: 1.01 * leaf, params)}, prompts),
                  model.apply({"params": params}, np.roll(prompts, 1, axis=1))):
        assert np.abs(other - expected).max() > 1e-2 * np.abs(expected).max()
    served = program_loader.load(out)
    for call, error in ((lambda: served.forward([[256]]), "vocab_size is 256"),
                        (lambda: served.forward([[0] * 65]), "more than max_length=64"),
                        (lambda: served.forward([0.5]), "give integers"),
                        (lambda: served.call("backward"), "no program 'backward'")):
        with pytest.raises(ValueError, match=error):
            call()


@pytest.mark.slow
def test_a_text_of_fixed_sizes_is_generated_a_token_at_a_time(tmp_path, saved):
    folder, state, step = saved("gpt2:tiny")
    export_command(ExportConfig(str(folder), tmp_path / "x", format="programs", platforms=("cpu",), batch_size=2,
                                seq_len=9), devices=jax.devices()[:2])
    served, prompts = program_loader.load(tmp_path / "x"), np.random.default_rng(0).integers(0, 256, (2, 7))
    model, params = gpt2.build(gpt2.PRESETS["tiny"]), jax.device_get(step.params(state))
    expected = greedy(model, params, prompts, 6)
    np.testing.assert_array_equal(served.generate(prompts, 6), expected)
    assert (served.generate(prompts[:, ::-1], 6) != expected).any()
    wrong: Any = (0, -1, 2.5, True)
    for call, error in ((lambda: served.generate(prompts[:1], 6), r"shape \(1, 1\), .* exported for \(2, 1\)"),
                        (lambda: served.forward(prompts), r"shape \(2, 7\), .* exported for \(2, 9\)"),
                        *((lambda number=number: served.generate(prompts, number), "num_tokens=")
                          for number in wrong),
                        *((lambda value=value: served.generate(prompts, 2, temperature=value), "temperature=")
                          for value in (-1.0, float("nan"), float("inf")))):
        with pytest.raises(ValueError, match=error):
            call()


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet:tiny", "t5:tiny", "bert:tiny"])
def test_models_that_are_called_otherwise(tmp_path, name):
    """Images and running statistics; two texts, whose lengths T5 must know."""
    choice, draw = find_model(name), np.random.default_rng(0)
    inputs = {"resnet:tiny": [draw.normal(size=(3, 32, 32, 3)).astype(np.float32)],
              "t5:tiny": [draw.integers(0, 200, (3, 9)), draw.integers(0, 200, (3, 9))],
              "bert:tiny": [draw.integers(0, 200, (3, 9))]}[name]
    functions = to_model_functions(choice.build(choice.config), ())
    params, variables = functions.init(lambda model, batch: model(*batch), jax.random.key(0), inputs, functions.given)
    variables = jax.tree.map(lambda leaf: leaf + 0.5, variables)  # other statistics than those of a batch
    length = None
    if name == "t5:tiny":
        with pytest.raises(zero_jax.UsageError, match="cannot be traced with symbolic dims"):
            zero_jax.export_programs(tmp_path / "out", model_programs(
                choice, params, variables, batch=None, length=None), weights_of(params, variables))
        length = 9
    zero_jax.export_programs(tmp_path / "out", model_programs(
        choice, params, variables, batch=None, length=length), weights_of(params, variables))
    found = program_loader.load(tmp_path / "out").forward(*inputs)

    def logits(**options):
        return functions.run(lambda model, batch: model(*batch, **options), params, variables, None, inputs, None)[0]

    expected = logits(**({"train": False} if name == "resnet:tiny" else {}))
    np.testing.assert_allclose(found, expected, 1e-5, 1e-5 * np.abs(expected).max())
    if name == "resnet:tiny":
        assert np.abs(logits() - expected).max() > 0.01 * np.abs(expected).max(), "statistics would make no difference"


@pytest.mark.slow
def test_the_other_formats_and_their_refusals(tmp_path, saved):
    import orbax.checkpoint as ocp

    folder, state, step = saved("gpt2:tiny")
    export_command(ExportConfig(str(folder), tmp_path / "orbax", format="orbax", dtype="bf16", ema=True),
                   devices=jax.devices()[:2])
    with ocp.StandardCheckpointer() as checkpointer:
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding),
                                step.params(state))
        restored = checkpointer.restore(tmp_path / "orbax", abstract)
    jax.tree.map(lambda leaf, param: np.testing.assert_array_equal(leaf, param.astype(jnp.bfloat16)), restored,
                 step.params(state))
    # Fixed sizes, weights inside and one platform; a folder that is not empty.
    export_command(ExportConfig(str(folder), tmp_path / "fixed", format="programs", weights="inside", batch_size=2,
                                seq_len=5, platforms=("cpu",)), devices=jax.devices()[:2])
    served = program_loader.load(tmp_path / "fixed")
    assert served.forward([[1, 2, 3, 4, 5]] * 2).shape == (2, 5, 256) and not served.weights
    with pytest.raises(ValueError, match="2,5|(2, 5)"):
        served.forward([[1, 2, 3]])
    for options, error in ((("--format", "orbax", "--out", str(tmp_path / "fixed")), "is not an empty folder"),
                           (("--platforms", "cpu", "--out", "x.safetensors"), "--format safetensors does not use it"),
                           (("--format", "programs", "--names", "huggingface", "--out", "x"), "does not use it"),
                           (("--format", "programs", "--seq-len", "65", "--out", "x"), "longer than max_length=64")):
        done = run("export", "--checkpoint", str(folder), *options)
        assert done.returncode == 2 and error in message(done), done.stderr
    assert not (Path.cwd() / "x").exists()
