"""Plans: what they say is what the compiler says, and what is there when the step runs."""

import dataclasses
import functools
import io
import itertools
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console
from support.oracle import slow
from support.programs import ADAMW, SMALL, program
from support.targets import mesh_of, target_devices

import zero_jax
from models import gpt2, gpt2_nnx, llama
from zero_jax.cli.planning import plan_command, plan_report
from zero_jax.cli.planning.plan_config import PlanConfig
from zero_jax.cli.reports import report
from zero_jax.cli.train_config import TrainConfig
from zero_jax.errors import UsageError
from zero_jax.planning.memory import Transformer, model_states
from zero_jax.planning.plan import examine, plan, refused_bytes
from zero_jax.planning.search import deepest, largest, search
from zero_jax.stages import STAGES
from zero_jax.step.attention import attention
from zero_jax.xla.targets import target_of

LENGTH = SMALL.max_length


def tokens(devices, per_device=1, length=LENGTH):
    shape = (devices * per_device, length)
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}


@functools.cache
def planned(target, stage, config=SMALL):
    target_devices(target)
    target = target_of(target)
    return plan(gpt2.build(config), stage, target, tokens(target.num_devices), precision="bf16", optimizer=ADAMW)


@pytest.mark.parametrize("target", ["h100:8", slow("v5e:2x4")])
def test_a_plan_is_what_the_compiler_says(target):
    """In the same step, compiled apart from the plan."""
    result, memory = planned(target, 3), program(f"{target.partition(':')[0]} stage 3").memory
    assert result.needed_bytes == (memory.argument_size_in_bytes + memory.output_size_in_bytes
                                 - memory.alias_size_in_bytes + memory.temp_size_in_bytes
                                 + memory.generated_code_size_in_bytes)
    assert result.fits and result.free_bytes > 0 and not result.advice and not result.refused
    report = result.communication
    assert not report.violations and report.communication_bytes == pytest.approx(sum(result.links.values()))
    assert {link for link, _ in result.links} == {"nvlink" if target == "h100:8" else "ici"}
    assert result.timing.seconds > 0 and 0 < result.timing.mfu <= result.timing.hfu < 1


EVEN = gpt2.Config(1, 1024, 4, vocab_size=1024, max_length=64)  # divides by 64


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:8", "h100:8x8"])
def test_state_is_the_formula(target):
    """Compiled: all the program's arguments but the batch."""
    result = planned(target, 3, EVEN)
    arguments = sum(row.compiled or 0 for row in result.memory.rows if row.name in (*STATE_ROWS, "other state"))
    formula = STAGES[3].state_bytes(EVEN.num_params, result.num_devices, low_precision=True)
    assert abs(arguments / formula - 1) < 1e-3


WIDE = gpt2.Config(1, 25600, 200, vocab_size=51200, max_length=6400)  # divides by 400 and by 1024


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("target", ["h100:8", "h100:8x8", "v100-32gb:25x16", "h100:128x8"])
def test_state_is_the_formula_at_every_size(target, stage):
    chip = target_of(target).chip
    big = dataclasses.replace(chip, memory_bytes=10**13)  # so that stage 0 is compiled, too
    target_devices(target)
    result = plan(gpt2.build(WIDE), stage, dataclasses.replace(target_of(target), chip=big),
                tokens(target_of(target).num_devices), precision="bf16")
    formula = STAGES[stage].state_bytes(WIDE.num_params, result.num_devices, low_precision=True)
    placed = sum(row.placed or 0 for row in result.memory.rows if row.name in STATE_ROWS)
    compiled = sum(row.compiled or 0 for row in result.memory.rows if row.name in STATE_ROWS)
    assert abs(placed / formula - 1) < 1e-3 and abs(compiled / formula - 1) < 1e-3


STATE_ROWS = ("parameters", "weights", "master", "momentum", "variance")


