"""Fuzzing: whatever is given, a right result or one clear error; in the slow run, with a sample in the default one."""

import contextlib
import dataclasses
import io
import json
import os
import typing
from pathlib import Path
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flat import flat_step
from support.hostile import SETTINGS, VALUES, clear, mutated

import zero_jax
from zero_jax.checkpoint.history import parse_place
from zero_jax.checkpoint.manifest import Leaf, Manifest, parse
from zero_jax.cli import main
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.weights.file_configs import ExportConfig, GenerateConfig
from zero_jax.data.batches import Batches
from zero_jax.data.corpus import load
from zero_jax.diloco.options import OuterOptions
from zero_jax.interop.safetensors_file import find_tensors
from zero_jax.xla.targets import target_of


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


def squared(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


BATCH = {"x": np.zeros((16, 8), np.float32)}
STEP = {"stage": [0, 3], "precision": ["bf16", None], "axis": ["data"], "frozen": ["bias"], "ema": [0.9],
        "accumulate": [2], "guard": [zero_jax.Guard()],
        "mesh": [], "loss": [squared], "optimizer": [optax.sgd(0.1)], "reduce": ["once"],
        "gather": ["use", "auto", "forward"],
        "rng_streams": ["dropout"], "tensor_rules": [()], "sequence_parallel": [False], "remat": ["full"],
        "partition_activations": [False], "hpz_axes": [()], "combine_bytes": [None],
        "overlap": [False, "auto"], "prefetch": [False], "offload": [None, "optimizer", "parameters"], "model": [Net()],
        "tiling": [None],
        "communication": [zero_jax.Communication(gradients="int8")]}


def options(table, most=3):
    """Some of the options of `table`, each right or anything."""
    each = {name: st.booleans().flatmap(lambda is_right, right=right: st.sampled_from(right) if is_right else VALUES)
            if right else VALUES for name, right in table.items()}
    return st.lists(st.sampled_from([*table]), max_size=most, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: each[name] for name in names}))


def make(model=Net(), stage=1, **options):  # noqa: B008
    return flat_step(model, stage, **{"loss": squared, **options})


CLASSES = [
    (zero_jax.Guard, ("skip", "spike", "decay", "warmup")), (zero_jax.Precision, tuple(
        field.name for field in dataclasses.fields(zero_jax.Precision))), (zero_jax.LossScale, (
            "initial", "factor", "interval", "smallest", "largest")), (zero_jax.Remat, ("policy", "every")),
    (zero_jax.Communication, ("weights", "gradients", "block", "exclude")),
    (zero_jax.Metric, ("reduce",)), (zero_jax.TensorRule, ("pattern", "spec", "units")), (zero_jax.Names, ("rules",)),
    (zero_jax.make_mesh, ("data", "replica", "context", "tensor", "devices")),
    (OuterOptions, tuple(field.name for field in dataclasses.fields(OuterOptions))),
    (zero_jax.Checkpoints, ("path", "keep_last", "keep_every")), (target_of, ("text",)),
    (Batches, ("tokens", "batch_size", "length", "seed", "vocab_size")),
]
DEFAULTS = {"tokens": np.arange(99), "batch_size": 2, "length": 3, "pattern": "a", "spec": (None,), "rules": (),
            "path": "a", "text": "h100:8", "value": 1, "every": 10}


@st.composite
def calls(draw):
    target, names = draw(st.sampled_from(CLASSES))
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
    needed = [name for name in names if name in DEFAULTS] + ["value"] * (target is zero_jax.Metric)
    return target, {**{name: DEFAULTS[name] for name in needed}, **{name: draw(VALUES) for name in chosen}}


def fuzz_constructors(call):
    target, arguments = call
    clear(lambda: target(**arguments))


def fuzz_steps(arguments):
    clear(lambda: make(**arguments).layout(BATCH))


BATCHES = st.one_of(VALUES, st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3),
                    VALUES.map(lambda value: {**BATCH, "z": value}))


@pytest.fixture(scope="module")
def started():
    step = make()
    return step, step.init(jax.random.key(0), BATCH)


METHODS = ["__call__", "multi", "gradients", "params", "forgive", "check", "check_replicas", "init", "with_params",
           "to_train_state", "apply_gradients", "layout", "lower"]


def fuzz_methods(started, name, first, second, keeps):
    step, state = started
    if name in ("layout", "lower", "params", "forgive", "check", "check_replicas"):
        clear(lambda: getattr(step, name)(first))
    else:
        begin = {"init": jax.random.key(0)}.get(name, state) if keeps else first
        clear(lambda: getattr(step, name)(begin, second))


ARGS = ["train", "plan", "inspect", "export", "generate", "launch", "--", "--help", "--version", *(
    f"--{field.name.replace('_', '-')}" for config in (TrainConfig, PlanConfig, ExportConfig, GenerateConfig)
    for field in dataclasses.fields(config)), "0", "-1", "3", "4", "999999", "nan", "inf", "1e400", "", "python",
    "--config", "--config=/dev/null",
    "gpt2:tiny", "../x:a", "json:a", "h100:8", "v5p:0x0x0", ":::", "/dev/null", "\x1b[2J", "a" * 3000, "yes", "bf16",
    "None", "--out=", "="]


def fuzz_command_line(args, monkeypatch):
    """All but what would train or compile: those are stopped where the options are right."""
    def stop(*args, **options):
        raise KeyboardInterrupt

    for name in ("training.train.train", "planning.plan_command.plan_command", "main.launch",
                 "planning.plan_command.inspect_command", "weights.export_command.export_command",
                 "weights.generate_command.generate_command"):
        monkeypatch.setattr(f"zero_jax.cli.{name}", stop)
    monkeypatch.setattr(main, "end_with_launcher", lambda: None)
    err = io.StringIO()
    with (contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()),
          mock.patch.dict(os.environ)):
        try:
            status = main.main(args)
        except Exception as error:
            raise AssertionError(f"a raw error for {args}: {type(error).__name__}: {error}") from error
    assert status in (0, 2, 130), (args, status)
    assert "Traceback" not in err.getvalue()


