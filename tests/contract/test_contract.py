"""The communication volume, read from programs that the real H100 and TPU compilers scheduled.

psi is the number of parameters; a full ring sends (N-1)/N of a buffer, so theory is 2 psi (N-1)/N elements of the
compute dtype per step at stages 1 and 2 and 3 psi (N-1)/N at stage 3.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from support.oracle import slow
from support.programs import SMALL, Row, program

from models import gpt2

BF16 = 2


def over_psi(found, *kinds):
    """Bytes sent by these kinds (default: all) in units of psi elements of bfloat16 on a ring."""
    return found.sent(*kinds) / (found.num_params * BF16 * 7 / 8)


def broken_promises(found, stage, config=SMALL):
    """What the paper says of a stage's program: an empty list, or what is wrong with it."""
    wrong = []
    expected = {1: 2, 2: 2, 3: 3}[stage]
    if abs(over_psi(found) / expected - 1) > 0.02:
        wrong.append(f"{over_psi(found):.3f} psi sent, not {expected}")
    if abs(over_psi(found, "all-gather") - (expected - 1)) > 0.02:
        wrong.append(f"{over_psi(found, 'all-gather'):.3f} psi gathered, not {expected - 1}")
    # A loop that is buffered twice has its first or last rounds outside, of two layers all: still a layer at a time.
    in_loop = found.sent("reduce-scatter", in_loop=True) / (12 * config.num_layers * config.width**2 * BF16 * 7 / 8)
    scattered = [shape for c in found.collectives if c.kind == "reduce-scatter" for _, shape in c.shapes]
    in_stacks = [shape for shape in scattered if len(shape) == 3 and config.num_layers in shape]
    if abs(in_loop - 1) > 0.02 and (in_stacks or not scattered):
        wrong.append(f"{in_loop:.3f} of the blocks' gradients scattered in the backward loop, not all")
    for collective in found.collectives:
        if collective.kind in ("all-gather", "reduce-scatter"):
            continue
        share = collective.payload_bytes * collective.count / (found.num_params * BF16)
        if share > 0.01:
            wrong.append(f"{collective.kind} of {collective.shapes}: {share:.3f} psi")
    return wrong


@pytest.mark.grid
@pytest.mark.parametrize("target, stage", [
    slow("h100", 1), ("h100", 2), ("h100", 3), slow("v5e", 1), slow("v5e", 2), slow("v5e", 3)])
def test_communication_is_the_papers(target, stage):
    assert not broken_promises(program(f"{target} stage {stage}"), stage)


@pytest.mark.grid
@pytest.mark.parametrize("flavour, scanned, remat", [
    row if row == ("linen", True, False) else slow(*row)
    for row in itertools.product(("linen", "nnx"), (True, False), (True, False))])
def test_communication_of_every_way_to_write_the_model(flavour, scanned, remat):
    name = "h100 stage 3" + (
        f", {flavour}{'' if scanned else ' unrolled'}{' remat' if remat else ''}"
        if (flavour, scanned, remat) != ("linen", True, False) else "")
    found = broken_promises(program(name), 3)
    assert not [line for line in found if scanned or "loop" not in line]


@pytest.mark.parametrize("control", ["annotated", slow("kept")])
def test_the_check_tells_other_programs(control):
    """Negative controls: plain annotation, and a gather whose result is kept for backward."""
    assert broken_promises(program(f"h100 stage 3, {control}"), 3)


def test_gradients_of_all_blocks_that_are_scattered_at_once_are_told():
    """Negative control: the same bytes, behind the loop."""
    found = dataclasses.replace(program("h100 stage 2"))
    found.__dict__["collectives"] = tuple(
        dataclasses.replace(c, in_loop=False, shapes=tuple((dtype, (SMALL.num_layers, *shape)) for dtype, shape in
                                                           c.shapes)) if c.kind == "reduce-scatter" else c
        for c in program("h100 stage 2").collectives)
    (told,) = broken_promises(found, 2)
    assert "of the blocks' gradients scattered in the backward loop" in told


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("chip, control", [("v5p", "tiles of 8"), ("v5e", "whole")])
def test_gradients_of_1600_columns_are_scattered(chip, control):
    """GPT-2 1.5B's width, whose shards fill no tiles. XLA all-reduces the controls: tiles of 8 x 128, large parts.

    Large parts on v5e without overlap alone, for which XLA decomposes reductions, and with no barrier behind them.
    """
    assert not program(f"{chip} stage 3, width 1600").report.violations
    (broken,) = program(f"{chip} stage 3, width 1600, {control}").report.violations
    assert "all-reduce of bf16" in broken


@pytest.mark.slow
def test_stage_1_is_already_stage_2():
    """One program: gradients are scattered where backward reaches them (zero_jax/stages.py says why)."""
    moved = [[(c.kind, c.shapes, c.count) for c in program(f"h100 stage {stage}").collectives] for stage in (1, 2, 3)]
    assert moved[0] == moved[1] != moved[2]


def test_stage_0_all_reduces():
    found = program("h100 stage 0")
    assert not found.sent("all-gather", "reduce-scatter")
    assert over_psi(found, "all-reduce") >= 1.99


def dtypes(name, kind):
    """Of the matrices that collectives of this kind carry."""
    return {dtype for c in program(name).collectives if c.kind == kind
            for dtype, dims in c.shapes if np.prod(dims) >= SMALL.width**2}


@pytest.mark.grid
@pytest.mark.parametrize("name, dtype", [
    ("h100 stage 3", "bf16"), ("h100 stage 3, fp32", "f32"), ("v5e stage 3", "bf16"), ("h100 stage 2", "bf16"),
    slow("h100 stage 3, reduce fp32", "f32"), slow("v5p stage 1, reduce fp32", "f32"),
    slow("h100 stage 2, reduce fp32", "f32"), slow("v5e stage 2", "bf16"), slow("v5e stage 2, reduce fp32", "f32"),
    slow("v5e stage 3, reduce fp32", "f32")])
def test_gradients_are_reduced_in_the_dtype_asked_for(name, dtype):
    assert dtypes(name, "reduce-scatter") == {dtype}


@pytest.mark.slow
def test_stage_0_reduces_in_the_dtype_asked_for():
    assert dtypes("h100 stage 0, reduce fp32", "all-reduce") == {"f32"}


def test_the_cast_happens_on_the_shard():
    def gathered(name):
        return {dtype for c in program(name).collectives if c.kind == "all-gather" for dtype in c.dtypes}

    assert gathered("h100 stage 3") == {"bf16"}
    assert gathered("h100 stage 3, fp32") == {"f32"}  # the setting, and not the backend, decides


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("stage, preset", [(2, "124m"), (3, "124m"), (2, "1.5b"), (3, "1.5b")])
def test_communication_of_the_papers_model(preset, stage):
    """GPT-2 as it is, vocabulary of 50257 included, with 1024 tokens on each of eight H100s."""
    config = gpt2.PRESETS[preset]
    assert not broken_promises(Row("h100:8", stage, gpt2.build(config), batch=(1, 1024)).compile(), stage, config)