@pytest.mark.parametrize("build", [gpt2.build, pytest.param(gpt2_nnx.build, marks=pytest.mark.slow)],
                         ids=["linen", "nnx"])
def test_planned_is_what_live_devices_hold(build):
    step = zero_jax.make_zero_train_step(build(SMALL), 3, precision="bf16")
    batch = {name: np.zeros((8, LENGTH), np.int32) for name in ("inputs", "targets")}
    result = examine(step, batch)
    state = step.init(jax.random.key(0), batch)
    arrays = [*jax.tree.leaves(state), *jax.tree.leaves(jax.device_put(batch, step.batch_sharding))]
    arrays = [jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in arrays]
    resident = sum(shard.data.nbytes for a in arrays for shard in a.addressable_shards if shard.device.id == 0)
    assert step.compile(batch).memory_analysis().argument_size_in_bytes == resident
    assert result.layout.device_bytes == resident - 2 * LENGTH * 4
    assert result.fits and result.memory_bytes is None and result.timing is None and not result.links
    assert not result.communication.violations


LOGITS = gpt2.Config(1, 256, 4, vocab_size=50304, max_length=1024)


def test_what_the_compiler_refuses_is_still_answered():
    """v5e holds 15.75 GiB: with this batch XLA:TPU says how much it wants, and the plan what that is."""
    target_devices("v5e:2x4")
    result = plan(gpt2.build(LOGITS), 3, "v5e:2x4", tokens(8, per_device=128, length=1024), precision="bf16")
    assert not result.fits and result.refused.startswith("RESOURCE_EXHAUSTED")
    assert result.needed_bytes > result.memory_bytes > result.layout.device_bytes
    assert result.memory is None and any("smaller batch" in line for line in result.advice)
    assert "too much" in plan_report.verdict(result)


@pytest.mark.slow
def test_the_same_model_with_a_smaller_batch_fits():
    target_devices("v5e:2x4")
    assert plan(gpt2.build(LOGITS), 3, "v5e:2x4", tokens(8, length=1024), precision="bf16").fits


def test_a_state_that_cannot_fit_is_not_compiled():
    result = planned("v5e:2x4", 0, dataclasses.replace(gpt2.PRESETS["8b"], max_length=64))
    assert "state alone" in result.refused and result.compile_seconds < 30
    assert any(line.startswith("stage 3") for line in result.advice)


@pytest.mark.slow
def test_a_width_that_does_not_divide_is_told():
    result = planned("h100:8x8", 3, EVEN)
    config = gpt2.Config(2, 36, 2, vocab_size=97, max_length=64)

    def layout(**options):
        return zero_jax.make_zero_train_step(
            gpt2.build(config), 3, mesh=result.layout.mesh, **options).layout(tokens(64))

    # Matrices that the optimizer needs as such are padded.
    small = dataclasses.replace(
        result, memory_bytes=1, layout=layout(optimizer=optax.adafactor(min_dim_size_to_factor=8)))
    assert not small.fits and any(line.startswith("a mesh of several axes, such as 16 x 4") for line in small.advice)
    merged = dataclasses.replace(small, layout=layout())
    assert not any("several axes" in line for line in merged.advice)


def test_refused_bytes():
    assert refused_bytes("total memory required for HLO temporaries (2.00G) exceeds available HBM (1.00G).") == 2**31
    assert refused_bytes("RESOURCE_EXHAUSTED: something else") == 0


@pytest.mark.parametrize(("target", "mesh", "examples", "words"), [
    ("h100:9x9", -1, 8, "at most 8 GPUs"), ("h10:8", -1, 8, "nearest is 'h100:8'"),
    ("h100:8", (4, 4), 8, "needs 16 devices"), ("h100:8", 4, 8, "of 4 devices"), ("h100:8", -1, 12, "12"),
])
def test_bad_input(target, mesh, examples, words):
    target_devices("h100:8")
    batch = {name: jax.ShapeDtypeStruct((examples, 64), jnp.int32) for name in ("inputs", "targets")}
    with pytest.raises(ValueError, match=words):
        plan(gpt2.build(SMALL), 3, target, batch, mesh=mesh)


