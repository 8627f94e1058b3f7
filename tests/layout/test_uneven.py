"""Leaves whose dims do not divide: padded or merged in storage, and with the numbers of one device."""

import dataclasses
import functools
import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.covering import weekly
from support.flat import flat_step
from support.oracle import loss_difference, param_difference, slow, train
from support.scripts import script
from support.targets import target_devices
from support.workloads import KEY_BIAS, WRAPPERS, classify, kernels_apart, only_matrices, token_batches
from support.zoo import Ensemble, Mixture, Normalised

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax.gather import gather
from zero_jax.layout.layout import _loading
from zero_jax.layout.stored_optimizer import StoredPlacement, needs_shape, run_on_stored
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.sharding.partition import choose_spec, choose_stored_shape
from zero_jax.sharding.stored_shape import StoredShape, identity_shape

P = jax.sharding.PartitionSpec
CONFIG = gpt2.Config(2, 20, 2, vocab_size=257, max_length=17)
FLAVOURS = {"linen": gpt2.build, "nnx": gpt2_nnx.build}
FLAT, PADDED = StoredShape(((7,), (5, 3)), (7, 16)), StoredShape(((7,), (5,), (3,)), (7, 8, 3))


@pytest.mark.parametrize("view", [FLAT, PADDED, StoredShape(((7, 5, 3),), (105,)), identity_shape((7, 5, 3))])
def test_a_leaf_comes_back_as_it_was_stored(view):
    value = jnp.arange(1.0, 106).reshape(7, 5, 3)
    stored = view.store(value)
    assert stored.shape == view.stored and view.shape == (7, 5, 3)
    assert view.padding == int((stored == 0).sum())
    np.testing.assert_array_equal(view.load(stored), value)
    np.testing.assert_array_equal(view.load(np.asarray(stored)), value)
    np.testing.assert_array_equal(view.filled(stored + 1, 0), stored + (stored != 0))


@pytest.mark.parametrize("view", [FLAT, PADDED])
def test_a_loop_reads_slices_of_what_is_stored(view):
    value = jnp.arange(105.0).reshape(7, 5, 3)
    inner = view.drop_dim(0)
    _, slices = jax.lax.scan(lambda _, row: (None, inner.load(row)), None, view.store(value))
    np.testing.assert_array_equal(slices, value)
    again = inner.add_dim(0)  # knows nothing of the size of the dim that it adds
    np.testing.assert_array_equal(again.load(view.store(value)), value)
    np.testing.assert_array_equal(again.store(value), view.store(value))


@pytest.mark.parametrize(("shape", "stacked", "merge", "sizes", "view", "spec"), [
    ((50257, 1600), (), True, {"data": 3}, StoredShape(((50257,), (1600,)), (50259, 1600)), P("data", None)),
    ((50257, 1600), (), True, {"data": 8}, identity_shape((50257, 1600)), P(None, "data")),
    ((48, 1600, 6400), (0,), True, {"data": 1024}, StoredShape(((48,), (1600, 6400)), (48, 10240000)), P(None, "data")),
    ((48, 1600, 6400), (0,), False, {"data": 1024}, StoredShape(((48,), (1600,), (6400,)), (48, 1600, 7168)),
     P(None, None, "data")),
    ((48, 1600, 6400), (0,), True, {"x": 64, "y": 16}, identity_shape((48, 1600, 6400)), P(None, "x", "y")),
    ((1600, 48, 6400), (1,), True, {"data": 1024}, StoredShape(((1600,), (48,), (6400,)), (1600, 48, 7168)),
     P(None, None, "data")),  # its loop does not run over the first dim
    ((3, 5, 7), (), True, {"x": 2, "y": 4}, StoredShape(((3, 5, 7),), (112,)), P(("x", "y"))),
    ((7,), (), True, {"data": 8}, StoredShape(((7,),), (8,)), P("data")),
    ((48,), (0,), True, {"data": 5}, identity_shape((48,)), P(None)),
    ((), (), True, {"data": 8}, identity_shape(()), P()),
    ((0, 7), (), True, {"data": 8}, identity_shape((0, 7)), P(None, None)),
])
def test_how_a_leaf_is_stored(shape, stacked, merge, sizes, view, spec):
    assert choose_stored_shape(shape, sizes, ParamAccess(stacked=stacked), merge=merge) == (view, spec)


