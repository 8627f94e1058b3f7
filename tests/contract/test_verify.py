"""`step.verify`: what this library compiles keeps its contract, and programs that send more are told what and where.

The programs come from the real H100 and TPU compilers, and from XLA:CPU for eight simulated devices.
"""

import contextlib
import dataclasses
import itertools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from support.flat import flat_step
from support.oracle import slow
from support.program_controls import partitioned
from support.programs import PROGRAMS, Row, program
from support.targets import mesh_of

import zero_jax
from models import gpt2
from zero_jax.contract import purpose
from zero_jax.contract import verify as contract

LARGE = gpt2.Config(2, 2048, 16, vocab_size=8192, max_length=64)
KEPT = (
    "cpu stage 3", "h100 stage 0", "h100 stage 2", "h100 stage 3", "h100 stage 3, fp32", "v5e stage 3")
LONG = (
    "v5e stage 2", "h100 stage 3, reduce fp32",
    "h100 stage 1", "h100 stage 3, factored hybrid", "h100 stage 1, merged", "h100 stage 3, nnx unrolled",
    "h100 stage 3, uneven", "h100 stage 3, linen remat", "h100 stage 1, fp32", "h100 stage 2, nnx",
    "h100 stage 1, uneven", "cpu stage 2, nnx unrolled", "cpu stage 3, factored", "cpu stage 3, uneven",
    "cpu stage 0, nnx", "cpu stage 3, hybrid fp32",
    "v5e stage 3, uneven", "v5e stage 2, fp32", "v5e stage 3, nnx unrolled", "v5e stage 3, conv",
    "v5p stage 1, uneven", "v6e stage 3, uneven", "v5p stage 1, reduce fp32", "v5p stage 3", "v5p stage 3, hybrid")


@pytest.mark.grid
@pytest.mark.parametrize("name", [*KEPT, *map(slow, LONG)])
def test_contract_is_kept(name):
    found, row = program(name), PROGRAMS[name]
    report = found.verify()
    assert not report.violations and report.communication_bytes > 0
    assert report.contract.stage == row.stage
    gather, reduce, _ = report.results
    assert bool(gather.collectives) == (row.stage > 0) and reduce.collectives
    assert reduce.communication_bytes > (0.75 if row.target == "cpu" else 0.98) * reduce.budget.communication_bytes


def test_a_step_compiles_itself_and_is_held_against_its_own_contract():
    step, batch = PROGRAMS["cpu stage 3"].make()
    report = step.verify(batch)
    assert report.contract == step.contract(batch) == program("cpu stage 3").contract
    assert report.contract.mesh == dict(step.mesh.shape)
    assert report.communication_bytes == program("cpu stage 3").report.communication_bytes


def test_a_sum_of_a_gradient_and_of_other_numbers_is_two():
    """An embedding's gradient and the scalars of a norm in one all-reduce, as of a program in buffers."""
    found = program("cpu stage 3")
    size, dims = next((math.prod(shape[1]), shape[1]) for c in found.report.results[1].collectives
                      for shape in c.shapes if 1000 < math.prod(shape[1]) < 8000)
    whole = next(c for c in found.collectives if c.kind == "all-reduce")
    scalars = [("f32", ())] * (size // 500)
    both = dataclasses.replace(whole, shapes=(("f32", dims), *scalars), payload_bytes=4 * (size + len(scalars)),
                               serves=(), op_name="scatter-add", count=1)
    assert purpose.purpose_of(both, found.contract) == "rest"
    results = contract.check([both], found.contract).results
    assert [each.shapes for each in results[1].collectives] == [(("f32", dims),)]
    assert [each.shapes for each in results[2].collectives] == [tuple(scalars)]
    sent = results[1].communication_bytes + results[2].communication_bytes
    assert sent == pytest.approx(both.communication_bytes)


POINTS = {"h100:16x8": (1,), "h100:128x8": (2, 3), "v6e:16x16": (3,), "v5e:16x16": (1, 3), "v5p:4x4x8": (1,),
          "v5p:8x8x16": (2, 3)}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("target", "stage"), [(target, stage) for target in POINTS for stage in POINTS[target]])