@pytest.mark.parametrize(("fixed", "each", "limit"), [
    (0.3, 0.01, 100_000), (0.5, 0.0025, 1024), (2, 1, 100), (0.1, 1e-5, 1024), (0.2, 0.4, 50)])
def test_the_largest_is_found_in_few_tries(fixed, each, limit):
    tried = []

    def share(n):
        tried.append(n)
        return fixed + each * n

    expected = max((n for n in range(1, limit + 1) if fixed + each * n <= 1), default=0)
    assert largest(share, limit) == expected
    assert len(tried) == len(set(tried)) <= 6
    tried.clear()

    def bent(n):  # flat, then steep, then too large to tell
        tried.append(n)
        return math.inf if n > 800 else max(0.25, n / 350)

    assert largest(bent, limit) == min(limit, 350) and len(tried) <= 3 * math.log2(limit)
    for early, late in ((0.0031, 0.007), (1e-7, 0.01)):  # grows faster from 2 on, as was seen of temporaries
        tried.clear()

        def faster(n, early=early, late=late):
            tried.append(n)
            return 0.09 + early * min(n, 2) + late * max(0, n - 2)

        expected = 2 + int((0.91 - 2 * early) / late)
        # Guesses by the two nearest alone took 9 and 38 tries, and the limit was one of them.
        assert largest(faster, 1 << 16) == expected and len(tried) <= 6 and max(tried) < 1000
    bumpy = largest(lambda n: 0.2 + 0.013 * n + 0.002 * math.sin(n), 1000)
    assert 0.2 + 0.013 * bumpy + 0.002 * math.sin(bumpy) <= 1 < 0.2 + 0.013 * (bumpy + 1) + 0.002 * math.sin(bumpy + 1)


@dataclasses.dataclass(frozen=True)
class Fake:
    """A plan whose memory is a formula: what a search sees of one."""

    stage: int
    needed_bytes: float
    refused: str = ""
    target: str = "fake"
    memory_bytes: float = 100.0
    rate: float = 0.0

    @property
    def timing(self):
        return types.SimpleNamespace(tokens_per_second=self.rate)

    @property
    def fits(self):
        return self.needed_bytes <= self.memory_bytes


def searched(monkeypatch, rate, models, **options):
    """A search over formulas: needed is 120, 90, 60, 20 by stage and model x size; rate: of stage, model and size."""
    def fake(model, stage, target, size, **options):
        return Fake(stage, {0: 120, 1: 90, 2: 60, 3: 20}[stage] + model * size, rate=rate(stage, model, size))

    monkeypatch.setattr("zero_jax.planning.search.plan", fake)
    return search(models, None, lambda size: size, **options)


@pytest.mark.parametrize(("rate", "expected"), [
    (lambda stage, model, size: size, (3, 160, "blocks")),  # grows with the batch: the largest of all
    (lambda stage, model, size: size * (20 if model == 4 else 1), (3, 20, "none")),  # recomputation is that slow
    (lambda stage, model, size: size / (100 if stage == 3 else 1), (2, 80, "blocks")),  # stage 3 is
    (lambda stage, model, size: -size, (1, 1, "blocks")),  # falls with the batch, as where XLA recomputes
    (lambda stage, model, size: 7, (1, 1, "blocks"))])  # as fast: the one that was tried first
