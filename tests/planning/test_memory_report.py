"""Where all the memory goes: by formula, as placed, as compiled."""

import dataclasses
import functools
import io
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console
from support.covering import weekly
from support.programs import DEEP, PROGRAMS, program

import zero_jax
from models import gpt2
from zero_jax.cli.reports.report import largest_table, memory_table
from zero_jax.planning import formulas
from zero_jax.planning.memory import MemoryReport, Transformer, formula_bytes, memory_report
from zero_jax.planning.temporaries import LiveTemporaries
from zero_jax.stages import STAGES
from zero_jax.xla import liveness as buffers

GB = 1e9
TEMPORARIES = ("gradients", "activations", "gathered weights", "temporary buffers", "fragmentation")
STATE = ("parameters", "master", "momentum", "variance")
COMPILED = {(1, "bf16"), (3, "fp32")}  # tests/test_memory.py has the arguments of them all
SMALL = gpt2.Config(2, 64, 2, vocab_size=64, max_length=16)
GATHERED_LAYER = 2 * 12 * DEEP.width**2  # bfloat16
ACTIVE = "h100 stage 3, 8 layers of 64 tokens"


def tokens(batch, length):
    return {name: jax.ShapeDtypeStruct((batch, length), jnp.int32) for name in ("inputs", "targets")}


@functools.cache
def report_of(name):
    """The memory report of a row of the matrix."""
    step, batch = PROGRAMS[name].make()
    return memory_report(step.layout(batch), program(name))


def compiled_bytes(row, name):
    return report_of(name)[row].compiled


def total(report, names, column):
    return sum(getattr(row, column) or 0 for row in report.rows if row.name in names)


@weekly("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", range(4))
def test_state_is_the_same_by_formula_as_placed_and_as_compiled(stage, precision):
    step = zero_jax.make_zero_train_step(
        gpt2.build(SMALL), stage, mesh=zero_jax.make_mesh(8), precision=precision)
    compiled = step.compiled_step(tokens(8, 16)) if (stage, precision) in COMPILED else None
    report = memory_report(step.layout(tokens(8, 16)), compiled)
    formula = STAGES[stage].state_bytes(SMALL.num_params, 8, low_precision=precision == "bf16")
    assert total(report, STATE, "formula") == total(report, STATE, "placed") == formula
    for row in report.rows:
        if row.name in STATE and row.placed is not None:
            assert row.formula == row.placed and not row.note
            assert compiled is None or row.compiled == row.placed
    if compiled is not None:
        memory = compiled.memory
        assert report["batch"].compiled == 2 * 16 * 4 and report["padding"].compiled == 0
        assert report["other state"].compiled == report["other state"].placed
        assert report.state.compiled == memory.argument_size_in_bytes
        assert report.temporaries.compiled == memory.temp_size_in_bytes


@pytest.mark.parametrize("offload, away", [("optimizer", ("master", "momentum")), ("parameters", ("parameters",))])
def test_what_is_in_host_memory_counts_there_and_is_told(offload, away):
    step = zero_jax.make_zero_train_step(
        gpt2.build(SMALL), 3, mesh=zero_jax.make_mesh(8), precision="bf16", offload=offload)
    layout = step.layout(tokens(8, 16))
    report = memory_report(layout)
    assert report["host memory"].placed == layout.host_bytes > 0
    assert report.state.placed == layout.device_bytes
    assert all("in host memory" in report[name].note for name in away)
    assert "in host memory" not in report["other state"].note


@weekly("target", ["h100", "cpu", "v5e"])
def test_the_classes_are_all_there_is(target):
    """With fragmentation they are the compiler's temporaries, and fragmentation is not where things are hidden."""
    name = f"{target} stage 3"
    report, memory = report_of(name), program(name).memory
    assert total(report, TEMPORARIES, "compiled") == memory.temp_size_in_bytes
    assert report.peak.compiled == (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes)
    assert sum(size for size, *_ in report.largest(10**6)) == (
        memory.temp_size_in_bytes - report["fragmentation"].compiled)
    if target != "v5e":  # so small a step lies on the TPU's chip
        assert -0.01 < report["fragmentation"].compiled / memory.temp_size_in_bytes < 0.08
    if target == "h100":  # the one backend that tells what its own heap simulation found alive
        alive = memory.peak_memory_in_bytes - memory.argument_size_in_bytes - report["metrics"].compiled
        assert memory.temp_size_in_bytes - report["fragmentation"].compiled == pytest.approx(alive, rel=0.01)


