"""Parameters from and to files: Hugging Face's GPT-2 in every flavour, held against a forward pass in NumPy."""

import dataclasses
import functools
import json
import tracemalloc

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy as safetensors_numpy
from rich.console import Console
from support.covering import weekly
from support.numpy_gpt2 import hugging_face, numpy_gpt2
from support.oracle import slow

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax import export_params, import_params
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train
from zero_jax.data import corpus
from zero_jax.data.batches import Batches
from zero_jax.interop.naming import Names
from zero_jax.interop.params_io import export_tree
from zero_jax.interop.safetensors_file import Tensor, find_tensors
from zero_jax.sharding import shard_reader
from zero_jax.tree import named_leaves

CONFIG = gpt2.Config(2, 32, 4, vocab_size=64, max_length=16)
UNEVEN = gpt2.Config(2, 20, 2, vocab_size=65, max_length=17)  # divides by nothing
TOKENS = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (24, 16), np.int32)
BATCH = {"inputs": TOKENS, "targets": TOKENS}
BUILD = {"linen": gpt2.build, "nnx": gpt2_nnx.build}


def step_of(flavour="linen", scan=True, *, config=CONFIG, stage=3, devices=8, **options):
    model = BUILD[flavour](dataclasses.replace(config, scan_layers=scan))
    mesh = zero_jax.make_mesh(devices=jax.devices()[:devices])
    return zero_jax.make_zero_train_step(model, stage, mesh=mesh, **options)


def names_of(config=CONFIG):
    return Names(**gpt2.huggingface(config))


@functools.cache
def some_state(flavour="linen", scan=True, **options):
    """A step and its state, not to be donated."""
    step = step_of(flavour, scan, **options)
    return step, step.init(jax.random.key(0), BATCH)


def fresh(step, state):
    """A copy of `state` that may be donated."""
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.copy(), state)


def logits(model, batch):
    return model(batch["inputs"]).astype(jnp.float32)


@pytest.mark.grid
@weekly("flavour, scan, stage, devices, config, options", [
    ("linen", True, 3, 3, UNEVEN, {}), ("nnx", False, 3, 8, CONFIG, {}), ("linen", False, 0, 1, CONFIG, {}),
    slow("linen", False, 3, 8, CONFIG, {}), slow("nnx", True, 3, 3, UNEVEN, {"ema": 0.9}),
    slow("linen", True, 3, 8, CONFIG, {"replica": 2}), slow("nnx", True, 1, 8, UNEVEN, {}),
    slow("linen", True, 2, 8, CONFIG, {"frozen": ("wte", "ln_1")}),
    slow("nnx", True, 3, 3, UNEVEN, {"frozen": ("wpe",)})])
def test_logits_are_those_of_the_file(tmp_path, flavour, scan, stage, devices, config, options):
    tensors = hugging_face(config)
    safetensors_numpy.save_file(tensors, tmp_path / "model.safetensors")
    mesh = zero_jax.make_mesh(replica=options.get("replica", 1), devices=jax.devices()[:devices])
    options = {name: value for name, value in options.items() if name != "replica"}
    model = BUILD[flavour](dataclasses.replace(config, scan_layers=scan))
    step = zero_jax.make_zero_train_step(model, stage, mesh=mesh, optimizer=optax.sgd(0.1, 0.9), **options)
    state = import_params(tmp_path / "model.safetensors", step, step.init(jax.random.key(0), BATCH), BATCH,
                          names=names_of(config))
    found = np.asarray(step.evaluator(logits, ema="ema" in options)(state, BATCH))
    expected = numpy_gpt2(tensors, TOKENS, num_heads=config.num_heads)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    wrong = numpy_gpt2(tensors, TOKENS, num_heads=config.num_heads, fused="k q v")
    assert not np.allclose(found, wrong, rtol=1e-2, atol=1e-2), "the order of q, k and v must matter here"
    again = export_params(tmp_path / "again.safetensors", state, step.layout(BATCH), names=names_of(config))
    written = safetensors_numpy.load_file(again[0])
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)