def test_search_takes_what_fits_with_most_tokens_per_second(monkeypatch, rate, expected):
    """The memory is the same in all rows, and the answers differ by the speed alone.

    Control: where the speed grows with the batch, what does not fit is faster, and is not the answer.
    """
    found = searched(monkeypatch, rate, {"none": 4.0, "blocks": 0.5})
    assert (found.plan.stage, found.size, found.model) == expected
    fitting = [each for each in found.tried if each.fits]
    assert found.plan in fitting and found.plan.rate == max(each.rate for each in fitting)
    if expected == (3, 160, "blocks"):
        assert max(each.rate for each in found.tried) > found.plan.rate
    for stage in {each.stage for each in fitting}:
        base, none, blocks = {1: (90, 2, 20), 2: (60, 10, 80), 3: (20, 20, 160)}[stage]  # the largest, by hand
        assert {base + 4.0 * none, base + 0.5 * blocks} <= {each.needed_bytes for each in fitting}


def test_a_search_ends_where_all_fits_or_a_stage_is_no_faster(monkeypatch):
    """Control: where each stage is faster than the one before it, all are tried."""
    loose = searched(monkeypatch, lambda stage, model, size: size, {"none": 0.5001, "blocks": 0.5}, largest_batch=19)
    assert (loose.plan.stage, loose.size, loose.model) == (1, 19, "blocks") and loose.size == loose.limit
    assert {each.stage for each in loose.tried} == {0, 1}, "later stages can do no more"
    for rate, stages in ((lambda stage, model, size: 7, {0, 1, 2}), (lambda stage, model, size: size, {0, 1, 2, 3})):
        assert {each.stage for each in searched(monkeypatch, rate, {"blocks": 0.5}).tried} == stages
    assert searched(monkeypatch, lambda stage, model, size: size, {"none": 1000.0}).plan is None
    deep = deepest(lambda layers: layers * 0.25, 2, None, 8)
    assert (deep.size, deep.plan.needed_bytes) == (20, 100)


def test_a_search_shows_the_speed_of_each_that_was_tried(monkeypatch):
    """Control: without a predicted time its cell is empty."""
    found = searched(monkeypatch, lambda stage, model, size: 1000 * size, {"blocks": 0.5})
    found = dataclasses.replace(found, tried=tuple(
        types.SimpleNamespace(**dataclasses.asdict(each), fits=each.fits, timing=each.timing, batch_size=8,
                              compile_seconds=1) for each in found.tried))
    console = Console(width=100, file=io.StringIO())
    console.print(plan_report.search_table(found))
    assert "tokens/s" in console.file.getvalue() and "160,000" in console.file.getvalue()
    for each in found.tried:
        each.timing = None
    silent = Console(width=100, file=io.StringIO())
    silent.print(plan_report.search_table(found))
    assert "160,000" not in silent.file.getvalue()


