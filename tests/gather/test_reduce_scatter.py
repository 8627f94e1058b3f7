"""Gradients scattered as sums of the devices' parts: which are, and with what numbers."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.covering import covering
from support.oracle import ADAMW, Trained, loss_difference, param_difference, slow, train
from support.targets import mesh_of, simulated
from support.workloads import FLAVOURS, MLPS, classify, token_batches, vector_batches

import zero_jax
from models import gpt2
from zero_jax.gather import reduce_scatter as scatter
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.xla import hlo
from zero_jax.xla.devices import compiler_options
from zero_jax.xla.platform import Platform

MESHES = {"factored": {"data": (2, 4)}, "factored hybrid": {"data": (2, 2), "replica": 2}}
CONFIG = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)


class Conv(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], 4, 4, 1)
        x = nn.gelu(nn.Conv(16, (3, 3), strides=2)(x))
        x = nn.gelu(nn.Conv(32, (1, 1))(nn.Conv(16, (3, 3), feature_group_count=16)(x)))
        return nn.Dense(8)(x.reshape(x.shape[0], -1))


class Sequence(nn.Module):
    """The weights of an LSTM are read in a loop over time, and scattered in each of its iterations."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.RNN(nn.LSTMCell(32))(x.reshape(x.shape[0], 4, 4))[:, -1])


class TimeMajor(nn.Module):
    """Its first contracted dim is time, and as long as the batch."""

    @nn.compact
    def __call__(self, x):
        x = jnp.tile(x[None], (x.shape[0], 1, 1)) * jnp.linspace(0, 1, x.shape[0])[:, None, None]
        return nn.Dense(8)(nn.gelu(nn.Dense(64)(x))).mean(0)


VECTOR_MODELS = {"conv": Conv(), "lstm": Sequence(), "time major": TimeMajor(), **MLPS}


def run(name, stage, mesh) -> Trained:
    if name in FLAVOURS:
        model, batches, options = FLAVOURS[name](CONFIG), token_batches(), {"optimizer": ADAMW}
    else:
        model, batches = VECTOR_MODELS[name], vector_batches()
        options = {"optimizer": optax.sgd(0.1, momentum=0.9), "loss": classify}
    return train(model, stage, zero_jax.make_mesh(**mesh) if mesh else 1, batches=batches, precision="fp32", **options)


FAST = [("linen dropout", "factored", 3)]
one_device = functools.cache(lambda name: run(name, 0, None))
KEYS_BIAS = (("qkv/bias", lambda leaf: leaf.reshape(*leaf.shape[:-1], 2, 3, -1)[..., [0, 2], :]),)


@pytest.mark.grid
@pytest.mark.parametrize(("name", "mesh", "stage"), [
    *FAST, *(slow(*row) for row in covering([*FLAVOURS, *VECTOR_MODELS], MESHES, (1, 3)) if row not in FAST)])
def test_numbers_are_those_of_one_device(name, mesh, stage):
    many, one = run(name, stage, MESHES[mesh]), one_device(name)
    assert loss_difference(many, one) < 1e-6
    assert param_difference(many, one, KEYS_BIAS) < 1e-5


def test_a_sum_that_leaves_out_an_axis_is_told(monkeypatch):
    """Negative control: what the comparison sees if the replicas' parts are not added."""
    monkeypatch.setattr(jax.lax, "psum", lambda value, axes: value)
    assert loss_difference(run("conv", 3, MESHES["factored hybrid"]), one_device("conv")) > 1e-3


