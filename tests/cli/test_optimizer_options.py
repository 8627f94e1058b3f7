"""Optimizers on the command line: muon, schedule-free, moments in fewer bits, betas and eps; kept and planned."""

import dataclasses
import functools
import io
import itertools
import json
import re
import shlex
import tempfile
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy as safetensors_numpy
from rich.console import Console
from support import command_line
from support.oracle import slow
from support.run_log import losses

import zero_jax
from models import gpt2
from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.flags import read_flags
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.planning.remedies import train_lines
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.train import train
from zero_jax.cli.weights.export_command import export_command
from zero_jax.cli.weights.file_configs import ExportConfig
from zero_jax.errors import CheckpointError, UsageError
from zero_jax.optim.presets import make_optimizer
from zero_jax.tree import named_leaves

SMALL = TrainConfig(model="support.pairs:small", batch_size=8, seq_len=8, max_bytes=900, eval_every=2, eval_batches=1,
                    samples=0, save_every=2, steps=2, schedule="constant", html=False)


def run(folder, **options):
    said = io.StringIO()
    config = dataclasses.replace(SMALL, out=folder, **options)
    return train(config, console=Console(file=said, width=200)), said.getvalue()


@functools.cache
def plain(model):
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), steps=4, model=model)
        return losses(Path(folder))


@pytest.mark.parametrize("options", [
    {"optimizer": "muon"}, slow({"moments": 8, "model": "support.pairs:wide"}), slow({"optimizer": "schedule-free"}),
    slow({"moments": 16}), slow({"betas": (0.8, 0.9), "eps": 1e-3})], ids=lambda options: str(next(iter(options))))
def test_a_run_goes_on_with_its_optimizer(tmp_path, options):
    run(tmp_path / "whole", steps=4, **options)
    run(tmp_path / "a", **options)
    run(tmp_path / "a", steps=4, resume=True, **options)
    assert losses(tmp_path / "a") == losses(tmp_path / "whole") != {}
    assert losses(tmp_path / "a") != plain(options.get("model", SMALL.model))  # the control: the options do something
    name, value = next(iter(options.items()))
    shown = f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else f'"{value}"' if isinstance(
        value, str) else value
    assert f"{name} = {shown}\n" in (tmp_path / "a/config.toml").read_text()
    with pytest.raises(CheckpointError, match=f"belongs to another run: .*{name}="):
        run(tmp_path / "a", **{**options, "steps": 6, "resume": True, name: getattr(SMALL, name)})


@pytest.mark.parametrize("optimizer", ["schedule-free", slow("muon")])
def test_states_in_host_memory_have_the_numbers_of_those_on_the_devices(tmp_path, optimizer):
    """Of training, and of an evaluation, which takes schedule-free's average. The control: another rate is seen."""
    found, on_devices = {}, {}
    for name, options in (("device", {}), ("host", {"offload": "optimizer"}), ("other", {"learning_rate": 2e-3})):
        summary, said = run(tmp_path / name, optimizer=optimizer, precision="bf16", steps=4, **options)
        found[name] = [*losses(tmp_path / name).values(), summary.validation_loss]
        (state,) = re.findall(r"of it ([0-9.]+) KiB state", said)
        on_devices[name] = float(state)
    assert found["device"] == found["host"] != found["other"]
    assert on_devices["host"] < 0.5 * on_devices["device"]


def test_the_command_of_a_plan_with_schedule_free_has_its_schedule():
    """`train` refuses it with any other."""
    config = PlanConfig(target="h100:8", model="gpt2:tiny", optimizer="schedule-free", seq_len=64)
    line = train_lines(config, types.SimpleNamespace(batch_size=8, length=64))[0]
    args = shlex.split(line.partition("zero-jax train ")[2])
    assert read_flags("train", TrainConfig, args).schedule == "constant"
    with pytest.raises(UsageError, match="schedule=cosine"):
        read_flags("train", TrainConfig, [arg for arg in args if arg not in ("--schedule", "constant")])


