"""What `plan` says where a step does not fit: what was tried and suffices, in order, and the command of `train`."""

import dataclasses
import types

import pytest
from support import run_log
from support.command_line import refused, run
from support.targets import target_devices

from zero_jax.cli.flags import read_flags
from zero_jax.cli.model_lookup import find_model, published_name
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.planning.remedies import (
    candidates,
    flags,
    remedies,
    remedy_lines,
    shorter,
    train_lines,
)
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError
from zero_jax.planning.plan import Plan
from zero_jax.xla.chip import chip_files

SIZES = types.SimpleNamespace(vocab_size=1024, remat=False)


def planned(needed, *, state=10, memory=100, batch=8, length=1024, rate=0.0, stage=3):
    """A plan whose memory is given."""
    fake = types.SimpleNamespace(
        needed_bytes=needed, memory_bytes=memory, layout=types.SimpleNamespace(device_bytes=state), num_devices=8,
        length=length, batch_size=batch, fits=needed <= memory, lacking_bytes=max(0, needed - memory), stage=stage,
        timing=types.SimpleNamespace(tokens_per_second=rate))
    fake.devices_needed = Plan.devices_needed.fget(fake)
    return fake


def tried(config, first, needs):
    """`remedies` where the plan of each trial is what `needs` has for its flags; 999 where that has nothing."""
    seen = []

    def plan_of(other):
        changes = {field.name: getattr(other, field.name) for field in dataclasses.fields(other)
                   if getattr(other, field.name) != getattr(config, field.name)}
        seen.append(flags(changes))
        needed = needs.get(flags(changes), 999)
        if isinstance(needed, Exception):
            raise needed
        needed, rate, batch = needed if isinstance(needed, tuple) else (needed, 1.0, first.batch_size)
        return planned(needed, rate=rate, batch=batch, length=other.seq_len or first.length)

    found = remedies(config, first, SIZES, plan_of)
    return [flags(each.changes) for each in found], seen


CONFIG = PlanConfig(model="gpt2:124m", target="h100:8")


def test_what_suffices_is_named_by_its_flag_and_in_order():
    """Same work first, then by tokens/s. Controls: what does not suffice, or does not go together, is left out."""
    found, seen = tried(CONFIG, planned(180), {
        "--loss-chunks 16": (90, 5.0, 8), "--remat full": (80, 7.0, 8), "--remat dots": 120,
        "--context 2": (60, 9.0, 4), "--context 4": UsageError("no"), "--seq-len 512": (70, 8.0, 8)})
    assert found == ["--remat full", "--loss-chunks 16", "--context 2", "--seq-len 512"]
    assert "--remat dots" in seen and "--context 4" in seen
    assert not any("offload" in name for name in seen), "10 bytes of state are less than the 80 that lack"


def test_together_where_none_suffices_alone():
    found, seen = tried(CONFIG, planned(105), {
        "--remat full --loss-chunks 16": 99, "--remat dots --loss-chunks 16": 101})
    assert found == ["--loss-chunks 16 --remat full"] and "--offload parameters" in seen
    assert tried(CONFIG, planned(105), {})[0] == []


def test_a_state_that_is_too_large_is_not_met_by_less_activations():
    names = [flags(each) for each in candidates(CONFIG, planned(120, state=120), SIZES)]
    assert names == ["--moments 16", "--moments 8", "--offload optimizer", "--offload parameters"]
    lower = dataclasses.replace(CONFIG, stage=1, batch_per_device=4)
    names = [flags(each) for each in candidates(lower, planned(120, state=30, stage=1), SIZES)]
    assert names[0] == "--stage 3" and "--accumulate 4" in names and "--offload parameters" not in names


def test_estimates_by_hand():
    """90 of 190 bytes are temporaries that halve with the length; 8 devices of 10 bytes of state, 40 of room."""
    assert shorter(planned(190)) == 512 and shorter(planned(190, length=128)) == 0
    assert planned(120, state=60).devices_needed == 12  # 8 x 60 / (100 - 60)
    assert planned(190).devices_needed is None and planned(120, state=60, stage=0).devices_needed is None
    lines = remedy_lines(CONFIG, planned(120, state=60), [])
    assert lines == ["Nothing that was tried fits h100:8.",
                     "  - more devices, at least 12 by the size of the state (not compiled)"]


@pytest.mark.parametrize("changes", [
    {}, {"stage": 2, "precision": "bf16-stochastic", "accumulate": 2, "batch_per_device": 2},
    {"loss_chunks": 8, "remat": "full", "offload": "parameters", "context": 2, "sequence_parallel": False},
    {"quantize_weights": "int8", "quantize_gradients": ("int4",), "replica": 2}, {"tiling": ("mlp/up/kernel=16",)}])
