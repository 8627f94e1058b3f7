"""Collectives on the SparseCores of TPUs: asynchronous in the compiled step, and refused where nothing would change."""

import pytest
from support.programs import program
from support.targets import mesh_of

import zero_jax
from zero_jax.xla.overlap import overlap_options


def asynchronous(name):
    """Share of the bytes that are sent asynchronously."""
    found = program(name)
    return sum(c.communication_bytes * c.count for c in found.collectives if c.asynchronous) / found.sent()


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_the_sparse_cores_send_while_the_tensor_cores_compute(chip):
    """The bytes stay the paper's; in this small program a quarter or more are sent beside a product."""
    found = program(f"{chip} stage 3, overlap")
    assert not found.report.violations
    assert asynchronous(f"{chip} stage 3, overlap") >= {"v5p": 0.98, "v6e": 0.97}[chip]
    beside = sum(c.communication_bytes * c.count for c in found.collectives if c.overlapped_flops)
    assert beside > 0.25 * found.sent()


@pytest.mark.slow
def test_without_it_everything_blocks():
    """The control, and the bytes."""
    assert asynchronous("v5p stage 3") < 0.01
    with_it, without = program("v5p stage 3, overlap"), program("v5p stage 3")
    assert with_it.sent() == pytest.approx(without.sent(), rel=0.01)


@pytest.mark.parametrize(("target", "reason"), [
    ("h100:8", "overlaps communication with compute by itself"), ("v5e:2x4", "has no SparseCores"),
    ("tpu7x:2x2x2", "by itself"), ("v4:2x2x2", "makes no collective asynchronous")])
def test_where_it_changes_nothing_it_is_refused(target, reason):
    with pytest.raises(zero_jax.UsageError, match=f"overlap=True changes nothing on .*{reason}.*for TPU v5p and v6e"):
        overlap_options(mesh_of(target).devices.flat[0], True)


def test_a_mapping_changes_the_options():
    device = mesh_of("v5p:2x2x2").devices.flat[0]
    own, name = overlap_options(device, True), "xla_tpu_enable_async_collective_fusion"
    assert own[name] is True and overlap_options(device, {name: False, "xla_x": 1}) == {**own, name: False, "xla_x": 1}
    assert overlap_options(device, False) == {}
