"""`plan --search mesh`: published choices are found by formula, and what is printed was compiled and can be pasted."""

import dataclasses
import io
import itertools
import json
import types

import jax
import pytest
from rich.console import Console
from support.command_line import refused, run
from support.targets import mesh_of, target_devices

from zero_jax.cli.flags import read_flags
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.planning.mesh_search import (
    MeshSearch,
    changed,
    listed,
    mesh_table,
    search_mesh,
)
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.planning.ranking import decoder_of, left_open, ranked
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError
from zero_jax.planning.division import Division, Estimate

TINY = PlanConfig(model="gpt2:tiny", target="h100:8", batch_size=64, search="mesh")


def by_formula(config):
    """(The divisions of a search that fit, with their estimates, the fastest first; its model)."""
    target_devices(config.target)
    target, choice = config.check()
    model = decoder_of(choice.config, choice.config.num_params)
    found, _ = ranked(left_open(config, choice, target), model, target, target_devices(config.target),
                      batch=config.batch_size, length=config.seq_len, precision=config.precision)
    return found, choice


def best(count=10, **options):
    """The first of the list of a search."""
    config = PlanConfig(search="mesh", **options)
    found, choice = by_formula(config)
    return list(itertools.islice(listed(config, found, choice.config, config.batch_size), count))


def test_mpt_is_sharded_over_all_devices_and_not_split():
    """As llm-foundry trains 7B on 64 H100s. Control: split over a host it is slower, and below the first ten."""
    mpt = {"target": "h100:8x8", "model": "gpt2:6.7b", "vocab_size": 50304, "seq_len": 2048, "batch_size": 384}
    first, *others = best(**mpt)
    assert (first.division.stage, first.division.data, first.division.tensor) == (3, 64, 1)
    assert others[0].division.tensor == 1 and all(each.division.tensor < 8 for each in others)
    split = best(1, **mpt, tensor=8)[0]
    assert split.division.tensor == 8 and split.estimate.seconds > 1.05 * first.estimate.seconds


def test_the_papers_100b_on_400_v100s():
    """P_os+g with model parallelism 16 and 25 replicas of the model is what fits at stage 2.

    Control: stage 3, which the paper had not built yet, is first where it may be taken, without model parallelism: by
    compiled programs 25.6 s a step, and 33.6 of the paper's division.
    """
    paper = {"target": "v100-32gb:25x16", "model": "gpt2:100b", "vocab_size": 50304, "batch_size": 800}
    first = best(1, **paper, stage=2)[0].division
    assert (first.stage, first.tensor, first.data, first.replica) == (2, 16, 25, 1)
    other, divided = (best(1, **paper, remat="full", stage=stage)[0].estimate for stage in (3, 2))
    assert divided.seconds > 1.05 * other.seconds
    other = best(1, **paper)[0].division
    assert (other.stage, other.tensor, other.data) == (3, 1, 400)


def test_hpz_is_searched_and_is_an_option_of_train():
    """The copy is that of a node. Controls: with an hpZ that is given, that one; within one node, and on TPUs, none."""
    def sizes(**options):
        found, _ = by_formula(dataclasses.replace(TINY, **options))
        return {division.hpz for division, _ in found if division.tensor == division.context == 1}

    assert sizes(target="h100:2x8") == {1, 8} and sizes(target="h100:2x8", hpz=4) == {4}
    assert sizes(target="h100:8") == sizes(target="v5e:4x4") == {1}
    (only,) = listed(dataclasses.replace(TINY, target="h100:2x8"),
                     [(Division(data=16, hpz=8), Estimate(1.0, 0.1, 1e9))], types.SimpleNamespace(remat=False), 64)
    assert changed(TINY, only)["hpz"] == 8
    trained = read_flags("train", TrainConfig, ["--hpz", "4", "--model", "gpt2:tiny"])
    for config, axes in ((trained, ("data_1",)), (dataclasses.replace(trained, hpz=1), ())):
        step = step_of(config, find_model(config.model), jax.devices())
        assert step.options.hpz_axes == axes and step.mesh.shape.get("data_1", 1) == (4 if axes else 1)


@pytest.mark.slow
def test_llama_405b_is_split_within_a_host():
    """8 within a node, and data parallel over the rest, is among the first ten.

    Control: with 8 times the batch, and blocks recomputed, the same model need not be split so far.
    """
    llama = {"target": "h100:2048x8", "model": "llama:3.1-405b", "seq_len": 8192}
    divided = [each.division for each in best(**llama, batch_size=2048)]
    assert divided[0].tensor == 8 and (3, 8, 2048, 1) in {
        (each.stage, each.tensor, each.data, each.replica) for each in divided}
    assert best(1, **llama, batch_size=16384, remat="full")[0].division.tensor < 8


def estimated(seconds, **fields):
    return Division(data=8, **fields), Estimate(seconds, 0.1, 1e9)


