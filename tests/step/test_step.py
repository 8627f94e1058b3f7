"""The step itself: layouts stay, one compilation, donation, metrics, evaluation, what is listed."""

import collections
from pathlib import Path

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.covering import weekly
from support.oracle import slow
from support.workloads import classify, token_batches, vector_batches

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax.frontends.trace_access import smallest_plain
from zero_jax.gather.gather import gather_sequence
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.sharding.partition import choose_spec
from zero_jax.xla import devices as xla_devices

P = jax.sharding.PartitionSpec
CONFIG = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)


@pytest.mark.grid
@weekly("stage, precision", [
    (3, "fp32"), slow(1, "fp32"), slow(2, "fp32"), (0, "fp32"), slow(0, "bf16"), slow(1, "bf16"), (2, "bf16"),
    slow(3, "bf16")])
def test_no_leaf_moves_and_one_compilation(stage, precision):
    step = zero_jax.make_zero_train_step(gpt2.build(CONFIG), stage, precision=precision)
    batches = token_batches(5)
    chex.clear_trace_counter()  # which counts by source line, so all rows of this test together
    step.functions.step = chex.assert_max_traces(step.functions.step, n=1)
    state = step.init(jax.random.key(0), batches[0])
    declared = jax.tree.leaves(step.layout(batches[0]).shardings)
    compiled = collections.Counter()

    def count(event, seconds, **_):
        compiled.update([event] if "backend_compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for batch in batches:
            for leaf, sharding in zip(jax.tree.leaves(state), declared, strict=True):
                assert leaf.sharding == sharding
            state, metrics = step(state, batch)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert sum(compiled.values()) == 1
    assert int(state.step) == 5


def test_the_state_is_donated():
    step = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3)
    batch = token_batches(1)[0]
    state = step.init(jax.random.key(0), batch)
    old = jax.tree.leaves(state.params)
    step(state, batch)
    assert all(leaf.is_deleted() for leaf in old)


@pytest.mark.slow
def test_the_default_step_runs():
    step = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3)
    state = step.init(jax.random.PRNGKey(0), token_batches(1)[0])  # an old-style key too
    state, metrics = step(state, token_batches(1)[0])
    assert sorted(metrics) == ["grad_norm", "loss"]
    chex.assert_shape(list(metrics.values()), ())
    chex.assert_type(list(metrics.values()), jnp.float32)


def test_what_the_loss_returns_is_a_metric():
    model = nn.Dense(8)
    step = zero_jax.make_zero_train_step(model, 2, loss=classify, optimizer=optax.sgd(0.1))
    batch = vector_batches(1)[0]
    state = step.init(jax.random.key(0), batch)
    params = jax.device_get(state.params)
    _, metrics = step(state, batch)
    logits = batch["x"] @ params["kernel"]
    np.testing.assert_allclose(float(metrics["accuracy"]), (logits.argmax(-1) == batch["y"]).mean(), rtol=1e-6)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2.build, gpt2_nnx.build])
def test_evaluation_changes_nothing_and_drops_nothing_out(build):
    config = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16, dropout=0.5)
    step = zero_jax.make_zero_train_step(build(config), 3)
    batch = token_batches(1)[0]
    state = step.init(jax.random.key(0), batch)
    evaluate = step.evaluator()
    first, second = evaluate(state, batch), evaluate(state, batch)
    assert float(first) == float(second)
    logits = step.evaluator(lambda model, batch: model(batch["inputs"]))(state, batch)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    np.testing.assert_allclose(float(first), float(expected), rtol=1e-5)
    _, metrics = step(state, batch)
    assert float(metrics["loss"]) != float(first)  # training drops out


def test_leaves_that_do_not_divide_are_listed_with_their_bytes():
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(7, name="odd")(nn.Dense(13, name="prime")(x))

    step = zero_jax.make_zero_train_step(Odd(), 3, loss=lambda m, b: m(b["x"]).mean(), optimizer=optax.sgd(0.1))
    layout = step.layout({"x": np.ones((8, 16), np.float32)})
    assert not layout.replicated()
    text = layout.describe()
    assert "1,288 bytes of state, 176 on each device; 36 bytes of padding, 2.795%" in text
    for line in ("params/odd/bias: float32 7, P('data',): 4 of 28 bytes [dim 0 padded: 7 to 8, 14.29%]",
                 "params/odd/kernel: float32 13 x 7, P('data',): 48 of 364 bytes [13 x 7 merged, dim 0 padded: 91 to ",
                 "params/prime/bias: float32 13, P('data',): 8 of 52 bytes [dim 0 padded: 13 to 16, 23.08%]",
                 "params/prime/kernel: float32 16 x 13, P('data', None): 104 of 832 bytes\n"):
        assert line in text, text