@pytest.mark.parametrize("stage", [slow(1), 3])
def test_schedule_free_is_evaluated_and_exported_with_its_average(tmp_path, stage):
    summary, _ = run(tmp_path / "run", optimizer="schedule-free", steps=4, stage=stage, precision="bf16")
    config = dataclasses.replace(SMALL, optimizer="schedule-free", steps=4, stage=stage, precision="bf16",
                                 out=tmp_path / "none")
    step = step_of(config, find_model(config.model), jax.devices())
    _, held_out = objective_of(config).load_data().batches(step.batch_sharding)
    with Checkpoints(tmp_path / "run/checkpoints", read_only=True) as checkpoints:
        state = checkpoints.restore(step, held_out[0]).state
    found = next(each for each in jax.tree.leaves(state.opt_state, is_leaf=lambda each: hasattr(each, "z"))
                 if hasattr(each, "z"))
    by_hand = jax.tree.map(lambda y, z: (y - np.float32(0.1) * z) / np.float32(0.9), step.params(state),
                           step.params(dataclasses.replace(state, params=found.z)))
    (file,) = export_command(ExportConfig(str(tmp_path / "run"), tmp_path / "x.safetensors", model=SMALL.model),
                             devices=jax.devices()[:2])
    exported = safetensors_numpy.load_file(file)
    for name, leaf in named_leaves(by_hand):
        np.testing.assert_allclose(exported[name], leaf, rtol=1e-5, atol=1e-6)
    moved = [np.abs(exported[name] - leaf).max() for name, leaf in named_leaves(step.params(state))]
    assert max(moved) > 1e-4  # the control: the trained parameters are others

    def loss_of(params):
        sums = [by_numpy(params, jax.device_get(batch)) for batch in itertools.islice(held_out.once(), 1)]
        return np.mean(sums)

    assert abs(summary.validation_loss - loss_of(exported)) < 2e-3
    assert abs(summary.validation_loss - loss_of(exported)) < abs(
        summary.validation_loss - loss_of(dict(named_leaves(step.params(state)))))  # the control


def by_numpy(params, batch):
    """The loss of each next byte, with parameters by name."""
    params = {name: np.asarray(leaf) for name, leaf in params.items()}
    hidden = params["layers_0/embedding"][batch["inputs"]]
    logits = hidden @ params["layers_1/kernel"] + params["layers_1/bias"]
    return -np.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1).mean()


@pytest.mark.parametrize(("args", "said"), [
    (["--betas", "0.9"], "--betas 0.9: give two, as 0.9,0.95"),
    (["--betas", "0.9,1.5"], "--betas 1.5 is not within 0 to"),
    (["--optimizer", "sgd-momentum", "--betas", "0.9,0.95"], "it has no two such averages: leave --betas out"),
    (["--optimizer", "lion", "--eps", "1e-6"], "it divides by no such sum: leave --eps out"),
    (["--optimizer", "muon", "--moments", "8"], "stored in float32: leave --moments out"),
    (["--optimizer", "schedule-free"], "its average is in place of a decay: give --schedule constant"),
    (["--optimizer", "schedule-free", "--schedule", "constant", "--ema", "0.9"], "leave --ema out"),
    (["--optimizer", "schedule-free", "--schedule", "constant", "--betas", "0,0.9"], "give one above 0"),
    (["--optimizer", "muon", "--offload", "parameters"], "give --offload optimizer, or --optimizer adamw"),
    (["--optimizer", "muon", "--diloco-every", "4", "--replica", "2"], "give --optimizer adamw"),
    (["--moments", "4"], "--moments 4: it is none of the choices"),
])
def test_what_does_not_go_together_is_refused(args, said):
    assert said in command_line.refused("train", *args)


def test_flags_are_read():
    config = read_flags("train", TrainConfig, ["--betas", "0.9,0.95", "--eps", "1e-6", "--moments", "8"])
    assert (config.betas, config.eps, config.moments) == ((0.9, 0.95), 1e-6, 8)
    assert read_flags("train", TrainConfig, ["--betas", "0.9", "0.95"]).betas == config.betas
    assert read_flags("plan", PlanConfig, ["--optimizer", "muon"]).optimizer == "muon"
    assert TrainConfig().betas == ()  # the control