def test_what_does_not_go_together_is_left_out():
    """By the table of combinations. Controls: without the option that it refuses; of each kind the first is taken."""
    refused = estimated(1.0, stage=2, quantize_weights="int8", offload="parameters")
    slower = estimated(2.0, stage=2)
    found = list(listed(TINY, [refused, slower, estimated(3.0, stage=2, remat="full"), estimated(4.0)],
                        types.SimpleNamespace(remat=False), 64))
    assert [each.estimate.seconds for each in found] == [2.0, 4.0]
    assert found[0].config.search == "no" and found[0].config.batch_size == 64


def test_what_is_given_is_kept():
    """Controls: left open, other sizes are among the divisions; and remat of the model's own is searched."""
    def values(field, **options):
        return {getattr(division, field) for division, _ in by_formula(dataclasses.replace(TINY, **options))[0]}

    assert values("tensor", tensor=2) == {2} and values("tensor") == {1, 2, 4}
    assert values("remat", remat="full") == {"full"} and values("remat") == {"no", "dots", "full"}


def searched(needs):
    """A search whose plans are formulas; needs: (bytes, seconds) of each in turn."""
    target, choice = TINY.check()
    target_devices(TINY.target)
    layout = types.SimpleNamespace(num_params=choice.config.num_params, mesh=mesh_of(TINY.target), placements=lambda: [
        types.SimpleNamespace(name="opt_state/mu", bytes=8 * choice.config.num_params)])
    seen, left = [], iter(needs)

    def plan_of(config):
        seen.append(config)
        needed, seconds = next(left)
        if seconds is None:
            raise UsageError("does not divide")
        return types.SimpleNamespace(needed_bytes=needed, fits=needed <= 100, timing=types.SimpleNamespace(
            seconds=seconds, exposed_seconds={"nvlink": 0.25}))

    found = search_mesh(TINY, layout, choice, target, batch=64, length=64, plan_of=plan_of,
                        on_plan=lambda name, plan: None)
    return found, seen


def test_the_best_that_was_compiled_and_fits_is_taken():
    """Controls: what is faster and does not fit, what cannot be built, and three that fit end it."""
    found, seen = searched([(200, 0.1), (0, None), (90, 3.0), (90, 1.0), (90, 2.0)])
    assert len(seen) == 5 and len(found.candidates) == 10 and found.best is found.candidates[3]
    console = Console(width=100, file=io.StringIO())
    console.print(mesh_table(TINY, found), *found.lines(TINY.check()[0]), sep="\n")
    assert "250 ms" in console.file.getvalue() and "does not fit" in console.file.getvalue()
    nothing, seen = searched([(200, 1.0)] * 6)
    assert nothing.best is None and len(seen) == 6
    assert nothing.lines(TINY.check()[0]) == ["None of those that were compiled fits."]
    assert MeshSearch((), 3, 0).lines(TINY.check()[0])[0].startswith("Nothing fits h100:8 by formula")


@pytest.mark.parametrize(("options", "said"), [
    ("--search mesh --model resnet:tiny", "takes no sequences"),
    ("--search mesh --batch-size 8 --batch-per-device 2", "both say how large the batch is"),
    ("--search fit --batch-size 8", "which varies sizes"),
    ("--batch-size 9", "does not divide over 8 groups"),
    ("--target h100:2x8 --hpz 16", "--hpz 16: 16 devices shard"),
    ("--target h100:2x8 --hpz 3", "give a divisor"),
    ("--target h100:2x8 --hpz 8 --mesh 2 8", "has the axes already"),
    ("--target h100:2x8 --hpz 8 --stage 2", "parameters are whole on every device all the time")])
def test_bad_input_is_a_line(options, said):
    target_devices("h100:2x8" if "2x8" in options else "h100:8")
    assert said in refused("plan", "--target", "h100:8", "--model", "gpt2:tiny", *options.split())


@pytest.mark.slow
def test_a_search_as_printed():
    """Its command is one of `train`, with the batch that was asked for; as JSON the same candidates."""
    target_devices("h100:8")
    command = ("plan", "--target", "h100:8", "--model", "gpt2:tiny", "--batch-size", "64", "--search", "mesh")
    done = run(*command)
    assert done.returncode == 0 and "divisions by formula" in done.stdout, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("To train it: ")]
    trained = read_flags("train", TrainConfig, line.removeprefix("To train it: zero-jax train ").split(" "))
    assert trained.batch_size == 64 and trained.precision == "bf16"
    rows = json.loads(run(*command, "--json").stdout)["divisions"]
    assert len(rows) == 10 and sum(row["compiled"] is not None for row in rows) == 3
    assert all(row["compiled"]["fits"] for row in rows[:3])


def test_changes_are_named_by_the_flags():
    _, choice = TINY.check()
    (only,) = listed(TINY, [estimated(1.0, stage=2, accumulate=2, reduce="once")], choice.config, 64)
    assert changed(TINY, only) == {"stage": 2, "accumulate": 2, "gather": "use", "reduce": "once"}
    (plain,) = listed(TINY, [estimated(1.0)], choice.config, 64)
    assert changed(TINY, plain) == {}
