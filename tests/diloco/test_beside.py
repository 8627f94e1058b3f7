"""Fragments of DiLoCo sent in parts, one in each iteration of a step's loops over layers, beside its products."""

import jax
import jax.numpy as jnp
import pytest
from support.slices import STREAMING, batches, make
from support.targets import mesh_of

import zero_jax
from models import gpt2
from zero_jax.contract.verify import check
from zero_jax.xla.overlap import blocks, concurrent_options
from zero_jax.xla.platform import platform_of


def in_one_part(diloco):
    """The control: the same fragment in one all-reduce."""
    diloco.functions.num_parts = lambda fragment, batch=None: 1
    return diloco


def between_slices(program):
    results = program.report.results
    return next(result for result in results if result.budget.key == "slices")


def test_the_contract_asks_for_parts_in_loops():
    """Two fragments, each in eight parts: in four iterations of forward and four of backward. Control: in one part."""
    given, diloco = batches(1)[0], make(flavour="wide", **STREAMING)
    assert [diloco.num_parts(fragment, given) for fragment in (0, 1, None)] == [8, 8, 1]
    assert "in 8 parts beside the loops of the next step, " in diloco.describe()
    found = diloco.compiled_step(given, 0)
    assert not found.report.violations and all(each.in_loop for each in between_slices(found).collectives)
    assert "bytes of it beside a matrix product" in str(found.report)
    whole = in_one_part(make(flavour="wide", **STREAMING)).compiled_step(given, 0)
    assert not whole.report.violations and not any(each.in_loop for each in between_slices(whole).collectives)
    broken = check(whole.collectives, found.contract).violations
    assert any("outside of the loops over layers" in line for line in broken)


@pytest.mark.parametrize(("options", "parts"), [
    ({"overlap": True}, 8), ({}, 1), ({"overlap": True, "flavour": "nnx"}, 1),
    ({"overlap": True, "flavour": "linen"}, 1)])
def test_in_one_part_where_no_loop_or_next_to_nothing_is_beside_it(options, parts):
    assert make(**{"flavour": "wide"} | options).num_parts(0, batches(1)[0]) == parts


@pytest.mark.parametrize(("target", "overlap", "expected"), [
    ("h100:8", "auto", False), ("v5p:2x2x2", "auto", False), ("v5p:2x2x2", False, True), ("v5e:2x4", "auto", True),
    ("tpu7x:2x2x2", "auto", False)])
def test_where_all_reduces_block_is_known(target, overlap, expected):
    device = mesh_of(target).devices.flat[0]
    assert blocks(platform_of(device), overlap) is expected
    assert bool(concurrent_options(device)) == target.startswith("h100")


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(("target", "remat"), [("h100:2x8", False), ("h100:2x8", True), ("v5p:2x2x2", True)])
def test_fragments_are_sent_beside_products(target, remat):
    """All of their bytes, with a product between start and end. Control: in one part none of them is."""
    config = gpt2.Config(4, 256, 4, vocab_size=512, max_length=256, remat=remat)
    mesh = mesh_of(target, replica=2)
    tokens = jax.ShapeDtypeStruct((4 * mesh.size, config.max_length), jnp.int32)
    given = {"inputs": tokens, "targets": tokens}

    def of(change=lambda diloco: diloco):
        step = zero_jax.make_zero_train_step(gpt2.build(config), 3, precision="bf16", mesh=mesh)
        diloco = change(zero_jax.make_diloco_step(step, every=8, fragments=2, overlap=True))
        program = diloco.compiled_step(given, 0)
        assert not program.report.violations
        sent = between_slices(program)
        beside = sum(each.communication_bytes * each.count for each in sent.collectives
                     if each.asynchronous and each.overlapped_flops)
        return beside / sent.communication_bytes, program

    (share, program), (whole, plain) = of(), of(in_one_part)
    assert share > 0.99 and whole == 0
    assert program.memory.temp_size_in_bytes < 1.2 * plain.memory.temp_size_in_bytes