def test_betas_and_eps_are_those_of_the_update():
    """The first step of Adam from a gradient g is g / (|g| + eps), and the second moment 1 - b2 of its square."""
    grads = {"kernel": np.float32([[0.5, -2.0]])}
    optimizer = make_optimizer("adamw", zero_jax.make_mesh(), learning_rate=1.0, betas=(0.5, 0.75), eps=0.25)
    updates, state = optimizer.update(grads, optimizer.init(grads), grads)
    np.testing.assert_allclose(updates["kernel"], [[-0.5 / 0.75, 2.0 / 2.25]], rtol=1e-6)
    np.testing.assert_allclose(state[0].nu["kernel"], 0.25 * grads["kernel"] ** 2)
    other = make_optimizer("adamw", zero_jax.make_mesh(), learning_rate=1.0)  # the control
    assert not np.allclose(other.update(grads, other.init(grads), grads)[0]["kernel"], updates["kernel"])


@pytest.mark.slow
@pytest.mark.parametrize(("args", "low", "high"), [
    ([], 8, 8.01), (["--moments", "16"], 4, 4.01), (["--moments", "8"], 2, 2.2), (["--optimizer", "muon"], 6.1, 6.2),
    (["--optimizer", "schedule-free"], 8, 8.01)])
def test_a_plan_counts_the_bytes(args, low, high):
    """Bytes of optimizer state a parameter. Muon: 4 for kernels, whose 12 of a shape are stored as 16; 8 for others."""
    name = "124m" if "muon" in args else "bytes"
    done = command_line.run("plan", "--target", "h100:8", "--model", f"gpt2:{name}", "--json", "--no-remedies", *args)
    assert done.returncode == 0, done.stderr
    stored = json.loads(done.stdout)["plan"]["optimizer_bytes"] * 8 / gpt2.PRESETS[name].num_params
    assert low <= stored <= high


def test_muon_is_that_of_optax_with_the_size_of_adamw():
    rng = np.random.default_rng(0)
    params = {"up": {"kernel": rng.normal(size=(16, 24)).astype(np.float32), "bias": np.ones(24, np.float32)}}
    grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)

    def updates_of(optimizer):
        updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
        return jax.tree.map(np.asarray, updates["up"])

    def by_optax(**options):
        return updates_of(optax.contrib.muon(1e-2, weight_decay=0.1, adam_weight_decay=0.1, **options))

    found = updates_of(make_optimizer("muon", zero_jax.make_mesh(), learning_rate=1e-2, weight_decay=0.1))
    adamw = updates_of(make_optimizer("adamw", zero_jax.make_mesh(), learning_rate=1e-2, weight_decay=0.1))
    np.testing.assert_allclose(found["kernel"], by_optax(consistent_rms=0.2)["kernel"], rtol=1e-3, atol=2e-6)
    np.testing.assert_allclose(found["bias"], adamw["bias"], rtol=1e-5)
    decayed = found["kernel"] + 1e-3 * params["up"]["kernel"]
    assert 0.15e-2 < np.sqrt((decayed**2).mean()) < 0.25e-2  # of which Adam's is about 0.2 of the rate, late in a run
    assert np.abs(found["kernel"] - by_optax()["kernel"]).max() > 1e-3  # the control: sizes of Muon's own


def test_muon_is_of_kernels_within_a_network():
    step = zero_jax.make_zero_train_step(gpt2.build(gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)), 3, optimizer=(
        make_optimizer("muon", zero_jax.make_mesh(), learning_rate=1e-3)))
    batch = {name: jax.ShapeDtypeStruct((8, 16), np.int32) for name in ("inputs", "targets")}
    names = [name for name, _ in named_leaves(step.layout(batch).state.opt_state)]
    adam = {name.partition("/nu/")[2] for name in names if "/nu/" in name}
    assert "wte/embedding" in adam and "blocks/up/bias" in adam and "blocks/ln_1/scale" in adam
    assert not any("kernel" in name for name in adam)
    assert any("2x32x128" in name for name in names)
    assert step.verify(batch)  # nothing but gradients and updates is sent for them