@pytest.mark.slow
def test_gathered_weights_at_stage_3():
    """At most two layers (or the embedding), however deep the model; kept ones grow with it."""
    shallow, deep, kept = (compiled_bytes("gathered weights", f"h100 stage 3, {rest}") for rest in (
        "4 layers", "12 layers", "12 layers, kept"))
    assert shallow <= 2.1 * GATHERED_LAYER and deep <= 1.02 * shallow
    assert kept > 0.9 * 12 * GATHERED_LAYER
    assert 0 < compiled_bytes("gathered weights", ACTIVE) <= 2.1 * 2 * 12 * 256**2


@pytest.mark.slow
def test_what_grows_with_what():
    shallow, deep = "h100 stage 3, 4 layers", "h100 stage 3, 12 layers"
    assert compiled_bytes("activations", deep) > 1.6 * compiled_bytes("activations", shallow)
    assert compiled_bytes("gradients", deep) > compiled_bytes("gradients", shallow)
    once, twice = "cpu stage 3, 4 layers of 64 tokens", "cpu stage 3, 4 layers of 2 x 64 tokens"
    assert compiled_bytes("activations", twice) > 1.6 * compiled_bytes("activations", once)
    assert compiled_bytes("gathered weights", twice) <= 1.02 * 2 * 2 * 12 * 256**2  # float32 on CPU
    assert compiled_bytes("activations", f"{once} remat") < 0.3 * compiled_bytes("activations", once)


@pytest.mark.slow
def test_what_holds_the_memory_is_told_with_its_code():
    report = report_of(ACTIVE)
    largest = report.largest(20)
    assert [size for size, *_ in largest] == sorted((size for size, *_ in largest), reverse=True)
    assert any("zero_gather" in op_name for _, what, op_name, _ in largest if what.startswith("gathered weights"))
    assert any(".py:" in source for *_, source in largest)
    text = io.StringIO()
    Console(width=200, file=text).print(memory_table(report), largest_table(report, 3))
    assert all(name in text.getvalue() for name in (*TEMPORARIES, "peak", "as compiled", "body/"))


def test_a_leaf_that_does_not_divide_is_told():
    config = dataclasses.replace(SMALL, width=60, num_heads=2)
    step = zero_jax.make_zero_train_step(gpt2.build(config), 3, mesh=zero_jax.make_mesh(8), precision="bf16")
    report = memory_report(step.layout(tokens(8, 16)))
    row = report["momentum"]
    assert row.placed is not None and row.formula is not None and row.placed > row.formula and row.compiled is None
    found = re.findall(r"leaves (?:do not|are padded).*?: \+([0-9,]*[0-9])", row.note)
    extras = [int(text.replace(",", "")) for text in found]
    assert extras and sum(extras) == pytest.approx(row.placed - row.formula, abs=2), row.note
    assert "gathered from the master" in report["parameters"].note


