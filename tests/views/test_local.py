"""The local view: programs in parts have the values of one device, and so have steps."""

import dataclasses
import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.covering import weekly
from support.oracle import loss_difference, oracle, param_difference, slow, train
from support.workloads import KEY_BIAS, token_batches

import zero_jax
from models import gpt2
from zero_jax.jaxpr.equations import all_eqns, primitive_of, scope_of
from zero_jax.jaxpr.primitives import RAGGED_DOT, SCAN
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.step import gradients
from zero_jax.views import local
from zero_jax.views.in_parts import local_view

BATCH, WIDTH = 16, 6
CONFIG = gpt2.Config(2, 32, 2, vocab_size=64, max_length=16)
KEY = jax.random.key(3)


def image(x):
    return jnp.tile(x[:, :, None, None], (1, 1, 6, 3))


def conv(x, w, **how):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **how)


def scanned(cell):
    return lambda x, w: jax.lax.scan(lambda carry, _: (cell(carry, w), carry.sum()), x, None, length=3)


PROGRAMS = {
    "tiled": lambda x, w: (jnp.tile(x, (3, 2)) * jnp.cos(jnp.arange(3 * x.shape[0]))[:, None]) @ jnp.tile(w, (2, 1)),
    "mean": lambda x, w: x.mean(),
    "variance": lambda x, w: jnp.log(jnp.var(x @ w, axis=0)),
    "weighted mean": lambda x, w: (x * (x > 0)).sum() / (x > 0).sum(),
    "largest and smallest": lambda x, w: (x.max(0), x.min(), (x > 1).any(), (x > -9).all()),
    "argmax over the batch": lambda x, w: x.argmax(0),
    "product over the batch": lambda x, w: x.prod(0),
    "softmax": lambda x, w: jax.nn.softmax(x @ w),
    "softmax over the batch": lambda x, w: jax.nn.softmax(x @ w, axis=0),
    "covariance": lambda x, w: x.T @ x,
    "similarities": lambda x, w: x @ x.T,
    "normalised similarities": lambda x, w: jax.nn.log_softmax(x @ x.T)[jnp.arange(BATCH), jnp.arange(BATCH)],
    "sorted over the batch": lambda x, w: jnp.sort(x, axis=0),
    "sorted": lambda x, w: jnp.sort(x, axis=1),
    "running sums over the batch": lambda x, w: jnp.cumsum(x, axis=0),
    "running sums": lambda x, w: jnp.cumsum(x, axis=1),
    "reversed": lambda x, w: (x[::-1], x[:, ::-1]),
    "parts of it": lambda x, w: (x[:, 2:4], x[3:5], x[1], x[:, -1]),
    "halves of it": lambda x, w: x.reshape(2, BATCH // 2, WIDTH).sum(0),
    "pairs": lambda x, w: x.reshape(BATCH // 2, 2, WIDTH).max(1),
    "merged dims": lambda x, w: (x.reshape(-1).sum(), x.T.reshape(-1) * 2, x.reshape(BATCH * 2, 3) + 1),
    "merged minor dim and noise": lambda x, w: x.T.reshape(-1) + jax.random.normal(KEY, (BATCH * WIDTH,)),
    "positions": lambda x, w: x * jnp.arange(BATCH)[:, None] + jnp.linspace(0, 1, BATCH)[:, None],
    "two copies": lambda x, w: jnp.concatenate([x, 2 * x]).mean(1),
    "beside each other": lambda x, w: jnp.concatenate([x, x**2, jnp.ones((BATCH, 1))], axis=1),
    "padded": lambda x, w: (jnp.pad(x, ((0, 0), (1, 2))), jnp.pad(x, ((1, 0), (0, 0)))),
    "rows by number": lambda x, w: w[(jnp.abs(x[:, 0]) * 3).astype(int) % WIDTH],
    "its rows by number": lambda x, w: x[(jnp.abs(x[:, 0]) * 3).astype(int) % BATCH],
    "columns of rows": lambda x, w: x[jnp.arange(BATCH), (jnp.abs(x[:, 0]) * 3).astype(int) % WIDTH],
    "columns by number": lambda x, w: jnp.take_along_axis(x, (jnp.abs(x[:, :1]) * 3).astype(int) % WIDTH, axis=1),
    "histogram": lambda x, w: jnp.zeros(WIDTH).at[(jnp.abs(x[:, 0]) * 3).astype(int) % WIDTH].add(x[:, 1]),
    "histogram on top": lambda x, w: w.at[(jnp.abs(x[:, 0]) * 3).astype(int) % WIDTH].add(x),
    "last of equal rows": lambda x, w: w.at[(jnp.abs(x[:, 0]) * 3).astype(int) % WIDTH].max(x),
    "one row set": lambda x, w: (x.at[3].set(0.0), x.at[:, 2].set(1.0), x.at[2:5, 1:3].add(1.0)),
    "largest of each": lambda x, w: jax.lax.top_k(x, 2),
    "largest of the batch": lambda x, w: jax.lax.top_k(x.T, 2),
    "dropout": lambda x, w: jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x, 0),
    "noise": lambda x, w: (x + jax.random.normal(KEY, x.shape), (x.T + jax.random.uniform(KEY, x.T.shape)).sum(1)),
    "a key for each": lambda x, w: jax.vmap(lambda key, row: row * jax.random.uniform(key, (WIDTH,)))(
        jax.random.split(KEY, BATCH), x),
    "permuted": lambda x, w: x[jax.random.permutation(KEY, BATCH)],
    "convolution": lambda x, w: conv(image(x), jnp.ones((3, 3, 3, 2))),
    "gradient of a convolution": lambda x, w: jax.grad(lambda k: (conv(image(x), k) ** 2).mean())(
        jnp.ones((3, 3, 3, 2))),
    "gradient of a grouped convolution": lambda x, w: jax.grad(lambda k: (conv(
        image(x), k, feature_group_count=3) ** 2).mean())(jnp.ones((3, 3, 1, 6))),
    "pooling": lambda x, w: jax.grad(lambda x: (nn.max_pool(image(x), (2, 2), (2, 2)) ** 2).mean())(x),
    "loop": scanned(lambda x, w: jnp.tanh(x @ w)),
    "loop with a sum": scanned(lambda x, w: x - x.mean(0) @ w),
    "loop from zeros": lambda x, w: jax.lax.scan(
        lambda carry, part: (jnp.tanh(carry + part), carry), jnp.zeros(BATCH), x.T),
    "loop over examples": lambda x, w: jax.lax.scan(lambda carry, row: (carry + row @ w, carry), jnp.zeros(WIDTH), x),
    "map over examples": lambda x, w: jax.lax.map(lambda row: jnp.sort(row @ w), x),
    "loop of which a part is summed": lambda x, w: jax.lax.fori_loop(
        0, 3, lambda i, c: (c[0] + (x * i).sum(0), c[1] + x), (jnp.zeros(WIDTH), x)),
    "while the batch is large": lambda x, w: jax.lax.while_loop(lambda x: (x**2).mean() > 0.01, lambda x: x / 2, x),
    "branches": lambda x, w: jax.lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - x.mean(0), x),
    "branches of a whole value": lambda x, w: jax.lax.cond(w.sum() > 0, lambda x: x.sum(0), lambda x: w[0], x),
    "gradient of a loop": lambda x, w: jax.grad(lambda w: scanned(lambda x, w: jnp.tanh(x @ w))(x, w)[0].var())(w),
    "checkpointed": lambda x, w: jax.grad(jax.checkpoint(lambda w: jnp.tanh((x @ w) - (x @ w).mean(0)).var()))(w),
    "relu and its derivative": lambda x, w: jax.grad(lambda w: jax.nn.relu(jnp.zeros_like(x) @ w).sum())(w),
    "decompositions": lambda x, w: jnp.linalg.cholesky(jax.vmap(lambda r: jnp.outer(r, r))(x) + 9 * jnp.eye(WIDTH)),
    "a transform": lambda x, w: jnp.abs(jnp.fft.fft(x)) + jnp.abs(jnp.fft.fft(x, axis=0)),
    "einsum": lambda x, w: jnp.einsum("bi,ij,bj->b", x, w, x),
    "through host memory": lambda x, w: jax.device_put(jax.device_put(
        x.sum(1), jax.memory.Space.Host), jax.memory.Space.Device) + 1,
    "second derivatives": lambda x, w: jax.hessian(lambda v: jnp.tanh(x @ v).mean())(w[0]),
}