def test_prefix_buffers_and_tied_head(tmp_path):
    """As openai-community/gpt2 has it, as torch checkpoints have it, and as what is not tied is refused."""
    step, state = some_state()
    tensors = hugging_face(CONFIG, prefix="")
    buffers = {f"h.{i}.attn.{name}": np.ones((1, 1, 16, 16), np.float32) for i in (0, 1)
               for name in ("bias", "masked_bias")}
    for extra, prefix in ((buffers, ""), ({"lm_head.weight": tensors["wte.weight"]}, "transformer.")):
        named = {prefix * (name != "lm_head.weight") + name: value for name, value in (tensors | extra).items()}
        safetensors_numpy.save_file(named, tmp_path / "x.safetensors")
        got = import_params(tmp_path / "x.safetensors", step, fresh(step, state), BATCH, names=names_of())
        params = dict(named_leaves(step.params(got)))
        np.testing.assert_array_equal(params["wte/embedding"], tensors["wte.weight"])
        np.testing.assert_array_equal(params["blocks/up/kernel"][1], tensors["h.1.mlp.c_fc.weight"])
    other = tensors["wte.weight"].copy()
    other[-1, -1] += 1
    safetensors_numpy.save_file(tensors | {"lm_head.weight": other}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="'lm_head.weight' differs from 'wte.weight'"):
        import_params(tmp_path / "x.safetensors", step, fresh(step, state), BATCH, names=names_of())


@pytest.mark.parametrize(("flavour", "dtype", "ema"), [
    ("linen", "float32", True), slow("nnx", "bfloat16", False)])
def test_own_names_and_many_files(tmp_path, flavour, dtype, ema):
    step, state = some_state(flavour, ema=0.5, precision="bf16", stage=2)
    state = dataclasses.replace(state, ema=jax.tree.map(lambda leaf: 2 * leaf, state.params))
    layout = step.layout(BATCH)
    *files, index = export_params(
        tmp_path / "x.safetensors", state, layout, dtype=dtype, ema=ema, max_file_bytes=20_000)
    assert len(files) > 2 and index.suffix == ".json"
    wanted = {name: np.asarray(leaf).astype(dtype) for name, leaf in named_leaves(
        layout.load(state).ema if ema else step.params(state))}
    other = {name: np.asarray(leaf) for name, leaf in named_leaves(step.params(state))}
    got = import_params(index, step, step.init(jax.random.key(5), BATCH), BATCH)
    assert find_tensors(index).keys() == wanted.keys()
    for name, leaf in named_leaves(step.params(got)):
        np.testing.assert_array_equal(leaf, wanted[name].astype(np.float32), err_msg=name)
    assert any((wanted[name] != other[name]).any() for name in wanted), "neither the average nor bf16 would show"
    masters = jax.tree.map(lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16), layout.load(got).params)
    chex.assert_trees_all_equal(got.weights, masters)


def test_the_optimizer_starts_from_what_was_read(tmp_path):
    """Schedule-free keeps a copy of the parameters in its state."""
    optimizer = optax.contrib.schedule_free_sgd(0.1)
    step = step_of(optimizer=optimizer)
    tensors = hugging_face(CONFIG)
    safetensors_numpy.save_file(tensors, tmp_path / "x.safetensors")
    first = step.init(jax.random.key(0), BATCH)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(first.opt_state)]
    state = import_params(tmp_path / "x.safetensors", step, first, BATCH, names=names_of())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((first.params, first.opt_state)))
    expected = optimizer.init(step.params(state))
    found = step.layout(BATCH).load(state).opt_state
    chex.assert_trees_all_equal(found, expected)
    after = [np.asarray(leaf) for leaf in jax.tree.leaves(state.opt_state)]
    assert any((one != other).any() for one, other in zip(before, after, strict=True))


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(6)(x)))
        return nn.Dense(3)(x)