@pytest.mark.parametrize("optimizer, names", [
    (optax.sgd(0.1, momentum=0.9), {"momentum"}),
    (optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-3)), {"variance"}),
    (optax.adadelta(1e-3), {"optimizer (e_g)", "optimizer (e_x)"}),
])
def test_any_optimizer(optimizer, names):
    step = zero_jax.make_zero_train_step(
        gpt2.build(SMALL), 1, mesh=zero_jax.make_mesh(8), precision="fp32", optimizer=optimizer)
    report = memory_report(step.layout(tokens(8, 16)))
    assert {row.name for row in report.rows if row.placed is not None} == {"parameters", "other state"} | names
    assert all(report[name].placed == 4 * SMALL.num_params // 8 for name in names)


def test_gpt2_by_the_papers_formulas():
    """Section 3: 3 + 3 + 18 GB, 60 GB, 8 GB, 6 GB."""
    kept = Transformer(48, 1600, 16, batch=32, length=1024)
    found = formula_bytes(1.5e9, formulas.PAPER, 0, 1, transformer=kept, buffer_limit=math.inf)
    assert found["parameters"] == found["gradients"] == 3 * GB
    assert found["master"] + found["momentum"] + found["variance"] == 18 * GB
    assert found["temporary buffers"] == 6 * GB
    assert found["activations"] / GB == pytest.approx(60.4, abs=0.05)
    assert dataclasses.replace(kept, length=1000).activations["all"] / GB == pytest.approx(58.98, abs=0.005)
    assert round(kept.activations["the square root of all in GB"] / GB) == 8
    assert kept.activations["a checkpoint per layer"] / GB == pytest.approx(5.03, abs=0.005)
    checkpointed = formula_bytes(1.5e9, formulas.PAPER, 0, 1, transformer=dataclasses.replace(kept, remat=True))
    assert checkpointed["activations"] == kept.activations["a checkpoint per layer"]
    assert formula_bytes(3e9, formulas.PAPER, 0, 1, buffer_limit=2e8)["temporary buffers"] == 2e8  # C_B


@pytest.mark.parametrize("counts, expected", [
    (formulas.PAPER, 16), (formulas.MEGATRON_BF16, 18), (formulas.DEEPSPEED, 20)])
def test_the_real_gpt2_beside_other_systems(counts, expected):
    """1.56e9 parameters with their embeddings; nothing is compiled."""
    config = gpt2.Config(48, 1600, 25)
    step = zero_jax.make_zero_train_step(gpt2.build(config), 0, mesh=zero_jax.make_mesh(8), precision="bf16")
    report = memory_report(step.layout(tokens(8, 1024)), counts=counts)
    assert total(report, (*STATE, "gradients"), "formula") == expected * config.num_params
    assert report["master"].placed == 4 * config.num_params
    assert isinstance(report, MemoryReport) and report.peak.compiled is None


LOOP = """HloModule loop, is_scheduled=true, num_partitions=1

%body (p: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %p = (s32[], f32[8,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %kept = f32[8,64]{1,0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %new = f32[1,64]{1,0} iota(), iota_dimension=1
  %zero = s32[] constant(0)
  %filled = f32[8,64]{1,0} dynamic-update-slice(%kept, %new, %i, %zero)
  ROOT %out = (s32[], f32[8,64]{1,0}) tuple(%next, %filled)
}

%condition (q: (s32[], f32[8,64])) -> pred[] {
  %q = (s32[], f32[8,64]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant(8)
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}

ENTRY %main (x: f32[8,64]) -> f32[8,64] {
  %x = f32[8,64]{1,0} parameter(0), metadata={op_name="x[\\'a\\']"}
  %start = s32[] constant(0)
  %first = f32[8,64]{1,0} negate(%x)
  %init = (s32[], f32[8,64]{1,0}) tuple(%start, %first)
  %loop = (s32[], f32[8,64]{1,0}) while(%init), condition=%condition, body=%body
  %end = f32[8,64]{1,0} get-tuple-element(%loop), index=1
  %other = f32[8,64]{1,0} exponential(%x)
  ROOT %sum = f32[8,64]{1,0} add(%end, %other)
}
"""


def test_a_loop_carries_one_buffer():
    found = buffers.Buffers(LOOP)
    stack = next(each for each in found.temporaries if any(value.instruction.name == "first" for value in each.values))
    names = {value.instruction.name for value in stack.values}
    assert {"init", "loop", "p", "q", "filled", "out", "end"} <= names and stack.bytes == 8 * 64 * 4
    assert found.arguments() == {"x['a']": 2048}
    _, alive = found.at_peak(found.temporaries)
    assert sorted(each.bytes for each in alive if each.bytes > 4) == [2048, 2048]  # the stack and %other
    assert {each.kind for each in found.all} == {"temporary", "argument", "output", "constant"}
    assert all(each.what == "temporary buffers" for each in LiveTemporaries(LOOP).live)
