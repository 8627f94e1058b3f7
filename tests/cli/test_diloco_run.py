"""`train --diloco-every`: a run of slices has the numbers of the library's loop, goes on, and leaves one model."""

import dataclasses
import io
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy
from rich.console import Console
from support import run_log
from support.command_line import refused

import zero_jax
from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.objectives.choose import objective_of
from zero_jax.cli.step_from_config import abstract_batch, step_of
from zero_jax.cli.train_config import InspectConfig, TrainConfig
from zero_jax.cli.training.evaluation import evaluate
from zero_jax.cli.training.run_programs import SlicePrograms
from zero_jax.cli.training.train import train
from zero_jax.cli.weights.export_command import export_command
from zero_jax.cli.weights.file_configs import ExportConfig, GenerateConfig
from zero_jax.cli.weights.saved_model import SavedModel
from zero_jax.errors import CheckpointError, UsageError
from zero_jax.step.guard import BadStepError
from zero_jax.tree import named_leaves

SLICES = {"replica": 2, "diloco_every": 4}
CONFIG = TrainConfig(model="support.pairs:small", batch_size=8, seq_len=8, max_bytes=50_000, steps=10, eval_every=5,
                     eval_batches=2, save_every=5, samples=0, html=False, diloco_fragments=2, diloco_overlap=True,
                     diloco_momentum=0.5, diloco_dtype="bf16", **SLICES)

WRONG = {
    "no steps": ({**SLICES, "diloco_every": 0}, "diloco_every=0: give at least 1"),
    "fragments": ({**SLICES, "diloco_fragments": 5}, "diloco_fragments=5 with every=4"),
    "momentum": ({**SLICES, "diloco_momentum": 1.0}, "diloco_momentum=1.0"),
    "dtype": ({**SLICES, "diloco_dtype": "int8"}, "diloco_dtype='int8' is unknown"),
    "never averaged": ({**SLICES, "steps": 3}, "would never be averaged")}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_take_effect_is_refused(name):
    options, message = WRONG[name]
    with pytest.raises(UsageError) as caught:
        TrainConfig(**options)
    assert message in str(caught.value)


def test_the_command_line_takes_the_options():
    options = ["--model", "support.pairs:small", "--replica", "2", "--diloco-every", "4", "--diloco-fragments", "2",
               "--diloco-overlap", "--no-diloco-nesterov", "--diloco-mix", "0.25", "--diloco-dtype", "bf16"]
    assert "--diloco-momentum 2.0" in refused("train", *options, "--diloco-momentum", "2")
    assert "no/such.txt: no such file" in refused("train", *options, "--data", "no/such.txt")


def test_the_log_has_the_mean_of_the_slices_and_sees_one_that_is_not_finite():
    metrics = {"loss": np.array([1.0, 3.0]), "grad_norm": np.array([1.0, 2.0]), "slice_bytes": 7.0}
    assert SlicePrograms.read(metrics) == {"loss": 2.0, "loss_min": 1.0, "loss_max": 3.0, "grad_norm": 1.5,
                                          "slice_bytes": 7.0, "stopped": False, "bad": False}
    assert SlicePrograms.read(metrics | {"grad_norm": np.array([1.0, np.inf])})["stopped"]
    assert not SlicePrograms.read(metrics | {"other": np.array([1.0, np.inf])})["stopped"]


def run(out, **changes):
    """(What a run said, its losses by step, the lines of its log)."""
    text = io.StringIO()
    train(dataclasses.replace(CONFIG, out=out, **changes), console=Console(file=text, width=200))
    return text.getvalue(), run_log.losses(out), run_log.rows(out)


def library_step(config):
    step = step_of(config, objective_of(config).choice, jax.devices())
    return zero_jax.make_diloco_step(step, every=4, fragments=2, overlap=True, momentum=0.5, dtype="bfloat16")