def test_contract_is_kept_on_many_devices(target, stage):
    """And gathers are gathers, and sums are scattered: no all-reduce as large as a parameter."""
    row = Row(target, stage, gpt2.build(LARGE), batch=(1, 64))
    found = row.compile()
    report, psi = found.verify(), found.num_params
    assert psi > 1e8
    gather, *others = report.results
    assert all(c.kind == "all-gather" for c in gather.collectives if c.payload_bytes > LARGE.width * 128)
    reduced = [c for kept in others for c in kept.collectives if c.kind == "all-reduce"]
    assert sum(c.payload_bytes * c.count for c in (*reduced, *(
        c for c in gather.collectives if c.kind == "all-reduce"))) < 0.01 * 2 * psi
    assert report.communication_bytes < 1.05 * row.make()[0].stage.communication * 2 * psi


def test_a_group_in_another_order_sends_other_rows():
    """Negative control: the same bytes over the same axis, and each device gets the rows of another."""
    found = program("v5e stage 3")
    reduced = next(c for c in found.report.results[1].collectives if c.kind == "reduce-scatter" and c.serves)
    for c, is_broken in ((reduced, False), (dataclasses.replace(reduced, group=reduced.group[::-1]), True),
                         (dataclasses.replace(reduced, group=reduced.group[::-1], kind="all-reduce"), False)):
        told = contract.check([c], found.contract).violations
        assert any("rows are on other devices than the layout says" in line for line in told) == is_broken


BROKEN = {  # the kind of the collective that is named, what is named of its origin, and the advice
    "annotated": (r"all-to-all|all-gather", r"blocks/|wte", "not see read"),
    "padded after the sum": ("all-reduce", "wte", "See whether"),  # as the partitioner does it
    "flat slice": ("all-reduce", "blocks/down", "make_mesh"),
    "activations everywhere": ("all-gather", "Embed_0", "sharding constraint in the model"),
    "read in a loop": ("all-gather|all-reduce", "LSTMCell_0", "Read it before the loop"),
}


@pytest.mark.parametrize(("name", "target"), [
    ("annotated", "h100"), slow("annotated", "v5p"), slow("flat slice", "v5p"), slow("padded after the sum", "h100"),
    slow("activations everywhere", "h100"), slow("activations everywhere", "v5p"), slow("read in a loop", "h100"),
    slow("read in a loop", "v5p"), ("read in a loop", "cpu")])
def test_what_breaks_a_contract_is_told(name, target):
    """Negative controls: the operation, its bytes, where it comes from, and what to do."""
    kind, origin, advice = BROKEN[name]
    found = program(f"{target} stage 3, {name}")
    with pytest.raises(contract.ContractError) as error:
        found.verify()
    told = str(error.value)
    lines = [line for line in told.splitlines() if re.search(rf"BROKEN: .*({kind}) of \w+\[", line)]
    assert any(re.search(r"[\d,]{6,} bytes per step.* from \S.*", line) and re.search(origin, line) and advice in line
               for line in lines), told
    assert all(re.search(r"\(\S+\.py:\d+\)", line) for line in lines), told


def test_a_smaller_promise_is_broken():
    """Negative control: each promise counts."""
    text, promised = program("h100 stage 3").text, program("h100 stage 3").contract
    assert not contract.check(text, promised).violations
    for i, told in enumerate(("parameters are gathered", "gradients are reduced")):
        promises = list(promised.budgets)
        promises[i] = dataclasses.replace(promises[i], communication_bytes=0.8 * promises[i].communication_bytes)
        (line,) = contract.check(text, dataclasses.replace(promised, budgets=tuple(promises))).violations
        assert told in line
    gather, *rest = promised.budgets
    elsewhere = dataclasses.replace(promised, budgets=(dataclasses.replace(gather, axes=()), *rest))
    assert any("gathered over data, not only over no axis" in line
               for line in contract.check(text, elsewhere).violations)