def manifest():
    leaves = {"params/a/kernel": Leaf((2, 3), "float32", "0" * 16), "opt_state/0": Leaf((), "int32", "1" * 16)}
    intact = Manifest(3, "state", leaves, {"stage": 1}, {"position": 3}, None, {"jax": "1"})
    return json.dumps(intact.to_json()).encode()


def unsigned_manifest():
    """Its mutations are not refused for their checksum alone."""
    return json.dumps(json.loads(manifest())["manifest"]).encode()


def parse_resigned(text):
    from zero_jax.files import checksum

    try:
        body = json.loads(text)
        del body["checksum"]
        body["checksum"] = checksum(body)
    except (ValueError, TypeError, KeyError):
        body = None
    return parse(json.dumps({"manifest": body}), "manifest")


def safetensors():
    header = json.dumps({"__metadata__": {"format": "pt"},
                         "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
                         "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(22)


def npy():
    file = io.BytesIO()
    np.save(file, np.arange(50, dtype=np.uint16))
    return file.getvalue()


FORMATS = {
    "a.safetensors": (safetensors(), find_tensors),
    "a.safetensors.index.json": (
        b'{"metadata": {"total_size": 22}, "weight_map": {"a": "x.safetensors"}}', find_tensors),
    "a.toml": ((Path(target_of.__code__.co_filename).parent / "chips" / "h100.toml").read_bytes(),
               lambda path: target_of(f"{path}:8")),
    "a.npy": (npy(), lambda path: load(path, vocab_size=99)), "a.bin": (bytes(range(98)), load),
    "a.txt": (b"some text", lambda path: load(path, max_bytes=5)),
    "manifest": (manifest(), lambda path: parse(path.read_bytes(), "manifest")),
    "manifest, resigned": (unsigned_manifest(), lambda path: parse_resigned(path.read_bytes())),
    "order.json": (b'{"format": "zero_jax order 2", "saved": 1, "restored": 0, "after": [1], "checksum": ""}',
                   lambda path: parse_place(json.loads(path.read_bytes()) if path.read_bytes()[:1] == b"{" else None)),
}


LEAVES = st.tuples(st.sampled_from([16, 16, 16, 8, 12, 0]), st.sampled_from([(8,), (8,), (), (3, 8)]), st.sampled_from([
    "f4", "f4", "f8", "f2", "bfloat16", "i4", "i8", "u1", "?", "c8", "O", "U3", "M8[s]", "S2"])).map(
        lambda leaf: np.zeros((leaf[0], *leaf[1]), jnp.dtype(leaf[2]) if leaf[2] == "bfloat16" else leaf[2]))


def fuzz_batches(batch, arguments):
    clear(lambda: make(**arguments).layout(batch))


def many(default, slow):
    return pytest.mark.parametrize("examples", [default, pytest.param(slow, marks=pytest.mark.slow)])


@many(100, 1000)
def test_constructors(examples):
    SETTINGS(max_examples=examples)(given(calls())(fuzz_constructors))()


@many(50, 300)
def test_steps(examples):
    SETTINGS(max_examples=examples)(given(options(STEP))(fuzz_steps))()


@many(20, 300)
def test_batches(examples):
    batches = st.dictionaries(st.sampled_from("xxxyz"), LEAVES, max_size=3)
    right = {name: values for name, values in STEP.items() if values and name not in ("loss", "optimizer", "model")}
    arguments = st.lists(st.sampled_from([*right]), max_size=3, unique=True).map(
        lambda names: {name: right[name][0] for name in names})
    SETTINGS(max_examples=examples)(given(batches, arguments)(fuzz_batches))()


@many(50, 300)
def test_methods(examples, started):
    run = given(st.sampled_from(METHODS), VALUES, BATCHES, st.booleans())(
        lambda name, first, second, keeps: fuzz_methods(started, name, first, second, keeps))
    SETTINGS(max_examples=examples)(run)()


@many(20, 200)
def test_command_line(examples, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = st.lists(st.sampled_from(ARGS), max_size=4).flatmap(
        lambda rest: st.sampled_from(ARGS[:5]).map(lambda first: [first, *rest]))
    SETTINGS(max_examples=examples)(given(args)(lambda args: fuzz_command_line(args, monkeypatch)))()


@many(20, 150)
@pytest.mark.parametrize("name", FORMATS)
def test_files(name, examples, tmp_path):
    text, read = FORMATS[name]

    def fuzz(changed):
        (tmp_path / name).write_bytes(changed)
        if name == "order.json":
            with contextlib.suppress(ValueError):
                read(tmp_path / name)
            return
        clear(lambda: read(tmp_path / name))

    if "index" not in name and name != "order.json":
        (tmp_path / name).write_bytes(text)
        read(tmp_path / name)  # negative control: what is intact is read
    SETTINGS(max_examples=examples)(given(mutated(text))(fuzz))()


def test_a_raw_error_is_found():
    """Negative control."""
    with pytest.raises(AssertionError, match="(?s)a raw error: .*TypeError"):
        clear(lambda: typing.cast(typing.Any, None) + 1)
    with pytest.raises(AssertionError):
        clear(lambda: (_ for _ in ()).throw(zero_jax.UsageError("short")))
    assert clear(lambda: None)