@functools.cache
def arrays():
    return np.asarray(jax.random.normal(jax.random.key(0), (BATCH, WIDTH))), np.asarray(
        jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)))


def in_parts(fun, axes, *args, specs=None):
    closed = jax.make_jaxpr(fun)(*args)
    specs = specs or (axes.batch_spec, P())
    local = local_view(closed, axes, specs, [None] * len(closed.jaxpr.outvars))
    placed = [jax.device_put(arg, NamedSharding(axes.mesh, spec)) for arg, spec in zip(args, specs, strict=True)]
    return jax.jit(jax.extend.core.jaxpr_as_fun(local))(*placed)


def plainly(fun, *args):
    return jax.tree.leaves(jax.jit(fun)(*args))


def differs(fun, other, args=None, **sizes):
    args = args or arrays()
    found, expected = in_parts(fun, MeshAxes.of(zero_jax.make_mesh(**sizes)), *args), plainly(other, *args)
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
               for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:Every device computes the whole")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_in_parts_has_the_values_of_one_device(name):
    with jax.numpy_rank_promotion("allow"):
        assert differs(PROGRAMS[name], PROGRAMS[name], data=(4, 2)) < 2e-5


def test_statistics_of_each_device_alone_are_told_apart():
    """Negative control: the mean over each device's examples is another value."""
    with jax.numpy_rank_promotion("allow"):
        assert differs(lambda x, w: x - x.mean(0), lambda x, w: x - jnp.repeat(x.reshape(8, 2, WIDTH).mean(1), 2, 0),
                       data=8) > 1e-2
        assert differs(lambda x, w: x + jax.random.normal(KEY, x.shape), lambda x, w: x + jnp.tile(
            jax.random.normal(KEY, (2, WIDTH)), (8, 1)), data=8) > 1e-2