TINY = gpt2.Config(2, 256, 8, vocab_size=512, max_length=512)
AXES = {"data": ({}, {}), "replica": ({"replica": 2}, {}), "context": ({"context": 2}, {}),
        "context alone": ({"context": 8}, {}),
        "hpz": ({"data": (2, 4)}, {"hpz_axes": "data_1"}),
        "tensor": ({"tensor": 2}, {"tensor_rules": gpt2.tensor_rules(TINY)}),
        "tensor and context": ({"tensor": 2, "context": 2}, {"tensor_rules": gpt2.tensor_rules(TINY)})}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("target, name", [
    *itertools.product(("h100:8", "v5p:2x2x2", "v6e:2x4", "v5e:2x4"), AXES)])
def test_every_axis_compiles_for_every_target(target, name):
    """With the attention of its devices; for GPUs it keeps its contract. TPUs all-reduce small gradients whole."""
    compiled = tiny_on(target, *AXES[name])
    assert compiled.collectives
    if target == "h100:8":
        assert_kept(compiled)


def test_keys_that_are_gathered_with_parameters_are_activations():
    """XLA:GPU merges them where `context` is the only axis; here a key has the size of the embedding."""
    compiled = tiny_on("h100:8", {"context": 8}, {}, kernel="xla")
    assert_kept(compiled)
    # Negative control: by their names in parts, and as XLA partitions.
    named_as_params = re.sub(r"(?<=[HS]\)/)all_gather|(?<=/)dot_general(?=[:)])", "zero_gather", compiled.text)
    assert any("bytes of parameters are gathered" in line
               for line in contract.check(named_as_params, compiled.contract).violations)


class Routed(nn.Module):
    """Experts by `ragged_dot`, of all examples sorted by expert."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("experts", nn.initializers.normal(0.1), (8, 256, 384))
        expert = jnp.argmax(nn.Dense(8)(x), -1)
        order = jnp.argsort(expert)
        out = jax.lax.ragged_dot(x[order], kernel, jnp.bincount(expert, length=8).astype(jnp.int32))
        return out[jnp.argsort(order)]


@pytest.mark.slow
@pytest.mark.parametrize(("split", "told"), [
    (contextlib.nullcontext, "all-gather of f32.4096, 384. over data.*Values of the batch are sent"),
    (partitioned, "or every device computes that of the whole batch .after a sort")])
@pytest.mark.filterwarnings("ignore:Every device computes the whole of sort")
def test_examples_that_are_gathered_to_sort_them_are_told(split, told):
    """Right, and dear: each device multiplies its rows of the order; where XLA partitions it, all of them."""
    step = zero_jax.make_zero_train_step(Routed(), 3, mesh=mesh_of("h100:8"),
                                         loss=lambda model, batch: jnp.mean(model(batch["x"]) ** 2))
    with split(), pytest.raises(contract.ContractError, match=told):
        step.verify({"x": jax.ShapeDtypeStruct((4096, 256), jnp.float32)})


def tiny_on(target, sizes, options, kernel=None):
    mesh = mesh_of(target, **sizes)
    rows = mesh.size // math.prod(mesh.shape.get(name, 1) for name in ("tensor", "context"))
    batch = {name: jax.ShapeDtypeStruct((rows, 512), jnp.int32) for name in ("inputs", "targets")}
    model = gpt2.GPT2(dataclasses.replace(TINY, attention=zero_jax.attention(mesh, kernel=kernel)))
    return flat_step(model, 3, mesh=mesh, precision="bf16", **options).compiled_step(batch)


def assert_kept(compiled):
    assert not compiled.report.violations, str(compiled.report)