def test_leaves_too_small_to_matter_stay_whole_and_are_listed():
    step = zero_jax.make_zero_train_step(nn.Dense(33), 3, loss=lambda m, b: m(b["x"]).mean(), optimizer=optax.sgd(0.1))
    layout = step.layout({"x": np.ones((8, 8192), np.float32)})
    assert {row.name: row.bytes for row in layout.replicated()} == {"params/bias": 132}
    assert "replicated (could not be sharded): params/bias (132 bytes)" in layout.describe()
    assert "no dims of (33,) that no loop runs over divide by 8" in layout.describe()


@pytest.mark.parametrize(("shape", "read", "spec"), [
    ((64, 32), ParamAccess(), P("data", None)),
    ((12, 32), ParamAccess(), P(None, "data")),
    ((8, 12, 32), ParamAccess(stacked=(0,)), P(None, None, "data")),
    ((8, 12), ParamAccess(stacked=(0,)), P(None, None)),
    ((64, 512), ParamAccess(), P(None, "data")),  # only 512 / 8 fills a TPU's tiles
    ((), ParamAccess(), P()),
    ((0, 8), ParamAccess(), P(None, "data")),
    ((7, 5), ParamAccess(), P(None, None)),
])
def test_which_dim_is_sharded(shape, read, spec):
    assert choose_spec(shape, {"data": 8}, read) == spec


@pytest.mark.parametrize(("shape", "tiled", "spec"), [
    ((64, 3), False, P(("x", "y"), None)),
    ((6, 12), False, P("x", "y")),  # no dim takes both
    ((6, 7), False, P("x", None)),  # and the rest is replicated
    ((4096, 4096), False, P(("x", "y"), None)),
    ((4096, 4096), True, P("x", "y")),  # whole tiles either way, and a dim for each axis
    ((48, 65536), True, P(None, ("x", "y"))),
    ((4, 7), True, P("y", None)),
])
def test_axes_that_are_factored_may_split_different_dims(shape, tiled, spec):
    assert choose_spec(shape, {"x": 2, "y": 4}, tiled=tiled) == spec


def test_a_torus_gathers_the_minor_most_axis_first_and_others_a_dim_at_once():
    """Of dims split over different axes others gather the major axis first, the one between hosts."""
    spec, apart = P(None, ("x", "y")), P("y", "x")
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    assert gather_sequence(spec, MeshAxes.of(mesh, ("x", "y"))) == [spec, P(None, None)]
    assert gather_sequence(apart, MeshAxes.of(mesh, ("x", "y"))) == [apart, P("y", None), P(None, None)]
    assert gather_sequence(apart, MeshAxes.of(mesh, ("x", "y")), ("x",)) == [apart, P(None, "x"), P(None, None)]
    described = xla_devices.target_devices("v5e:2x4")
    torus = jax.sharding.Mesh(np.array(described).reshape(2, 4), ("x", "y"))
    assert gather_sequence(spec, MeshAxes.of(torus, ("x", "y"))) == [spec, P(None, "x"), P(None, None)]
    assert gather_sequence(apart, MeshAxes.of(torus, ("x", "y"))) == [apart, P(None, "x"), P(None, None)]
    other = P(None, ("y", "x"))  # whose minor axis is the major one of the mesh
    assert gather_sequence(other, MeshAxes.of(torus, ("x", "y"))) == [other, P(None, "y"), P(None, None)]


def test_a_weight_split_over_both_axes_crosses_hosts_in_parts():
    """What a device gathers between hosts is its part of the columns. The other way around it would be the whole."""
    step = zero_jax.make_zero_train_step(nn.Dense(12, use_bias=False), 3, mesh=zero_jax.make_mesh((2, 4)),
                                         loss=lambda model, batch: jnp.mean(model(batch) ** 2))
    batch = np.ones((8, 6), np.float32)
    layout = step.layout(batch)
    assert layout.state.params["kernel"].sharding.spec == P("data_0", "data_1")
    gathers = [(c.axes(layout.mesh.shape), c.payload_bytes) for c in step.compiled_step(batch).collectives
               if c.kind == "all-gather"]
    assert set(gathers) == {(("data_0",), 4 * 6 * 12 / 4), (("data_1",), 4 * 6 * 12)}


@pytest.mark.parametrize("needed", [set(), {"c"}, {"a", "h"}, set("abcdefgh")])
def test_the_smallest_set_is_found_by_bisection(needed):
    assert smallest_plain(lambda names: needed <= names, list("abcdefgh")) == needed


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_simulated_devices_have_threads_to_spare():
    """With one for each device, a batched `eigh` on all of them hangs."""
    jax.block_until_ready(jnp.zeros(1))
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert sum("XLAEigen" in name for name in names) >= 2 * jax.device_count()
