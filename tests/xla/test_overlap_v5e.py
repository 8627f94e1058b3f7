"""Communication within the compute of a TPU v5e: products, and elementwise work."""

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.programs import asynchronous, beside_products, program
from support.targets import mesh_of

import zero_jax
from zero_jax.gather import reduce_scatter
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.xla.devices import compiled_for
from zero_jax.xla.events import collectives
from zero_jax.xla.overlap import overlap_options
from zero_jax.xla.schedule import schedule


@pytest.mark.slow
def test_v5e_reduces_within_products():
    """Most of the bytes of a loop's reductions have a product beside them, and none are added.

    The control is the step without: all of them block.
    """
    found, plain = program("v5e stage 3, 4 layers"), program("v5e stage 3, 4 layers, no overlap")
    assert not found.report.violations and found.sent() == pytest.approx(plain.sent(), rel=1e-3)
    assert beside_products("v5e stage 3, 4 layers", "reduce-scatter") > 0.5
    assert beside_products("v5e stage 3, 4 layers, no overlap", "reduce-scatter") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "v5e stage 3, 4 layers", pytest.param("v5e stage 2, 4 layers", marks=pytest.mark.grid)])
def test_v5e_sends_beside_other_work(name):
    """Nine tenths of the bytes, within products or elementwise work. The control is the step without."""
    found, plain = program(name), program(f"{name}, no overlap")
    assert not found.report.violations and found.sent() == pytest.approx(plain.sent(), rel=0.01)
    assert asynchronous(name) > 0.9 and asynchronous(f"{name}, no overlap") < 0.5
    beside = [c.communication_bytes * c.count for c in found.collectives if c.overlapped_flops or c.overlapped_bytes]
    assert sum(beside) > 0.7 * found.sent()  # in so small a layer some work reads VMEM alone
    assert found.memory.peak_memory_in_bytes < plain.memory.peak_memory_in_bytes + 2**25


@pytest.mark.grid
@pytest.mark.slow
def test_v5e_reduces_rows_that_nearly_fill_tiles_within_products():
    """As of GPT-2 1.5B's width. The control sends them flat, and a product makes nothing that is flat."""
    name = "v5e stage 3, 4 layers of width 1600"
    assert not program(name).report.violations
    assert beside_products(name, "reduce-scatter") > beside_products(f"{name}, flat", "reduce-scatter") + 0.2


@pytest.mark.parametrize("barrier", [True, False])
def test_padded_columns_are_reduced_within_products(barrier, monkeypatch):
    """As of a vocabulary of 50,257. Without the barrier XLA fails to compile them; where it no longer does, drop it."""
    if not barrier:
        monkeypatch.setattr(reduce_scatter, "optimization_barrier", lambda value: value)
    mesh, shape = mesh_of("v5e:2x4"), (50257, 2048)
    axes = MeshAxes.of(mesh)

    def gradient(x, y):
        return reduce_scatter.reduce_parts(x.T @ y, axes, P(None, "data"))

    call = jax.shard_map(gradient, mesh=mesh, in_specs=P("data"), out_specs=P(None, "data"), check_vma=False)
    like = [jax.ShapeDtypeStruct((8 * 1024, size), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
            for size in shape]
    device = mesh.devices.flat[0]
    with contextlib.nullcontext() if barrier else pytest.raises(jax.errors.JaxRuntimeError, match="doesn't match"):
        compiled = compiled_for(jax.jit(call).lower(*like), device, overlap_options(device, True))
        assert [each.kind for each in collectives(schedule(compiled.as_text()))] == ["reduce-scatter"]


@pytest.mark.parametrize("tiled", [True, False])
def test_a_reduction_within_a_product_keeps_the_rank_of_its_operand(tiled):
    """Why `_scatter_tiles` gives `tiled=True`: XLA fails to compile the other; where it no longer does, drop this."""
    mesh = mesh_of("v5e:2x4")

    def round_of(x, gradient):
        def part(total, _):
            parts = (total.T @ gradient).reshape(mesh.size, -1, 8, 128)
            parts = parts.reshape(-1, 8, 128) if tiled else parts
            summed = jax.lax.psum_scatter(parts, "data", scatter_dimension=0, tiled=tiled)
            return jnp.tanh(total @ total[:512]), summed

        return jax.lax.scan(part, x, None, length=2)

    summed = jax.shard_map(round_of, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P(None, "data")),
                           check_vma=False)
    like = [jax.ShapeDtypeStruct((8 * 1024, size), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
            for size in (512, 1536)]
    device = mesh.devices.flat[0]
    with contextlib.nullcontext() if tiled else pytest.raises(jax.errors.JaxRuntimeError, match="shard_count"):
        compiled = compiled_for(jax.jit(summed).lower(*like), device, overlap_options(device, True))
        assert [each.asynchronous for each in collectives(schedule(compiled.as_text()))] == [True]


@pytest.mark.parametrize("name", ["TPU v5 lite", "TPU v5e"])
def test_v5e_is_asked_for_reductions_within_products(name):
    """Where gradients are scattered: all-reduces of stage 0 block, whatever is asked."""
    chip = types.SimpleNamespace(device_kind=name, platform="tpu")
    own = overlap_options(chip, "auto")
    assert own["xla_tpu_decompose_every_reduce_scatters_hlos"] is True and own == overlap_options(chip, True)
    assert overlap_options(chip, False) == overlap_options(chip, "auto", scatters=False) == {}
    assert overlap_options(chip, {"xla_x": 1}) == own | {"xla_x": 1}
    with pytest.raises(zero_jax.UsageError, match="changes nothing on .*hides no all-reduce, and stage 0"):
        overlap_options(chip, True, scatters=False)