@pytest.mark.parametrize("fun", [jax.nn.gelu, jax.scipy.special.erfinv, jax.nn.silu],
                         ids=["gelu", "erfinv", "silu"])
def test_gradients_of_activations_are_computed_in_parts(fun):
    """Of exact GELU, too, whose derivative has a primitive of its own from JAX 0.12 on: no warning."""
    exact = functools.partial(fun, approximate=False) if fun is jax.nn.gelu else fun

    def program(x, w):
        return jax.grad(lambda x: exact(jnp.tanh(x @ w) / 2).sum())(x)

    assert differs(program, program, data=8) < 2e-5


def test_what_is_computed_whole_is_named():
    with pytest.warns(UserWarning, match="computes the whole of .*sort"):
        in_parts(PROGRAMS["sorted over the batch"], MeshAxes.of(zero_jax.make_mesh(8)), *arrays())


def stacked(w):
    return jnp.stack([w, 2 * w, w.T])


def grouped(x, w, last=8):
    """Three groups of rows, of which the middle one begins and ends within a device's."""
    return jax.lax.ragged_dot(x, w, jnp.array([1, BATCH - 9, last]))


def routed(x, w):
    """Each row multiplied by the matrix that it chooses, in the order of a sort of all rows."""
    chosen = jnp.argmax(x[:, :3], -1)
    order = jnp.argsort(chosen)
    out = jax.lax.ragged_dot(x[order], stacked(w), jnp.bincount(chosen, length=3).astype(jnp.int32))
    return out[jnp.argsort(order)]


PROGRAMS |= {
    "rows in the order of a sort": routed,
    "gradient of rows in the order of a sort": lambda x, w: jax.grad(
        lambda *args: (routed(*args) ** 2).mean(), (0, 1))(x, w),
}


def products_of(fun):
    """The numbers of rows that each device multiplies in groups."""
    closed = jax.make_jaxpr(fun)(*arrays())
    axes = MeshAxes.of(zero_jax.make_mesh(8))
    local = local_view(closed, axes, (axes.batch_spec, P()), [None] * len(closed.jaxpr.outvars))
    return {eqn.invars[0].aval.shape[0] for eqn in all_eqns(local.jaxpr) if eqn.primitive.name == RAGGED_DOT}