@pytest.mark.parametrize(("shape", "stacked", "sizes", "stored", "spec"), [
    ((50257, 1600), (), {"x": 2, "y": 4}, (50304, 1600), P(("x", "y"), None)),  # 1600 / 8 fills no tiles
    ((50257, 4096), (), {"x": 16, "y": 16}, (50432, 4096), P("x", "y")),  # a dim for each axis
    ((768, 50257), (), {"data": 8}, (768, 50257), P("data", None)),  # 96 rows do
    ((50257, 4096), (), {"x": 4, "y": 4}, (50257, 4096), P(None, ("x", "y"))),  # 256 columns do
    ((50257, 1600), (), {"x": 16, "y": 16}, (50272, 1600), P("x", "y")),  # to fill tiles would take 2 %
    ((4, 50257, 768), (0,), {"data": 8}, (4, 50304, 768), P(None, "data", None)),
    ((50257,), (), {"data": 29}, (50257,), P("data")),
])
def test_shards_fill_tiles_on_tpus(shape, stacked, sizes, stored, spec):
    view, chosen = choose_stored_shape(shape, sizes, ParamAccess(stacked=stacked), tiled=True)
    assert (view.stored, chosen) == (stored, spec)
    assert view.shape == shape and view.padding <= 5e-3 * math.prod(shape)
    assert choose_stored_shape(shape, {"only": 1}, tiled=True)[0] == identity_shape(shape)


@pytest.mark.slow
@pytest.mark.parametrize("flavour", [slow("linen"), "nnx"])
def test_rows_padded_as_on_tpus_are_one_device(flavour, monkeypatch):
    """And negative control: rows that are read from the wrong place have another loss."""
    monkeypatch.setattr("zero_jax.layout.make_layout.choose_stored_shape",
                        lambda *args, **options: choose_stored_shape(*args, **{**options, "tiled": True}))
    build, config = FLAVOURS[flavour], gpt2.Config(1, 32, 2, vocab_size=4081, max_length=17)
    data = token_batches(3, size=8, vocab=4081)
    one, many = (train(build(config), *run, batches=data) for run in ((0, 1), (3, 8)))
    assert loss_difference(many, one) < 1e-6
    assert param_difference(many, one, KEY_BIAS) < 1e-5
    stored = {leaf.shape for leaf in jax.tree.leaves(many.state.params)}
    assert (4096, 32) in stored and (4081, 32) not in stored
    load = StoredShape.load
    monkeypatch.setattr(StoredShape, "load", lambda view, value: (
        jnp.roll(load(view, value), 1, 0) if view.padding else load(view, value)))
    assert loss_difference(train(build(config), 3, 8, batches=data), one) > 1e-4


