"""Plans: what they say is what the compiler says, and what is there when the step runs."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_contract import described

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax import plan_report, report
from zero_jax.planner import examine, plan, refused_bytes
from zero_jax.search import deepest, largest, search
from zero_jax.stages import STAGES
from zero_jax.targets import target_of

CONFIG = gpt2.Config(2, 256, 4, vocab_size=1024, max_length=64)


def tokens(devices, per_device=1, length=64):
    shape = (devices * per_device, length)
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}


def planned(target, stage, config=CONFIG, per_device=1, **options):
    described(target)
    target = target_of(target)
    return plan(gpt2.build(config), stage, target, tokens(target.num_devices, per_device), precision="bf16", **options)


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])
def test_a_plan_is_what_the_compiler_says(target):
    made = planned(target, 3)
    step = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3, mesh=described(target), precision="bf16")
    memory = step.compile(tokens(8)).memory_analysis()
    assert made.needed_bytes == (memory.argument_size_in_bytes + memory.output_size_in_bytes
                                 - memory.alias_size_in_bytes + memory.temp_size_in_bytes
                                 + memory.generated_code_size_in_bytes)
    assert made.fits and made.free_bytes > 0 and not made.advice and not made.refused
    assert not made.wire.violations and made.wire.wire_bytes == pytest.approx(sum(made.links.values()))
    assert {link for link, _ in made.links} == {"nvlink" if target == "h100:8" else "ici"}
    assert made.timing.seconds > 0 and 0 < made.timing.mfu <= made.timing.hfu < 1


def state_error(target, stage, config, **options):
    """Compiled state bytes over the formula's, less one."""
    made = planned(target, stage, config, **options)
    memory = zero_jax.make_zero_train_step(
        gpt2.build(config), stage, mesh=made.layout.mesh, precision="bf16").compile(
            tokens(made.num_devices)).memory_analysis()
    batch = 2 * 64 * 4
    formula = STAGES[stage].state_bytes(config.num_params, made.num_devices, low_precision=True)
    return abs((memory.argument_size_in_bytes - batch) / formula - 1)


@pytest.mark.parametrize("target", ["h100:8", "h100:8x8"])
def test_state_is_the_formula(target):
    assert state_error(target, 3, gpt2.Config(1, 1024, 4, vocab_size=1024, max_length=64)) < 1e-3


WIDE = gpt2.Config(1, 25600, 200, vocab_size=51200, max_length=6400)  # divides by 400 and by 1024


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("target", ["h100:8", "h100:8x8", "v100-32gb:25x16", "h100:128x8"])
def test_state_is_the_formula_at_every_size(target, stage):
    chip = target_of(target).chip
    big = dataclasses.replace(chip, memory_bytes=10**13)  # so that stage 0 is compiled, too
    described(target)
    made = plan(gpt2.build(WIDE), stage, dataclasses.replace(target_of(target), chip=big),
                tokens(target_of(target).num_devices), precision="bf16")
    formula = STAGES[stage].state_bytes(WIDE.num_params, made.num_devices, low_precision=True)
    placed = sum(row.placed or 0 for row in made.memory.rows if row.name in STATE_ROWS)
    compiled = sum(row.compiled or 0 for row in made.memory.rows if row.name in STATE_ROWS)
    assert abs(placed / formula - 1) < 1e-3 and abs(compiled / formula - 1) < 1e-3


STATE_ROWS = ("parameters", "weights", "master", "momentum", "variance")


@pytest.mark.parametrize("build", [gpt2.build, gpt2_nnx.build], ids=["linen", "nnx"])
def test_planned_is_what_live_devices_hold(build):
    step = zero_jax.make_zero_train_step(build(CONFIG), 3, precision="bf16")
    batch = {name: np.zeros((8, 64), np.int32) for name in ("inputs", "targets")}
    made = examine(step, batch)
    state = step.init(jax.random.key(0), batch)
    arrays = [*jax.tree.leaves(state), *jax.tree.leaves(jax.device_put(batch, step.batch_sharding))]
    arrays = [jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in arrays]
    held = sum(shard.data.nbytes for a in arrays for shard in a.addressable_shards if shard.device.id == 0)
    assert step.compile(batch).memory_analysis().argument_size_in_bytes == held
    assert made.layout.device_bytes == held - 2 * 64 * 4
    assert made.fits and made.memory_bytes is None and made.timing is None and not made.links
    assert not made.wire.violations