@pytest.mark.filterwarnings("ignore:Every device computes the whole of sort")
def test_rows_in_the_order_of_a_sort_are_multiplied_in_parts():
    """Negative control: products of a value that every device has are of all rows."""
    assert products_of(routed) == {BATCH // 8}
    assert products_of(lambda x, w: routed(w[jnp.arange(BATCH) % WIDTH], w).sum() + x.sum()) == {BATCH}


GROUPS = {
    "products of groups": lambda x, w: jax.grad(lambda *args: (grouped(*args) ** 2).sum(), (0, 1))(x, stacked(w)),
    "groups of fewer rows": lambda x, w: grouped(x, stacked(w), 5),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_rows_are_multiplied_in_parts(name):
    """No warning: no device computes the whole of it."""
    assert differs(GROUPS[name], GROUPS[name], data=(4, 2)) < 2e-5


def over_both(fun, specs, out):
    return jax.shard_map(fun, in_specs=specs, out_specs=out, check_vma=False)


SPLIT = {
    "split by both": ((P("data"), P(("tensor", "data"))), lambda x, w: jnp.tanh(x @ w.T) @ w),
    "split by both, the other first": ((P("data"), P(("data", "tensor"))), lambda x, w: jnp.tanh(x @ w.T) @ w),
    "split in two dims": ((P("data", "tensor"), P("data", "tensor")), lambda x, w: (w @ x.T, x.sum())),
    "gradient": ((P("data"), P("tensor")), lambda x, w: jax.grad(lambda w: (jnp.tanh(x @ w.T) ** 2).mean())(w)),
    "constraints": ((P("data"), P("tensor", "data")), lambda x, w: constrained(
        constrained(x @ constrained(w, P("tensor")).T, P("data", "tensor")).sum(0), P(P.UNCONSTRAINED))),
    "statistics in 16 bits": ((P("data", "tensor"), P()), lambda x, w: (
        jnp.round(x).astype(jnp.bfloat16).sum(0), x.astype(jnp.bfloat16).max(0), (x > 2).any(0))),
    "the batch sorted": ((P("data", "tensor"), P()), lambda x, w: jnp.sort(x, 0)),
    "a shard_map over both": ((P("data"), P("tensor")), lambda x, w: over_both(
        lambda x, w: jax.lax.psum(x @ w.T, "tensor") + x.shape[0], (P("data", "tensor"), P(None, "tensor")), P("data")
        )(x, w)),
    "a shard_map of dims split by both": ((P("data"), P("tensor")), lambda x, w: over_both(
        lambda w: w + 10 * jax.lax.axis_index("tensor"), P(("tensor", "data")), P(("tensor", "data")))(w)),
    "in a loop, checkpointed": ((P("data"), P("tensor")), lambda x, w: jax.grad(lambda w: jax.lax.scan(
        jax.checkpoint(lambda carry, _: (constrained(jnp.tanh(carry @ w.T), P("data", "tensor")) @ w, None)),
        x, None, length=3)[0].var())(w)),
}
"""How (x, w) are sharded, x: (16, 8), w: (16, 8); a program of them, in the mesh of data=4, tensor=2."""


def constrained(value, spec):
    return jax.lax.with_sharding_constraint(value, NamedSharding(zero_jax.make_mesh(tensor=2), spec))


@pytest.mark.filterwarnings("ignore:Every device computes the whole of sort")
@pytest.mark.parametrize("name", SPLIT)
def test_a_program_in_parts_beside_tensor_has_the_values_of_one_device(name):
    specs, fun = SPLIT[name]
    mesh, args = zero_jax.make_mesh(tensor=2), [jax.random.normal(jax.random.key(i), (16, 8)) for i in range(2)]
    with jax.set_mesh(mesh):
        found = in_parts(fun, MeshAxes.of(mesh), *args, specs=specs)
        expected = jax.tree.leaves(jax.jit(fun)(*args))
    chex.assert_trees_all_close([np.asarray(each, np.float32) for each in found],
                                [np.asarray(each, np.float32) for each in expected], rtol=1e-5, atol=1e-5)


def test_rows_in_another_order_are_told_apart():
    """Negative control: a dim that `tensor` splits first is not one that `data` splits first."""
    mesh, args = zero_jax.make_mesh(tensor=2), [jax.random.normal(jax.random.key(i), (16, 8)) for i in range(2)]
    (found,) = in_parts(lambda x, w: w * 2, MeshAxes.of(mesh), *args, specs=(P("data"), P(("tensor", "data"))))
    other = args[1].reshape(4, 2, 2, 8).swapaxes(0, 1).reshape(16, 8)
    assert np.allclose(found, args[1] * 2) and not np.allclose(found, other * 2)


SEQUENCES = np.asarray(jax.random.normal(jax.random.key(4), (8, 16, WIDTH)))


def attended(x, w):
    queries, keys, values = (each.reshape(8, 16, 2, 3) for each in (x @ w, x, x @ w.T))
    return jax.nn.dot_product_attention(queries, keys, values, is_causal=True).reshape(x.shape)


def rotated(x):
    angles = jnp.arange(16)[:, None] / 10 ** (jnp.arange(3) / 3)
    return jnp.concatenate([x[..., :3] * jnp.cos(angles), x[..., 3:] * jnp.sin(angles)], axis=-1)


SEQUENCE_PROGRAMS = {
    "sums of tokens": lambda x, w: (x.sum(1), x.sum((0, 1)), x.sum(1).mean(0), x.max(1), x.argmax(1)),
    "shifts": lambda x, w: (x[:, 1:] - x[:, :-1], jnp.roll(x, 1, axis=1) * x, x[:, ::-1], x[:, 0], x[:, 3:5]),
    "padded in front": lambda x, w: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1] + x,
    "running sums": lambda x, w: (jnp.cumsum(x, axis=1), jax.lax.associative_scan(jnp.add, x, axis=1)),
    "positions": lambda x, w: x + jnp.arange(16)[:, None] + jnp.tile(w, (3, 1))[jnp.arange(16)],
    "gradient of positions": lambda x, w: jax.grad(lambda t: jnp.tanh(x + jnp.tile(t, (3, 1))[:16]).mean())(w),
    "attention": lambda x, w: attended(rotated(x), w),
    "gradient of attention": lambda x, w: jax.grad(lambda x, w: (attended(x, w) ** 2).mean(), (0, 1))(x, w),
    "gradient of attention in a loop": lambda x, w: jax.grad(lambda w: jax.lax.scan(jax.checkpoint(
        lambda x, _: (attended(x, w), None)), x, None, length=2)[0].mean())(w),
    "all tokens in one dim": lambda x, w: (x.reshape(-1, WIDTH) @ w + jax.random.normal(KEY, (128, WIDTH)),
                                           (x.reshape(-1, WIDTH) @ w).reshape(8, 16, WIDTH), x.reshape(16, 8, WIDTH)),
    "chunks": lambda x, w: (x.reshape(8, 4, 4, WIDTH).sum(2), x.reshape(32, 4, WIDTH).max(1)),
    "loop over the sequence": lambda x, w: jax.lax.scan(
        lambda carry, part: (jnp.tanh(carry @ w + part), carry), jnp.zeros((8, WIDTH)), x.swapaxes(0, 1)),
    "loop of sums": lambda x, w: jax.lax.fori_loop(0, 3, lambda i, c: (
        c[0] + x.sum((0, 1)), c[1] + x.sum(0), c[2] + x.sum(1)), (
            jnp.zeros(WIDTH), jnp.zeros((16, WIDTH)), jnp.zeros((8, WIDTH)))),
    "convolution": lambda x, w: jax.grad(lambda k: (jax.lax.conv_general_dilated(
        x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) ** 2).mean())(jnp.stack([w, w, w])),
    "normalised": lambda x, w: ((x - x.mean(1, keepdims=True)) / x.var((0, 1)), x - x.mean((0, 1))),
    "branches": lambda x, w: jax.lax.cond(
        x.mean() > 0, lambda x: x - x.mean(1, keepdims=True), lambda x: x[:, ::-1], x),
}


def of_sequences(fun, other, **sizes):
    return differs(fun, other, (SEQUENCES, arrays()[1]), **sizes)


@pytest.mark.filterwarnings("ignore:Every device computes the whole")
@pytest.mark.parametrize("name", SEQUENCE_PROGRAMS)
def test_a_program_of_split_sequences_has_the_values_of_one_device(name):
    with jax.numpy_rank_promotion("allow"):
        assert of_sequences(SEQUENCE_PROGRAMS[name], SEQUENCE_PROGRAMS[name], data=(2, 2), context=2) < 2e-5


def test_sums_of_a_part_of_each_sequence_are_told_apart():
    """Negative control: means and positions of the tokens that one device has."""
    with jax.numpy_rank_promotion("allow"):
        assert of_sequences(lambda x, w: x - x.mean(1, keepdims=True), lambda x, w: x - jnp.repeat(
            x.reshape(8, 2, 8, WIDTH).mean(2), 8, axis=1), data=4, context=2) > 1e-2
        assert of_sequences(lambda x, w: x + jnp.arange(16)[:, None], lambda x, w: x + jnp.tile(
            jnp.arange(8), 2)[:, None], data=4, context=2) > 1


def test_what_has_no_rule_along_the_sequence_is_computed_in_parts_along_the_examples():
    with pytest.warns(UserWarning, match="computes the whole of cumsum over context:"):
        of_sequences(lambda x, w: jnp.cumsum(x, axis=1), lambda x, w: jnp.cumsum(x, axis=1), data=4, context=2)


class Uneven(nn.Module):
    """No dim of a part divides over four devices; `tensor` splits one of each kernel."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.relu(nn.Dense(14, name="up")(x)))
        return nn.Dense(10, name="down")(x)


RULES = [("up/kernel", P(None, "tensor")), ("up/bias", P("tensor")), ("down/kernel", P("tensor", None))]


@weekly("stage, sizes", [(3, {"tensor": 2}), (1, {"tensor": 2}), *(
    slow(stage, sizes) for stage, sizes in itertools.product(range(4), (
        {"tensor": 2}, {"data": (2, 2), "tensor": 2}, {"replica": 2, "tensor": 2}))
    if (stage, sizes) not in [(3, {"tensor": 2}), (1, {"tensor": 2})])])
def test_uneven_leaves_beside_tensor_are_one_device(stage, sizes):
    batches = [{"x": np.random.RandomState(i).randn(8, 10).astype(np.float32)} for i in range(3)]
    options = {"batches": batches, "loss": lambda model, batch: ((model(batch["x"]) - batch["x"]) ** 2).mean(),
               "optimizer": SGD}
    one, many = oracle(Uneven(), **options), train(Uneven(), stage, zero_jax.make_mesh(**sizes),
                                                   tensor_rules=RULES, **options)
    assert loss_difference(many, one) < 1e-6 and param_difference(many, one) < 1e-6
    assert param_difference(dataclasses.replace(many, params=one.start), one) > 1e-3


@pytest.mark.grid
@pytest.mark.parametrize("stage, sizes", [
    (3, {"data": 2, "replica": 2, "context": 2}), slow(0, {"data": 4, "context": 2}),
    slow(1, {"data": 1, "context": 8}), slow(2, {"data": (2, 2), "context": 2})])
def test_gpt2_of_split_sequences_is_one_device(stage, sizes):
    many = train(gpt2.build(CONFIG), stage, zero_jax.make_mesh(**sizes), batches=token_batches(),
                 precision="fp32")
    one = oracle(gpt2.build(CONFIG), batches=token_batches(), precision="fp32")
    assert loss_difference(many, one) < 1e-6 and param_difference(many, one, KEY_BIAS) < 1e-5


SGD = optax.sgd(0.1, momentum=0.9)


@weekly("remat, narrow", [("full", True), (None, True), ("full", False)], ids=str)
def test_gradients_of_layers_are_stacked_as_they_are_reduced(remat, narrow, monkeypatch):
    """Negative control: without the pass backward holds all of them in the optimizer's dtype."""
    if not narrow:
        monkeypatch.setattr(gradients, "stack_narrow", lambda jaxpr: jaxpr)
    step = zero_jax.make_zero_train_step(gpt2.build(CONFIG), 3, precision="bf16", remat=remat)
    batch = step.abstract_batch(token_batches()[0])
    traced = jax.make_jaxpr(step)(step.abstract_state(batch), batch)
    shards = {(layers, rows // 8, columns) for layers, rows, columns in (
        leaf.shape for leaf in jax.tree.leaves(step.layout(batch).state.params) if leaf.ndim == 3)}
    dtypes = {var.aval.dtype for eqn in all_eqns(traced.jaxpr) if primitive_of(eqn) == SCAN
              for var in eqn.outvars if var.aval.shape in shards}
    assert dtypes == {jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)}