def test_rules_for_a_model_of_ones_own(tmp_path):
    """Linear of torch stores (out, in); the second layer's outputs lie the other way round in the file."""
    rules = [(r"Dense_0/kernel", "fc.0.weight", None, True), ("Dense_1/kernel", "fc.1.weight", (2, 1, 0), True),
             (r"Dense_(?P<n>\d)/bias", "fc.{n}.bias"), (r"BatchNorm_0/scale", "bn.weight"),
             (r"BatchNorm_0/bias", "bn.bias"),
             (r"variables/batch_stats/BatchNorm_0/(?P<of>mean|var)", "bn.running_{of}")]
    names, draw = Names(rules, ignored=(".*num_batches_tracked",)), np.random.default_rng(0).normal
    tensors = {"fc.0.weight": draw(size=(6, 4)), "fc.1.weight": draw(size=(3, 6)), "fc.0.bias": draw(size=6),
               "fc.1.bias": draw(size=3), "bn.weight": draw(size=6), "bn.bias": draw(size=6),
               "bn.running_mean": draw(size=6), "bn.running_var": draw(size=6)}
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    safetensors_numpy.save_file(tensors | {"bn.num_batches_tracked": np.array(3)}, tmp_path / "x.safetensors")
    batch = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 3), np.float32)}
    step = zero_jax.make_zero_train_step(
        Perceptron(), 3, loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))
    state = import_params(tmp_path / "x.safetensors", step, step.init(jax.random.key(0), batch), batch, names=names)
    params = dict(named_leaves(step.params(state)))
    np.testing.assert_array_equal(params["Dense_0/kernel"], tensors["fc.0.weight"].T)
    np.testing.assert_array_equal(params["Dense_1/kernel"], tensors["fc.1.weight"].T[:, ::-1])
    np.testing.assert_array_equal(state.variables["batch_stats"]["BatchNorm_0"]["var"], tensors["bn.running_var"])
    (path,) = export_params(tmp_path / "y.safetensors", state, step.layout(batch), names=names)
    written = safetensors_numpy.load_file(path)
    assert written.keys() == tensors.keys()
    assert all((written[name] == tensors[name]).all() for name in tensors)
    (path,) = export_params(tmp_path / "z.safetensors", state, step.layout(batch))
    assert "variables/batch_stats/BatchNorm_0/mean" in safetensors_numpy.load_file(path)
    with pytest.raises(ValueError, match=r"No rule matches the parameter BatchNorm_0/bias of shape \(6,\)"):
        export_params(path, state, step.layout(batch), names=Names([("Dense.*", "x")]))
    with pytest.raises(ValueError, match="give Dense_0/bias and Dense_0/kernel the same tensor 'x'"):
        export_params(path, state, step.layout(batch), names=Names([("Dense.*", "x"), ("(?P<n>.*)", "{n}")]))


def test_each_device_reads_its_own_part_and_the_host_holds_one_leaf(tmp_path, monkeypatch):
    config = gpt2.Config(2, 256, 4, vocab_size=6000, max_length=16)
    tensors = hugging_face(config)
    safetensors_numpy.save_file(tensors, tmp_path / "x.safetensors")
    total, largest = sum(t.nbytes for t in tensors.values()), max(t.nbytes for t in tensors.values())
    assert total > 2 * largest
    step = step_of(config=config, optimizer=optax.sgd(0.1))
    state = step.init(jax.random.key(0), BATCH)
    read, plain = [], Tensor.read

    def told(self, index=()):
        part = plain(self, index)
        read.append(part.nbytes)
        return part

    monkeypatch.setattr(Tensor, "read", told)

    def unaligned(*args):
        # CPU devices copy it. An array that lies on 64 bytes they take as it is, so that the count of what the host
        # holds would include, by chance, what a device holds.
        part = stored_part(*args)
        memory = np.empty(part.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64 + part.itemsize
        copy = memory[start:start + part.nbytes].view(part.dtype).reshape(part.shape)
        copy[...] = part
        return copy

    stored_part = shard_reader.stored_part
    monkeypatch.setattr(shard_reader, "stored_part", unaligned)

    def peak(act):
        tracemalloc.start()
        out = act()
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return out, top

    state, imported = peak(
        lambda: import_params(tmp_path / "x.safetensors", step, state, BATCH, names=names_of(config)))
    (path,), exported = peak(
        lambda: export_params(tmp_path / "y.safetensors", state, step.layout(BATCH), names=names_of(config)))
    control, whole = peak(lambda: {name: tensor.read() for name, tensor in find_tensors(path).items()})
    allowed = largest + total / 4
    assert imported < allowed and exported < allowed and whole > allowed, (imported, exported, whole, largest)
    assert sum(read[: -len(control)]) == total, "each element was read once"
    assert max(read[: -len(control)]) <= largest / 8 + 1


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("transformer.h.1.ln_2.bias"), r"lacks 1 \(h.1.ln_2.bias\) of the 28 tensors"),
    (lambda t: t.update({"transformer.h.2.ln_1.bias": np.ones(32)}), r"has in addition 1 \(h.2.ln_1.bias\)"),
    (lambda t: t.update({"wte.weight": np.ones((64, 32))}), "has both 'wte.weight' and 'transformer.wte.weight'"),
    (lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": np.ones((128, 32))}),
     r"'transformer.h.0.mlp.c_fc.weight' has shape \(128, 32\), and blocks/up/kernel of the model takes \(32, 128\)"),
    (lambda t: t.update({"transformer.ln_f.bias": np.ones(32, np.int32)}),
     "'transformer.ln_f.bias' has dtype int32, and ln_f/bias of the model has float32"),
    (lambda t: t.update({"transformer.ln_f.bias": np.full(32, 1e300)}), "holds 1e.300, beyond the range of float32"),
], ids=["missing", "extra", "both", "shape", "dtype", "overflow"])
def test_a_file_of_another_model(tmp_path, change, message):
    step, state = some_state()
    tensors = hugging_face(CONFIG)
    change(tensors)
    safetensors_numpy.save_file(tensors, tmp_path / "x.safetensors")
    mine = fresh(step, state)
    with pytest.raises(ValueError, match=message) as error:
        import_params(tmp_path / "x.safetensors", step, mine, BATCH, names=names_of())
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    assert "beyond" in message or not any(leaf.is_deleted() for leaf in jax.tree.leaves(mine)), "nothing was touched"