def test_the_printed_command_is_one_of_train(changes):
    config = dataclasses.replace(CONFIG, **changes)
    (line,) = train_lines(config, planned(90, batch=16))
    program, command, *args = line.removeprefix("To train it: ").split(" ")
    assert (program, command) == ("zero-jax", "train")
    trained = read_flags("train", TrainConfig, args)
    assert trained.batch_size == 16 and trained.seq_len == 1024
    shared = {field.name for field in dataclasses.fields(TrainConfig)} & {
        field.name for field in dataclasses.fields(PlanConfig)} - {"target", "seq_len", "batch_size"}
    assert {name: getattr(trained, name) for name in shared} == {name: getattr(config, name) for name in shared}


def test_what_train_has_no_option_for_is_said():
    config = dataclasses.replace(CONFIG, mesh=(2, 4), vocab_size=512)
    command, *others = train_lines(config, planned(90))
    assert "--mesh" not in command and "--vocab-size" not in command
    assert [line.partition(",")[0] for line in others] == [
        "Not in that command: --mesh", "Not in that command: --vocab-size"]


def test_the_default_length_is_said(monkeypatch):
    """LLaMA 3.1 takes 131,072 tokens; a plan takes 8,192 by itself, and what is asked for where it is."""
    llama = PlanConfig(model="llama:3.1-8b")
    choice = llama.check()[1]
    assert llama.seq_len == 8192 and choice.config.max_length == 131072
    longer = PlanConfig(model="llama:3.1-8b", seq_len=131072)
    longer.check()
    assert longer.seq_len == 131072
    small = PlanConfig(model="gpt2:124m")
    small.check()
    assert small.seq_len == 1024
    assert "length" in {field.name for field in dataclasses.fields(Plan)}


def test_a_plan_as_printed():
    """Controls: a model with a loss of its own has no chunks; and without remedies nothing is tried."""
    target_devices("h100:8")
    small = ("plan", "--target", "h100:8", "--model", "gpt2:tiny", "--seq-len", "64")
    done = run(*small, "--loss-chunks", "4")
    assert done.returncode == 0 and "global batch 8 of 64 tokens" in done.stdout
    assert ("To train it: zero-jax train --model gpt2:tiny --precision bf16 --loss-chunks 4 --batch-size 8 --seq-len 64"
            in done.stdout), done.stdout
    assert "device-hours" not in done.stdout
    said = refused("plan", "--target", "h100:8", "--model", "bert:tiny", "--loss-chunks", "4")
    assert "bert:tiny has a loss of its own: leave it out" in said
    done = run("plan", "--target", "h100:8", "--model", "gpt2:100b", "--stage", "0", "--no-remedies")
    assert done.returncode == 3 and "What would help:" in done.stdout and "To train it" not in done.stdout


@pytest.mark.parametrize(("name", "preset"), [
    ("llama3-8b", "llama:3-8b"), ("Llama-3.1-8B", "llama:3.1-8b"), ("meta-llama/Llama-3.1-8B", "llama:3.1-8b"),
    ("meta-llama/Meta-Llama-3-70B-Instruct", "llama:3-70b"), ("Qwen/Qwen3-0.6B", "llama:qwen3-0.6b"),
    ("gpt2-xl", "gpt2:1.5b"), ("gpt2-1.5b", "gpt2:1.5b"), ("google-bert/bert-base-uncased", "bert:base"),
    ("gpt2-15b", None), ("llama:3-8b", None), ("gpt2", None), ("mistralai/Mistral-7B", None)])
def test_models_as_their_publishers_write_them(name, preset):
    """Controls: another number, MODULE:PRESET, the name of a module, and a model that there is none of."""
    assert published_name(name) == preset
    if preset is not None:
        assert find_model(name).name == preset


def test_what_there_is_is_listed():
    models, targets = run("models"), run("targets")
    assert models.returncode == targets.returncode == 0
    assert any(line.startswith("llama: ") and "3.1-8b" in line for line in models.stdout.splitlines())
    lines = targets.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(chip_files())
    assert "h100: NVIDIA H100 80GB HBM3, 79.1 GiB; h100:GPUS or h100:HOSTSxGPUS_PER_HOST, as h100:8, h100:16x8" in lines
    assert run("models", "x").returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--lora-rank", "2")])
def test_a_run_with_a_chunked_loss_has_the_same_losses(tmp_path, more):
    """Control: another learning rate has others."""
    def losses(name, *options):
        done = run("train", "--model", "gpt2:tiny", "--batch-size", "8", "--seq-len", "16", "--steps", "3",
                   "--samples", "0", "--save-every", "0", "--max-bytes", "20000", "--no-html", *options, *more,
                   "--out", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        return [*run_log.losses(tmp_path / name).values()]

    whole, chunked = losses("whole"), losses("chunked", "--loss-chunks", "4")
    assert len(whole) == 3 and chunked == pytest.approx(whole, rel=1e-5)
    assert losses("other", "--learning-rate", "0.03")[-1] != pytest.approx(whole[-1], rel=1e-5)