@weekly("remat", ["full", zero_jax.Remat(every=2)], ids=str)
@weekly("inside", [True, False])
def test_a_device_makes_masks_of_its_examples_alone(remat, inside, monkeypatch):
    """Of the whole batch a mask is as large as all scores. Negative control: made before the loop that needs it."""
    if not inside:
        monkeypatch.setattr(local._Value, "in_another_trace", lambda self: dataclasses.replace(self, eqn=None))
    step = zero_jax.make_zero_train_step(gpt2.build(dataclasses.replace(CONFIG, num_layers=4)), 3, remat=remat,)
    batch = step.abstract_batch({name: jax.ShapeDtypeStruct((24, 16), jnp.int32) for name in ("inputs", "targets")})
    assert ("24,2,16,16]" in step.compile(batch).as_text()) == (not inside and remat != "full")


def test_one_device_tells_what_a_program_prints():
    """The sum over all examples, once, and in each iteration of a loop."""
    told = []

    def tell(*values):
        told.append(values)

    def telling(x, w):
        jax.debug.callback(tell, x.sum(), x[:, 0])
        return jax.lax.scan(lambda x, i: [jax.debug.callback(tell, i, x), (2 * x, None)][1], x, jnp.arange(2))[0]

    x, w = arrays()
    in_parts(telling, MeshAxes.of(zero_jax.make_mesh(data=(2, 4))), x, w)
    jax.effects_barrier()
    iterations = [(values[0], values[1]) for values in told if values[1].ndim == 2]
    (sums,) = (values for values in told if values[1].ndim == 1)
    chex.assert_trees_all_close(sums, (x.sum(), x[:, 0]), rtol=1e-5)
    assert sorted(int(i) for i, _ in iterations) == [0, 1] and all((found == x * 2**i).all() for i, found in iterations)