def test_what_the_compiler_refuses_is_still_answered():
    """v5e holds 15.75 GiB: with this batch XLA:TPU says how much it wants, and the plan what that is."""
    config = gpt2.Config(2, 2048, 16, vocab_size=50304, max_length=1024)
    described("v5e:2x4")
    made = plan(gpt2.build(config), 3, "v5e:2x4", tokens(8, per_device=32, length=1024), precision="bf16")
    assert not made.fits and made.refused.startswith("RESOURCE_EXHAUSTED")
    assert made.needed_bytes > made.memory_bytes > made.layout.device_bytes
    assert made.memory is None and any("smaller batch" in line for line in made.advice)
    assert "too much" in plan_report.verdict(made)
    fitting = plan(gpt2.build(config), 3, "v5e:2x4", tokens(8, length=1024), precision="bf16")
    assert fitting.fits  # and the same model with a smaller batch does


def test_a_state_that_cannot_fit_is_not_compiled():
    made = planned("v5e:2x4", 0, dataclasses.replace(gpt2.PRESETS["8b"], max_length=64))
    assert "state alone" in made.refused and made.compile_seconds < 30
    assert any(line.startswith("stage 3") for line in made.advice)


def test_a_width_that_does_not_divide_is_told():
    described("h100:8")
    config = gpt2.Config(2, 36, 2, vocab_size=97, max_length=64)
    made = plan(gpt2.build(config), 3, "h100:8x8", tokens(64), optimizer=optax.adafactor(min_dim_size_to_factor=8))
    small = dataclasses.replace(made, memory_bytes=1)  # matrices that the optimizer needs as such are padded
    assert not small.fits and any(line.startswith("a mesh of several axes, such as 16 x 4") for line in small.advice)
    merged = dataclasses.replace(small, layout=plan(gpt2.build(config), 3, "h100:8x8", tokens(64)).layout)
    assert not any("several axes" in line for line in merged.advice)


def test_refused_bytes():
    assert refused_bytes("total memory required for HLO temporaries (2.00G) exceeds available HBM (1.00G).") == 2**31
    assert refused_bytes("RESOURCE_EXHAUSTED: something else") == 0


@pytest.mark.parametrize(("target", "mesh", "examples", "words"), [
    ("h100:9x9", -1, 8, "at most 8 GPUs"), ("h10:8", -1, 8, "nearest is 'h100:8'"),
    ("h100:8", (4, 4), 8, "needs 16 devices"), ("h100:8", 4, 8, "of 4 devices"), ("h100:8", -1, 12, "12"),
])
def test_bad_input(target, mesh, examples, words):
    described("h100:8")
    batch = {name: jax.ShapeDtypeStruct((examples, 64), jnp.int32) for name in ("inputs", "targets")}
    with pytest.raises(ValueError, match=words):
        plan(gpt2.build(CONFIG), 3, target, batch, mesh=mesh)


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

    @property
    def fits(self):
        return self.needed_bytes <= self.memory_bytes


def test_search_takes_the_smallest_stage_the_largest_batch_and_the_least_remat(monkeypatch):
    def fake(model, stage, target, size, **options):
        return Fake(stage, {0: 120, 1: 90, 2: 60, 3: 20}[stage] + model * size)

    monkeypatch.setattr("zero_jax.search.plan", fake)
    tight = search({"none": 4.0, "blocks": 0.5}, None, lambda size: size)
    assert (tight.plan.stage, tight.size, tight.model) == (1, 20, "blocks")  # "none" fits with 2 examples alone
    loose = search({"none": 0.5001, "blocks": 0.5}, None, lambda size: size, largest_batch=19)
    assert (loose.plan.stage, loose.size, loose.model) == (1, 19, "none")
    assert search({"none": 1000.0}, None, lambda size: size).plan is None
    deep = deepest(lambda layers: layers * 0.25, 2, None, 8)
    assert (deep.size, deep.plan.needed_bytes) == (20, 100)


def test_tables_json_and_figure(tmp_path, capsys):
    made = planned("h100:8", 3)
    report.make_console().print(plan_report.plan_tables(made))
    text = capsys.readouterr().out
    for words in ("Fits", "parameters gathered", "nvlink", "MFU", "activations"):
        assert words in text
    row = json.loads(json.dumps(plan_report.finite(plan_report.plan_json(made))))
    assert row["fits"] and row["wire"]["sent"] == made.wire.wire_bytes
    assert sum(c["wire_bytes"] * c["count"] for kind in row["wire"]["purposes"] for c in kind["collectives"]) == (
        pytest.approx(made.wire.wire_bytes))
    plan_report.draw_stages(tmp_path / "stages.png", [planned("h100:8", stage) for stage in (0, 3)], "memory")
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")
    held = plan_report.held(made)
    assert sum(held.values()) == pytest.approx(made.needed_bytes)
