"""Any tree of shapes, mesh and optimizer: the layout adds up, and one step is that of one device."""

import functools
import math

import chex
import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from support.oracle import slow
from support.workloads import only_matrices

import zero_jax
from zero_jax.layout.make_layout import LayoutPolicy, make_layout
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.stages import stage_of
from zero_jax.state import ZeroState
from zero_jax.tree import leaf_bytes, named_leaves

NUM_TREES = 500
MESHES = ((2,), (3,), (5,), (7,), (8,), (2, 2), (2, 3), (2, 4), (2, 2, 2))
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, mask=only_matrices),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "lamb": optax.lamb(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(1e-2),
}
SIZES = st.sampled_from([1, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 17, 31, 64, 97])
SHAPES = st.one_of(
    st.just(()), st.just((0,)), st.just((5, 0)), st.tuples(st.just(1), SIZES), st.lists(SIZES, max_size=3).map(tuple),
    st.lists(st.sampled_from([2, 3, 5, 7, 11, 13]), min_size=1, max_size=4).map(tuple))


@st.composite
def trees(draw):
    """(shapes, how many leading dims of each a loop runs over, mesh, optimizer, stage)."""
    shapes = tuple(draw(st.lists(SHAPES, min_size=1, max_size=5)))
    stacked = tuple(draw(st.integers(0, max(0, len(shape) - 1))) if draw(st.integers(0, 3)) == 0 else 0
                    for shape in shapes)
    return shapes, stacked, draw(st.sampled_from(MESHES)), draw(st.sampled_from(sorted(OPTIMIZERS))), draw(
        st.integers(1, 3))