@pytest.mark.parametrize("call_back", [jax.experimental.io_callback, jax.pure_callback])
def test_a_call_to_the_host_is_made_once_and_all_devices_get_its_results(call_back):
    called = []

    def calling(x, w):
        return x * call_back(
            lambda total: [called.append(total), 2 * total][1], jax.ShapeDtypeStruct((), x.dtype), x.sum())

    x, _ = arrays()
    (found,) = in_parts(calling, MeshAxes.of(zero_jax.make_mesh(data=(2, 4))), *arrays())
    np.testing.assert_allclose(found, 2 * x * x.sum(), rtol=1e-5)
    assert len(called) == 1


def test_calls_to_the_host_that_every_device_beside_tensor_would_make_are_refused():
    def calling(x, w):
        return jax.experimental.io_callback(lambda total: total, jax.ShapeDtypeStruct((), x.dtype), x.sum())

    with pytest.raises(zero_jax.UsageError, match="calls back to the host .io_callback.*'tensor': 2.*leave the call"):
        in_parts(calling, MeshAxes.of(zero_jax.make_mesh(data=4, tensor=2)), *arrays())


def test_the_body_of_a_shard_map_keeps_its_scopes():
    """By which the plan knows a kernel of Pallas, and that it is causal."""
    mesh = zero_jax.make_mesh(8)

    def body(x):
        with jax.named_scope("my_kernel"):
            return jax.jit(jnp.sin)(x)

    def fun(x, w):
        with jax.named_scope("outside"):
            return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x) @ w

    closed = jax.make_jaxpr(fun)(*arrays())
    seen = local_view(closed, MeshAxes.of(mesh), (P("data"), P()), [None])
    (scope,) = {scope_of(eqn) for eqn in all_eqns(seen.jaxpr) if primitive_of(eqn) == "sin"}
    assert scope.startswith("outside") and scope.rstrip("/").endswith("my_kernel")