@pytest.mark.grid
@pytest.mark.parametrize(("target", "sizes", "stage", "options"), [
    slow("v5e:2x4", -1, 1, {}),
    slow("v5e:2x4", -1, 2, {"accumulate": 2}),
    slow("v5p:2x2x2", -1, 3, {}),
    slow("v6e:2x4", -1, 3, {}),
    slow("v5e:2x4", -1, 3, {"accumulate": 2, "gather": "step"}),
    slow("v5e:2x4", -1, 3, {"gather": "forward"}),
    slow("v5e:2x4", -1, 3, {"offload": "optimizer"}),
    slow("v5e:2x4", -1, 3, {"optimizer": optax.adafactor(1e-3)}),
    slow("v5e:2x4", (2, 4), 3, {"communication": zero_jax.Communication(weights="int8", gradients=("int4", "int8"))}),
])
def test_rows_padded_on_tpus_are_sent_as_promised(target, sizes, stage, options):
    mesh = zero_jax.make_mesh(sizes, devices=target_devices(target))
    step = flat_step(
        gpt2.build(gpt2.Config(2, 192, 2, vocab_size=8185, max_length=128)), stage,
        **{"mesh": mesh, "precision": "bf16", **options})
    tokens = jax.ShapeDtypeStruct((2 * mesh.size, 128), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    row = next(row for row in step.layout(batch).placements() if row.name.endswith("params/wte/embedding"))
    assert (row.shape, row.padding) == ((8185, 192), 7 * 192 * 4)
    assert not step.compiled_step(batch).report.violations


def batches(num_devices, num=3):
    return token_batches(num, size=num_devices, vocab=257)


@functools.cache
def gpt2_run(flavour, stage, num_devices, size, precision="fp32"):
    return train(FLAVOURS[flavour](CONFIG), stage, num_devices, batches=batches(size), precision=precision)


@pytest.mark.grid
@pytest.mark.parametrize(("flavour", "stage", "num_devices", "precision"), [
    slow("linen", 1, 7, "fp32"), slow("linen", 2, 8, "bf16"), ("linen", 3, 3, "fp32"), slow("nnx", 1, 8, "bf16"),
    slow("nnx", 2, 3, "fp32"), slow("nnx", 3, 7, "fp32")])
def test_gpt2_is_one_device(flavour, stage, num_devices, precision):
    many = gpt2_run(flavour, stage, num_devices, num_devices, precision)
    one = gpt2_run(flavour, 0, 1, num_devices, precision)
    bounds = (1e-6, 1e-5) if precision == "fp32" else (4e-3, 8e-3)
    assert loss_difference(many, one) < bounds[0]
    assert param_difference(many, one, KEY_BIAS) < bounds[1]
    np.testing.assert_allclose(many.norms, one.norms, rtol=1e-5 if precision == "fp32" else 3e-2)
    views = jax.tree.leaves(many.step.layout(batches(num_devices)[0]).stored_shapes.params)
    assert any(view.merges for view in views) and any(view.padding and not view.merges for view in views)


class Odd(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(7)(nn.relu(nn.Dense(29)(nn.relu(nn.Dense(13)(x)))))


def vectors(num=4, size=24):
    rng = np.random.default_rng(2)
    return [{"x": rng.normal(size=(size, 11)).astype(np.float32), "y": rng.integers(0, 7, size)} for _ in range(num)]


def centred(updates, state, params=None):
    return jax.tree.map(lambda u: u - jnp.mean(u) + jnp.mean(jnp.cos(u)), updates), state


def transposed(updates, state, params=None):
    return jax.tree.map(lambda u: u + 0.1 * jnp.flip(u) + jnp.cumsum(u.T, -1).T, updates), state


def stateless(update):
    return optax.chain(optax.GradientTransformation(lambda _: optax.EmptyState(), update), optax.sgd(0.1, momentum=0.9))


UNEVEN = {
    **WRAPPERS,
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "adamw by ndim": optax.adamw(1e-2, weight_decay=0.1, mask=only_matrices),
    "centred": stateless(centred),
    "transposed": stateless(transposed),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 2),
    "every second": optax.MultiSteps(optax.adamw(1e-2), 2),
    "by parts": optax.multi_transform({"kernel": optax.contrib.muon(1e-2), "rest": optax.lamb(1e-2)}, kernels_apart),
}


@functools.cache
def odd_run(name, stage, num_devices):
    return train(Odd(), stage, num_devices, batches=vectors(), loss=classify, optimizer=UNEVEN[name])


QUICK = ("transposed", "by parts")


@pytest.mark.grid
@weekly("name", [name if name in QUICK else slow(name) for name in UNEVEN])
def test_any_optimizer_is_one_device(name):
    one, many = odd_run(name, 0, 1), odd_run(name, 3, 8)
    assert loss_difference(many, one) < 2e-6
    assert param_difference(many, one) < 5e-6
    layout = many.step.layout(vectors()[0])
    for view, leaf in zip(jax.tree.leaves(layout.stored_shapes), jax.tree.leaves(many.state), strict=True):
        assert leaf.shape == view.stored
        if view.padding:
            assert not np.any(np.asarray(view.filled(leaf, 0) != leaf))  # padding is zeros after four steps
    merged = any(view.merges for view in jax.tree.leaves(layout.stored_shapes.params))
    assert merged == (name not in ("muon", "by parts", "transposed", "flattened"))


class Row(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(32)(nn.tanh(nn.Dense(13)(x))), None


class LoopsWithinLoops(nn.Module):
    """Layers stacked in the second dim of their parameters, and loops in a loop."""

    @nn.compact
    def __call__(self, x):
        def scan(block, axis, length):
            return nn.scan(block, variable_axes={"params": axis}, split_rngs={"params": True}, length=length)

        x, _ = scan(Row, 1, 2)()(x, None)
        x, _ = scan(scan(Row, 0, 2), 0, 3)()(x, None)
        return nn.Dense(8)(x)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize(("model", "num_devices"), [
    slow(Normalised(), 7), slow(Mixture, 5), slow(Ensemble(), 5), (LoopsWithinLoops(), 7)],
    ids=["read on entry", "nnx", "vmap", "loops"])
def test_models_of_others_are_one_device(model, num_devices):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(35, 32)).astype(np.float32), "y": rng.integers(0, 8, 35)}
    one, many = (train(model, stage, devices, batches=[batch] * 3, loss=classify, optimizer=optax.sgd(0.1))
                 for stage, devices in ((0, 1), (3, num_devices)))
    assert loss_difference(many, one) < 2e-6
    assert param_difference(many, one) < 1e-6