def library_loop(diloco, config, after=0, state=None):
    """(losses by step, the last state, the losses of evaluations by step)."""
    objective = objective_of(config)
    batches, held_out = objective.load_data().batches(diloco.step.batch_sharding)
    evaluator, losses, evaluations = diloco.step.evaluator(objective.sums), {}, {}
    state = diloco.init(jax.random.key(config.seed), batches[0]) if state is None else state
    for number in range(after + 1, config.steps + 1):
        state, metrics = diloco(state, batches[number - 1])
        losses[number] = float(np.asarray(metrics["loss"]).mean())
        if number % config.eval_every == 0:
            one = diloco.synchronous(state)
            checks = [batch for batch, _ in zip(held_out.once(), range(config.eval_batches), strict=False)]
            evaluations[number] = evaluate(lambda batch, one=one: evaluator(one, batch), checks)["loss"]
    return losses, state, evaluations


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(The folder of a run that nothing interrupted, what `run` returned)."""
    out = tmp_path_factory.mktemp("whole")
    return out, run(out)


def until_five(whole, tmp_path):
    """The folder as it was after step 5."""
    out = shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(out / "checkpoints/10")
    return out


@pytest.mark.slow
def test_a_run_is_the_librarys_loop_and_exports_the_outer_parameters(whole, tmp_path, monkeypatch):
    """Control: synchronous training is another run, and a slice's own parameters are others."""
    out, (said, losses, rows) = whole
    config = dataclasses.replace(CONFIG, out=tmp_path)
    diloco = library_step(config)
    wanted, state, evaluations = library_loop(diloco, config)
    assert losses == wanted and len(losses) == 10
    found = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert found == pytest.approx(evaluations, rel=1e-6) and found.keys() == {5, 10}
    # Each fragment is averaged once in 4 steps, beside the step after; nothing is sent in the others.
    sent = [row["slice_bytes"] for row in rows if "loss" in row]
    assert [value > 0 for value in sent] == [False, False, True, False, True, False, True, False, True, False]
    # XLA:CPU sends bfloat16 as float32, which the contract knows.
    assert (sent[2], sent[4]) == pytest.approx([diloco.fragment_bytes(number) for number in range(2)], abs=1)
    assert "2 slices of 4 devices" in said and "0 B in a step without an average" in said
    assert "Breaks its contract" not in said and "after step 6 of 10 not all" in said
    defaults = {name: getattr(TrainConfig, name) for name in vars(config) if name.startswith("diloco")}
    _, synchronous, _ = run(tmp_path / "sync", save_every=0, **defaults)
    assert not np.allclose(list(losses.values())[4:], list(synchronous.values())[4:], rtol=1e-4)

    (file,) = export_command(ExportConfig(str(out / "checkpoints"), tmp_path / "x.safetensors",
                                          model=config.model), devices=jax.devices()[:1])
    exported, params = safetensors_numpy.load_file(file), dict(named_leaves(diloco.params(state)))
    assert {name: np.array_equal(exported[name], params[name]) for name in params} == dict.fromkeys(exported, True)
    slice_params = dict(named_leaves(diloco.layout().load(state).params))
    assert not all(np.array_equal(exported[name], slice_params[name][0]) for name in exported)
    monkeypatch.setattr("zero_jax.cli.weights.saved_model.simulate_devices", lambda number: None)  # there are 8
    alone, one, _ = SavedModel(GenerateConfig(str(out), prompt=("a",), model=config.model)).loaded
    assert all(np.array_equal(leaf, params[name]) for name, leaf in named_leaves(alone.params(one)))


@pytest.mark.slow
def test_a_run_that_ended_early_goes_on_bit_for_bit(whole, tmp_path):
    out = until_five(whole, tmp_path)
    said, losses, _ = run(out, resume=True)
    assert losses == whole[1][1] and "Resumed after step 5 of 10" in said
    with pytest.raises(CheckpointError, match="diloco_momentum=0.5 saved but diloco_momentum=0.25 given"):
        run(out, resume=True, diloco_momentum=0.25)


@pytest.mark.slow
def test_a_run_goes_on_in_another_number_of_slices(whole, tmp_path):
    """As the library's `resized` does; control: two slices are another run."""
    out, config = until_five(whole, tmp_path), dataclasses.replace(CONFIG, replica=4, out=tmp_path / "four")
    four = library_step(config)
    batch = abstract_batch(objective_of(config).choice, 8, 8)
    four.layout(batch)
    with Checkpoints(out / "checkpoints", read_only=True) as checkpoints:
        saved = four.of_slices(2)
        state = four.resized(checkpoints.restore(saved, batch).state, saved)
    wanted, _, _ = library_loop(four, config, after=5, state=state)
    said, losses, _ = run(out, resume=True, replica=4)
    assert "2 slices were saved, and 4 go on; the new ones are copies" in said
    assert {number: losses[number] for number in range(6, 11)} == wanted
    assert losses[7] != whole[1][1][7]


@pytest.mark.slow
def test_a_slice_whose_loss_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(BadStepError, match="a lower grad_clip_norm than inf\\."):
        run(tmp_path, learning_rate=10.0, warmup=0.0, grad_clip_norm=float("inf"), weight_decay=10.0, steps=60,
            schedule="constant", save_every=0)


@pytest.mark.slow
def test_a_dry_run_tells_what_every_program_needs_and_sends(tmp_path):
    from zero_jax.cli.planning.plan_command import inspect_command

    text = io.StringIO()
    config = InspectConfig(**{**vars(CONFIG), "out": tmp_path})
    assert inspect_command(config, console=Console(file=text, width=200))
    said = text.getvalue()
    assert "0 B in a step without an average" in said and "Breaks its contract" not in said
    assert "A step with fragment 0:" in said and "A step with fragment 1:" in said