@pytest.mark.slow
def test_palms_formula_is_not_given_where_parameters_are_frozen():
    """It counts the products that make the gradients of all parameters. Control: nothing is frozen."""
    target = target_of("h100:8")

    def palm_mfu(**options):
        sizes = Transformer(layers=2, hidden=256, heads=4, batch=1, length=64)
        return plan(gpt2.build(SMALL), 3, target, tokens(8), transformer=sizes, **options).timing.palm_mfu

    assert palm_mfu() > 0 and palm_mfu(frozen=("blocks",)) is None


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, {"batch": 2, "length": 64, "remat": False}),
    ({"tensor": 2}, {"batch": 4}),  # devices that share sequences
    ({"context": 2}, {"batch": 4, "length": 32}),
    ({"accumulate": 2}, {"batch": 1}),
    ({"remat": "full"}, {"remat": True}),
    ({"remat": "yes", "tensor": 2, "partition_activations": "yes"}, {"batch": 4, "remat": True, "split": 2}),
])
def test_inspect_and_plan_take_the_same_formula_of_activations(options, wanted, monkeypatch):
    """A dry run of 16 sequences on 8 devices, and `plan` of as many."""
    taken = []

    def examine_nothing(step, batch, target, transformer, **_):
        taken.append(transformer)
        raise UsageError("compiled elsewhere")

    monkeypatch.setattr(plan_command, "examine", examine_nothing)
    groups = 8 // options.get("tensor", 1) // options.get("context", 1)
    for command, config in (
            (plan_command.inspect_command, TrainConfig(
                model="gpt2:tiny", batch_size=16, seq_len=64, target="h100:8", dry_run=True, **options)),
            (plan_command.plan_command, PlanConfig(
                model="gpt2:tiny", batch_per_device=16 // groups, seq_len=64, target="h100:8", **options))):
        with pytest.raises(UsageError, match="compiled elsewhere"):
            command(config, console=Console(file=io.StringIO()))
    assert taken[0] == taken[1]
    assert {name: getattr(taken[0], name) for name in wanted} == wanted


def test_tables_json_and_figure(tmp_path, capsys):
    result = planned("h100:8", 3)
    report.make_console().print(plan_report.plan_tables(result))
    text = capsys.readouterr().out
    for words in ("Fits", "parameters gathered", "nvlink", "launches", "MFU", "activations"):
        assert words in text
    low, high = (each * result.timing.seconds for each in result.target.chip.rates.band)
    assert f"{low:.3g} to {high:.3g}" in text and "not compared" not in text
    row = json.loads(json.dumps(plan_report.finite(plan_report.plan_json(result))))
    assert row["timing"]["band"] == [low, high]
    assert row["fits"] and row["communication"]["sent"] == result.communication.communication_bytes
    sent = [c["communication_bytes"] * c["count"] for kind in row["communication"]["purposes"]
            for c in kind["collectives"]]
    assert sum(sent) == pytest.approx(result.communication.communication_bytes)
    assert "ms exposed" in text and "asynchronous" not in text
    for kind, seconds in (("seconds", result.timing.communication_seconds),
                          ("exposed_seconds", result.timing.exposed_seconds)):  # by purpose as much as by link
        assert sum(each[kind] for each in row["communication"]["purposes"]) == pytest.approx(sum(seconds.values()))
    plan_report.draw_stages(tmp_path / "stages.png", result.layout, result.memory_bytes, "memory")
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16-stochastic"])
def test_model_states_of_every_stage_are_those_of_its_layout(precision):
    """By formula from the layout of any other, as Figure 1 has them. Control: as if nothing were sharded."""
    mesh, batch = mesh_of("h100:8"), tokens(8, length=16)
    model = gpt2.build(gpt2.Config(2, 256, 4, vocab_size=512, max_length=16))
    layouts = [zero_jax.make_zero_train_step(
        model, stage, mesh=mesh, precision=precision, optimizer=ADAMW).layout(batch) for stage in range(4)]
    params = layouts[0].num_params
    for layout, other in itertools.product(layouts, layouts[::3]):
        stage = layout.stage.number
        states = model_states(other, stage)
        gradients = states.pop("gradients")
        assert sum(states.values()) == pytest.approx(layout.device_bytes, rel=0.02)
        assert gradients == params * (4 if precision == "fp32" else 2) / (8 if stage >= 2 else 1)
        whole = sum(model_states(other, 0).values()) - params * (4 if precision == "fp32" else 2)
        assert not stage or whole > 1.5 * layout.device_bytes


@pytest.mark.slow
def test_attention_by_a_kernel_of_pallas_is_counted():
    """Control: the same without the scopes by which it is known."""
    config = llama.Config(2, 128, 4, 2, 256, 128, vocab_size=256, max_length=512)
    mesh = mesh_of("v5e:2x4")

    def timing(length):
        model = llama.build(dataclasses.replace(config, attention=attention(mesh)))
        return plan(model, 3, target_of("v5e:2x4"), tokens(8, length=length), precision="bf16", optimizer=ADAMW).timing

    assert not timing(512).uncounted
    with pytest.MonkeyPatch.context() as patch:  # another length: JAX's cache knows a program without its scopes
        patch.setattr("zero_jax.views.local.scope_of", lambda eqn: "")
        assert timing(384).uncounted