KERNELS = {  # how a TPU sends each: as it is, as tiles, flat and padded, summed and cut; over another axis first
    "as it is": ((1, 1, 64, 2048), P(None, None, None, ("x", "y"))),
    "as it is, one dim before": ((3, 3, 2048, 8), P(None, None, ("x", "y"), None)),
    "columns, more rows": ((65, 4096), P(None, ("x", "y"))),
    "rows as columns": ((4096, 24), P(("x", "y"), None)),
    "tiles": ((128, 256), P(("x", "y"), None)),
    "flat": ((3, 3, 64, 96), P(None, None, "x", "y")),
    "flat, one dim": ((3, 3, 160, 40), P(None, None, ("x", "y"), None)),
    "cut": ((3, 5, 8), P(None, None, ("x", "y"))),
    "other axis first": ((3, 32, 64), P(None, "x", "y")),
    "tiles, minor first": ((128, 256), P(("y", "x"), None)),
    "columns, minor first": ((65, 4096), P(None, ("y", "x"))),
    "flat, minor first": ((3, 3, 160, 40), P(None, None, ("y", "x"), None)),
    "merged": ((2**16,), P(("x", "y"))),
    "merged, minor first": ((2**16,), P(("y", "x"))),
    "cut, minor first": ((3, 5, 8), P(None, None, ("y", "x"))),
}