def without_key(state):
    return dataclasses.replace(state, rng=jax.random.key_data(state.rng))


def test_a_state_comes_back_as_it_was_stored():
    run = odd_run("centred", 3, 8)
    layout = run.step.layout(vectors()[0])
    true = layout.load(run.state)
    assert {leaf.shape for leaf in jax.tree.leaves(true.params)} == {(11, 13), (13,), (13, 29), (29,), (29, 7), (7,)}
    again = layout.store(true)
    assert jax.tree.map(lambda leaf: leaf.sharding, again) == jax.tree.map(lambda leaf: leaf.sharding, run.state)
    chex.assert_trees_all_equal(without_key(again), without_key(run.state))


def test_a_state_is_loaded_by_programs_that_are_compiled_once(caplog):
    """The control: the first time they are compiled."""
    run = odd_run("centred", 3, 8)
    layout = run.step.layout(vectors()[0])
    with jax.log_compiles():
        _loading.cache_clear()
        counts = []
        for _ in range(2):
            caplog.clear()
            layout.load(run.state)
            counts.append(sum("Compiling" in record.message for record in caplog.records))
    assert counts[0] > 0 == counts[1]


def test_what_an_optimizer_needs_is_found():
    home, scalar = StoredPlacement(StoredShape(((5, 3),), (16,))), StoredPlacement(identity_shape(()))
    leaf = jax.ShapeDtypeStruct((16,), jnp.float32)

    def needs(fun, out):
        return bool(needs_shape(fun, (home,), out, leaf))

    assert not needs(lambda x: jnp.where(x > 0, x, 2.0) * jnp.sqrt(jnp.mean(x**2)), home)
    assert not needs(lambda x: jax.lax.cond(x.sum() > 0, lambda x: x * 2, jnp.zeros_like, x), home)
    assert not needs(lambda x: jnp.all(jnp.isfinite(x)), scalar)
    for fun in (lambda x: x.T.T, lambda x: x - x.mean(0, keepdims=True), lambda x: x @ x.T @ x, lambda x: x[::-1]):
        assert needs(fun, home)


@pytest.mark.parametrize("view", [StoredShape(((5, 3),), (16,)), StoredShape(((5,), (3,)), (8, 3))])
def test_whatever_a_function_does_it_sees_the_true_shape(view):
    value, home = jax.random.normal(jax.random.key(0), (5, 3)), StoredPlacement(view)

    def fun(x):
        y = jax.lax.cond(x[0, 0] > 0, jnp.exp, lambda x: x.T.reshape(5, 3), x) + jnp.ones((5, 1))
        return [y, jnp.min(y) * jnp.max(-y), jnp.prod(x + 2), x - x.mean(0, keepdims=True), jnp.sort(y, axis=0) * y,
                jnp.any(x > 9), jnp.full_like(x, 3.0), jax.nn.softplus(x) / jnp.linalg.norm(x)]

    scalar = StoredPlacement(identity_shape(()))
    homes = [home, scalar, scalar, home, home, scalar, home, home]
    found = run_on_stored(fun, (home,), homes)(view.store(value))
    for place, left, right in zip(homes, found, fun(value), strict=True):
        np.testing.assert_allclose(left, place.stored_shape.store(right), rtol=1e-6, atol=1e-7)