def drawn():
    """The trees: as many as there should be, the same each time."""
    found = []

    @hypothesis.settings(max_examples=NUM_TREES, database=None, deadline=None, derandomize=True, phases=[
        hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(trees())
    def collect(tree):
        found.append(tree)

    collect()
    return found


TREES = functools.cache(drawn)


def mesh_of(sizes):
    names = ["data"] if len(sizes) == 1 else [f"data_{i}" for i in range(len(sizes))]
    return jax.sharding.Mesh(np.array(jax.devices()[:math.prod(sizes)]).reshape(sizes), names)


def layout_of(shapes, stacked, sizes, name, stage):
    params = {f"leaf_{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}
    mesh = mesh_of(sizes)
    reads = {f"leaf_{i}": ParamAccess(stacked=tuple(range(many))) for i, many in enumerate(stacked)}
    state = ZeroState(step=jax.ShapeDtypeStruct((), jnp.int32), params=params, weights=None, frozen={}, opt_state=None,
                      variables={}, ema=None, guard=None, rng=jax.eval_shape(lambda: jax.random.key(0)))
    return make_layout(state, MeshAxes.of(mesh), LayoutPolicy(stage_of(stage)), reads=reads,
                       optimizer=optax.with_extra_args_support(OPTIMIZERS[name]))


def check_layout(layout, shapes, stacked):
    """Everything that a layout tells of its leaves is so."""
    ways, rows = layout.num_shards, layout.placements()
    told = {row.name for row in layout.replicated()}
    for row, (name, leaf) in zip(rows, named_leaves(layout.state), strict=True):
        shards = leaf.sharding.devices_indices_map(leaf.shape)
        held = [math.prod(len(range(*index.indices(size))) for index, size in zip(cut, leaf.shape, strict=True))
                for cut in shards.values()]
        distinct = {str(cut): size for cut, size in zip(shards.values(), held, strict=True)}
        itemsize = leaf_bytes((), leaf.dtype)
        assert sum(distinct.values()) * itemsize == row.stored_bytes == row.bytes + row.padding  # every byte, once
        assert set(held) == {row.device_bytes // itemsize}  # the same on each device
        copies = sum(held) * itemsize - row.stored_bytes
        wanted = name.startswith("opt_state") or name.startswith("params") and layout.stage.shards_params
        if wanted and copies and row.bytes > itemsize:
            assert name in told, row
        assert not (name in told and not copies)
        assert row.padding < row.bytes * ways + 1
    for i, (shape, many) in enumerate(zip(shapes, stacked, strict=True)):
        leaf, view = layout.state.params[f"leaf_{i}"], layout.stored_shapes.params[f"leaf_{i}"]
        assert view.shape == shape and leaf.shape[:many] == shape[:many]  # a loop's dims stay as they are
        assert not any(leaf.sharding.spec[:many])
    assert layout.num_params == sum(map(math.prod, shapes))


@pytest.mark.parametrize("count", [100, slow(NUM_TREES)])
def test_every_tree_has_a_layout_that_adds_up(count):
    assert len(TREES()) == NUM_TREES
    uneven = 0
    for shapes, stacked, *rest in TREES()[:count]:
        layout = layout_of(shapes, stacked, *rest)
        check_layout(layout, shapes, stacked)
        assert layout.describe()
        uneven += any(not view.is_identity for view in jax.tree.leaves(layout.stored_shapes.params))
    assert uneven > count / 3


def test_a_layout_that_is_wrong_is_told(monkeypatch):
    """Negative control: bytes that are on more devices than is told."""
    tree = ((7, 5), (13,)), (0, 0), (8,), "adamw", 3
    check_layout(layout_of(*tree), *tree[:2])
    monkeypatch.setattr("zero_jax.layout.make_layout.choose_stored_shape", lambda shape, *_, **__: (
        zero_jax.sharding.stored_shape.identity_shape(shape), jax.sharding.PartitionSpec(*[None] * len(shape))))
    monkeypatch.setattr("zero_jax.layout.layout.Layout._note", lambda *_: "")
    with pytest.raises(AssertionError):
        check_layout(layout_of(*tree), *tree[:2])


class Leaves(nn.Module):
    """Reads parameters of any shapes; a matrix in a product, what a loop runs over in a loop."""

    shapes: tuple[tuple[int, ...], ...]
    stacked: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        total = jnp.zeros(x.shape[0])
        for i, (shape, many) in enumerate(zip(self.shapes, self.stacked, strict=True)):
            value = self.param(f"leaf_{i}", nn.initializers.normal(0.5), shape)
            value = value.reshape(math.prod(shape[:many]), -1) if many else value
            if value.ndim > 1 and value.size:
                flat = value.reshape(value.shape[0], -1)
                out = jnp.tanh(jnp.tile(x, (1, -(-flat.shape[0] // x.shape[1])))[:, :flat.shape[0]] @ flat)
            else:
                out = jnp.tanh(x[:, :1] * value.reshape(1, -1))
            total += out.sum(1) / max(1, out.shape[1])
        return total


def one_step(model, sizes, name, stage, batch):
    step = zero_jax.make_zero_train_step(
        model, stage, mesh=mesh_of(sizes), optimizer=OPTIMIZERS[name],
        loss=lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))
    state = step.init(jax.random.key(0), batch)
    state, metrics = step(state, batch)
    return jax.device_get(step.params(state)), jax.device_get(metrics)


def groups():
    """The trees of each optimizer as one, some for each mesh: a compilation takes seconds."""
    found = {}
    for shapes, stacked, sizes, name, stage in TREES():
        key = name, sizes
        found.setdefault(key, []).append((shapes, stacked, stage))
    return {key: (sum((tree[0] for tree in members), ()), sum((tree[1] for tree in members), ()), members[0][2])
            for key, members in found.items()}


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.short_random
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_step_of_every_tree_is_that_of_one_device(name, sizes):
    shapes, stacked, stage = groups()[name, sizes]
    many = math.prod(sizes)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(2 * many, 8)).astype(np.float32), "y": rng.normal(size=2 * many).astype(np.float32)}
    model = Leaves(shapes, stacked)
    params, metrics = one_step(model, sizes, name, stage, batch)
    one, expected = one_step(model, (1,), name, 0, batch)
    chex.assert_trees_all_close(metrics, expected, rtol=1e-5)
    chex.assert_trees_all_equal_shapes(params, one)
    chex.assert_trees_all_close(params, one, rtol=1e-4, atol=2e-5)