@pytest.mark.parametrize(("options", "message"), [
    ({"dtype": "int8"}, "dtype=int8 is not a floating dtype"), ({"ema": True}, "has no moving average"),
    ({"names": Names([("(?P<n>.*)/kernel", "{n}")])}, "No rule matches")])
def test_what_cannot_be_exported(tmp_path, options, message):
    step, state = some_state()
    with pytest.raises(ValueError, match=message):
        export_params(tmp_path / "x.safetensors", state, step.layout(BATCH), **options)
    assert [*tmp_path.iterdir()] == []


def test_a_dtype_that_the_format_lacks(tmp_path):
    with pytest.raises(ValueError, match="a/b is of complex64, which the format lacks: write an Orbax checkpoint"):
        export_tree(tmp_path / "x.safetensors", {"a": {"b": jnp.ones(3, jnp.complex64)}})
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_run_starts_from_a_file(tmp_path):
    tensors, ids = hugging_face(gpt2.PRESETS["tiny"]), np.random.default_rng(0).integers(0, 256, 9000)
    safetensors_numpy.save_file(tensors, tmp_path / "x.safetensors")
    np.save(tmp_path / "ids.npy", ids.astype(np.uint16))
    config = TrainConfig(model="gpt2:tiny", batch_size=8, seq_len=16, data=(str(tmp_path / "ids.npy"),), steps=1,
                         init_from=tmp_path / "x.safetensors", out=tmp_path / "out")
    loss = train(config, console=Console(quiet=True)).loss
    part, _ = corpus.split(ids, length=16, holdout=0.05)
    batch = Batches(part, batch_size=8, length=16)[0]
    found = numpy_gpt2(tensors, batch["inputs"], num_heads=4)
    found -= np.log(np.exp(found).sum(-1, keepdims=True))
    expected = -np.take_along_axis(found, batch["targets"][..., None], -1).mean()
    assert loss == pytest.approx(expected, rel=1e-4) and loss > 6, "not that of a new model, 5.5"


@pytest.mark.filterwarnings("ignore")
def test_transformers_agrees(tmp_path):
    """Its own random GPT-2, saved by itself, and what is exported, loaded by itself."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    settings = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16,
                                       bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(settings).eval()
    model.save_pretrained(tmp_path / "theirs")
    step = step_of("nnx")
    state = import_params(tmp_path / "theirs", step, step.init(jax.random.key(0), BATCH), BATCH, names=names_of())
    tokens = torch.from_numpy(TOKENS.astype(np.int64))
    with torch.no_grad():
        expected = model(tokens).logits.numpy()
        found = np.asarray(step.evaluator(logits)(state, BATCH))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        state, _ = step(state, BATCH)
        trained = np.asarray(step.evaluator(logits)(state, BATCH))
        assert not np.allclose(trained, expected, rtol=1e-4, atol=1e-4)
        (tmp_path / "ours").mkdir()
        (tmp_path / "ours/config.json").write_text(json.dumps(settings.to_dict()))
        export_params(tmp_path / "ours/model.safetensors", state, step.layout(BATCH), names=names_of(), dtype="float32")
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
        np.testing.assert_allclose(trained, again(tokens).logits.numpy(), rtol=1e-4, atol=1e-4)