def broken(monkeypatch, what):
    if what == "padding of ones":
        monkeypatch.setattr(StoredShape, "store", lambda self, value: (
            STORE(self, value - 1) + 1 if self.padding and value.dtype == jnp.float32 else STORE(self, value)))
    elif what == "padding that is reduced":
        monkeypatch.setattr(StoredShape, "filled", lambda self, value, padding: value)
    else:  # an optimizer that is given what is stored
        monkeypatch.setattr("zero_jax.layout.stored_optimizer._placements", lambda layout: None)
    return train(Odd(), 3, 8, batches=vectors(), loss=classify, optimizer=UNEVEN["centred"])


STORE = StoredShape.store


@pytest.fixture
def scatters_traced_anew():
    """`ParamUse` and JAX keep traces: this test must not have those of others, nor leave its own to them."""
    gather._scatter.cache_clear()
    jax.clear_caches()
    yield
    gather._scatter.cache_clear()
    jax.clear_caches()


@pytest.mark.parametrize("what", ["padding of ones", "padding that is reduced", "padding that is averaged"])
def test_padding_that_counts_is_told(monkeypatch, scatters_traced_anew, what):
    """Negative controls: what the comparison sees."""
    run = broken(monkeypatch, what)
    one = odd_run("centred", 0, 1)
    assert param_difference(run, one) > 1e-4 or np.abs(run.norms / one.norms - 1).max() > 1e-3


@pytest.fixture
def table():
    with script("tables/uneven") as module:
        yield module


@weekly("name", ["GPT-2 1.5B", "BERT-Large", "Turing-NLG", "ResNet-50"])
def test_99_percent_of_a_real_model_is_sharded(table, name, monkeypatch):
    """And negative control: with dims neither merged nor padded it is not."""
    target_devices("h100:8")
    optimizer = table.OPTIMIZERS["sgd" if name == "ResNet-50" else "adamw"]
    for layout in table.layouts(name, optimizer, table.NUM_SHARDS).values():
        cell = table.measure(layout)
        assert 1 <= cell.ratio <= 1.01 and cell.padding <= 0.01 * cell.true and cell.replicated <= 0.01 * cell.true
    monkeypatch.setattr(
        "zero_jax.layout.make_layout.choose_stored_shape", lambda shape, sizes, read=None, *, tiled=False, **_: (
            identity_shape(shape), choose_spec(shape, sizes, read, tiled=tiled)))
    assert table.measure(table.layouts(name, optimizer, (1024,))[1024]).ratio > (1.0001 if name == "BERT-Large" else 2)


def test_params_need_a_layout():
    with pytest.raises(ValueError, match="no layout yet"):
        zero_jax.make_zero_train_step(Odd(), 3).params(odd_run("centred", 3, 8).state)


def test_frozen_leaves_that_do_not_divide():
    batch = token_batches(1, size=6)[0]
    step = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3, mesh=zero_jax.make_mesh(3), frozen=("wte",))
    row = next(row for row in step.layout(batch).placements() if row.name == "frozen/wte/embedding")
    assert row.shape == (257, 20) and row.padding and row.device_bytes == row.stored_bytes / 3


def test_dims_are_merged_as_far_as_positions_fit_int32():
    """65,536 x 65,536 over 640 is padded, as a preset of 10T needs. Control: half of its rows are merged."""
    for rows, merges in ((65536, False), (32767, True)):
        stored, _ = choose_stored_shape((2, rows, 65536 + merges), {"data": 640}, ParamAccess((0,)))
        assert stored.merges == merges and math.prod(stored.stored) % 640 == 0
        value = jax.ShapeDtypeStruct(stored.stored, jnp.float32)
        assert jax.eval_shape(lambda value, stored=stored: stored.filled(value, 0), value).shape == stored.stored
    flat = StoredShape(((2,), (65536, 65536)), (2, 65536**2 + 384))
    with pytest.raises(OverflowError):
        jax.eval_shape(lambda value: flat.filled(value, 0), jax.ShapeDtypeStruct(flat.stored, jnp.float32))