def reduced(shape, spec):
    """Whole numbers of each of 8 simulated devices, reduced as a TPU does, and their sum."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    parts = np.random.default_rng(0).integers(-99, 99, (8, *shape)).astype(np.float32)
    axes = MeshAxes.of(mesh, ("x", "y"))
    summed = jax.shard_map(lambda part: scatter.reduce_parts(part[0], axes, spec), mesh=mesh, in_specs=P(("x", "y")),
                           out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(summed)(parts)), parts.sum(0)


@pytest.fixture
def torus(monkeypatch):
    monkeypatch.setattr(scatter, "MAX_UNPADDED_ROWS", 64)
    monkeypatch.setattr(scatter, "tile_block", lambda mesh, axis, platform: {"x": 4096, "y": 2048}[axis])
    with simulated("v5p:2x2x2"):
        yield


@pytest.mark.parametrize("name", KERNELS)
def test_what_a_tpu_scatters_is_the_sum(name, torus):
    np.testing.assert_array_equal(*reduced(*KERNELS[name]))


@pytest.mark.parametrize(("columns", "v5e", "sent"), [(250, True, {256}), (250, False, set()), (240, True, set())])
def test_columns_that_nearly_fill_tiles_are_padded_on_v5e(columns, v5e, sent, torus, monkeypatch):
    """Up to a 20th is added. The controls are sent flat: those of other chips, and where more is to be added."""
    found, in_tiles = set[int](), scatter._scatter_rows

    def counted(value, axis):
        found.add(value.shape[1])
        return in_tiles(value, axis)

    monkeypatch.setattr(scatter, "_scatter_rows", counted)
    with simulated("v5e:2x4" if v5e else "v5p:2x2x2"):
        np.testing.assert_array_equal(*reduced((800, columns), P("x", None)))
    assert found == sent


def test_small_arrays_are_scattered_first_over_the_axis_whose_tiles_they_fill(torus):
    mesh, splits = jax.sharding.AbstractMesh((2, 4), ("x", "y")), [(1, ("y",)), (2, ("x",))]
    order = functools.partial(scatter._scatter_order, platform=Platform("tpu", ""))
    assert order(2**24, mesh, splits) == ((2, "x"), (1, "y"))  # as the mesh has them
    assert order(3 * 32 * 64, mesh, splits) == ((1, "y"), (2, "x"))
    assert order(3 * 32 * 64, mesh, [(1, ("x", "y"))]) == ((1, "x"), (1, "y"))
    assert order(3 * 32 * 64, mesh, [(1, ("y", "x"))]) == ((1, "y"), (1, "x"))


def test_parts_in_another_order_are_told(torus, monkeypatch):
    """Negative control: axes of one dim that are not scattered major first leave other parts on the devices."""
    in_order = scatter._scatter_order
    monkeypatch.setattr(scatter, "_scatter_order", lambda *args: in_order(*args)[::-1])
    for name in ("as it is", "tiles", "flat, one dim", "cut", *(name for name in KERNELS if "minor" in name)):
        assert not np.array_equal(*reduced(*KERNELS[name]))


def wire(target, shape, spec, product=False):
    """What the devices send to sum and scatter a gradient in bfloat16, over what a ring of them sends.

    Of a product XLA chooses how it lies; else it lies as it comes.
    """
    mesh = mesh_of(target)
    sizes = [(mesh.size, 256, shape[0]), (mesh.size, 256, shape[1])] if product else [(mesh.size, *shape), ()]

    def part(left, right):
        value = left[0].T @ right[0] if product else left[0] * right
        return scatter.reduce_parts(value.astype(jnp.bfloat16), MeshAxes.of(mesh), spec)

    splits = [P(mesh.axis_names) if size else P() for size in sizes]
    summed = jax.shard_map(part, mesh=mesh, in_specs=tuple(splits), out_specs=spec, check_vma=False)
    args = (jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, split))
            for size, split in zip(sizes, splits, strict=True))
    compiled = jax.jit(summed).lower(*args).compile(compiler_options=compiler_options(mesh.devices.flat[0]))
    return sum(c.communication_bytes * c.count for c in hlo.collectives(compiled.as_text())) / (
        2 * math.prod(shape) * (1 - 1 / mesh.size))


BOTH, APART = P(None, None, ("data_0", "data_1"), None), P(None, None, "data_0", "data_1")
WIRE = [  # kernels of a ResNet-50 in its layouts, and what they may cost
    ("v5p:2x2x2", (1, 1, 1024, 2048), APART, 1.001),
    ("v5p:2x2x2", (1, 1, 1024, 256), BOTH, 1.001),
    ("v5p:2x2x2", (3, 3, 128, 128), BOTH, 1.001),
    ("v5p:4x4x8", (2048, 1000), P("data_0", "data_1"), 1.03),  # padded
    ("v5p:4x4x8", (1, 1, 1024, 256), APART, 1.001),
    ("v5p:8x8x16", (3, 3, 256, 256), APART, 1.07),
    ("v5e:16x16", (1, 1, 2048, 512), APART, 1.001),
    ("v5e:16x16", (1, 1, 512, 256), BOTH, 1.07),  # part of it is smaller than tiles
    ("v5e:16x16", (1, 1, 256, 64), BOTH, 2.001),  # all of it is; padded, XLA (jax 0.10) does not compile it
    ("v5p:2x2x2", (50257, 4096), P(None, ("data_0", "data_1")), 1.005),  # an embedding, whose rows fill no tiles
    ("v5p:2x2x2", (1024 * 2936,), P(("data_0", "data_1")), 1.01),  # the merged dims of a kernel of 1001 x 3003
    ("v6e:2x4", (1024 * 2936,), P("data"), 1.01),
]


@pytest.mark.parametrize(("target", "shape", "spec", "most"), [
    slow(*row) if row[1] in ((2048, 1000), (1024 * 2936,)) else row for row in WIRE])
def test_wire_of_kernels_of_convolutions(target, shape, spec, most):
    assert 0.999 < wire(target, shape, spec) < most


ROWS = "v5e:16x16", (4096, 4096), P("data_0", "data_1"), True


def test_rows_of_a_product_are_not_padded():
    assert 0.999 < wire(*ROWS) < 1.02


def test_kernels_that_are_scattered_as_they_are_send_more(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(scatter, "_scatter_tiles", lambda value, axis, ways, dim, *_: jax.lax.psum_scatter(
        value, axis, scatter_dimension=dim, tiled=True))
    assert wire(*WIRE[4][:3]) > 1.5 and wire(*WIRE[6][:3]) > 1.5
    assert wire(*WIRE[9][:3]) > 1.5 and wire(*ROWS) > 1.1
    assert wire(*WIRE[10][:3]) > 1.5 and wire(*WIRE[11][:3]) > 1.5
