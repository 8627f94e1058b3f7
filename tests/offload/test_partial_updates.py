"""Updates that write, read and move parts of leaves, random ones among them, beside those of one device."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.covering import weekly
from support.oracle import oracle, param_difference, slow, train

import zero_jax

NAMED = [lambda u: u.at[0].set(0.0), lambda u: u.at[-1].set(0.0), lambda u: u.at[..., 0].set(0.0),
         lambda u: u.at[0].multiply(3.0), lambda u: u.at[0].add(u[1]), lambda u: u.at[2:5].apply(jnp.sin)]
SHAPES = [(64, 8), (67, 71), (8, 64), (16, 4, 8), (64,), (13, 5, 3)]


def random_parts(rng, shape):
    """Functions of an array of `shape`; what they read and write is drawn from `rng`."""
    i, j = (int(rng.integers(-shape[0], shape[0])) for _ in range(2))
    axis, column, size = (int(rng.integers(n)) for n in (len(shape), shape[-1], shape[0]))
    rows = np.unique(rng.integers(0, shape[0], int(rng.integers(1, 5))))
    permuted, change = rng.permutation(shape[0]), str(rng.choice(["set", "add", "multiply", "min", "max"]))

    def write(u, where, value, **options):
        return getattr(u.at[where], change)(value, **options)

    def largest(u):
        return jnp.argmax(jnp.abs(u).reshape(len(u), -1).sum(1))

    return [
        lambda u: write(u, i, 0.2), lambda u: write(u, (..., column), 0.2), lambda u: write(u, i, u[j]),
        lambda u: write(u, rows, 0.2), lambda u: write(u, slice(size // 2, size + 1), 0.2),
        lambda u: write(u, largest(u), 0.2), lambda u: write(u, len(u) + 3, 0.2, mode="clip"),
        lambda u: write(u, i, u.mean(0)), lambda u: write(u.ravel(), size, 0.2).reshape(u.shape),
        lambda u: write(u, (jnp.arange(min(u.shape)),) * u.ndim, 0.2), lambda u: u[permuted], lambda u: u + u[i][None],
        lambda u: lax.dynamic_update_slice_in_dim(u, 2 * u[:1], largest(u), 0),
        lambda u: u * lax.dynamic_slice_in_dim(u, largest(u), size + 1).mean(), lambda u: jnp.sort(u, axis),
        lambda u: u[jnp.argsort(u.reshape(len(u), -1)[:, 0])], lambda u: u - u.mean(axis, keepdims=True),
        lambda u: jnp.cumsum(u, axis) / u.shape[axis], lambda u: jnp.roll(u, 1 + size, axis),
        lambda u: jnp.flip(u, axis), lambda u: jnp.concatenate([u[1:], jnp.zeros_like(u[:1])]),
        lambda u: jnp.where(jnp.abs(u) >= lax.top_k(jnp.abs(u).ravel(), 3)[0][-1], 0.0, u),
        lambda u: lax.fori_loop(0, 3, lambda k, u: u.at[2 * k].multiply(0.5), u),
        lambda u: lax.cond(u.sum() > 0, lambda u: write(u, i, 0.2), lambda u: write(u, j, 0.1), u),
        lambda u: u - jax.ops.segment_sum(u, np.arange(len(u)) // 3, len(u))[np.arange(len(u)) // 3] / 3,
        lambda u: lax.scan(lambda c, x: (0.5 * c + x,) * 2, jnp.zeros_like(u[0]), u)[1]]


def random_update(seed, shape):
    rng = np.random.default_rng(seed)
    parts = random_parts(rng, shape)
    chosen = [parts[number] for number in rng.choice(len(parts), int(rng.integers(1, 4)), replace=False)]
    return lambda u: functools.reduce(lambda u, part: part(u), chosen, u)


class Leaves(nn.Module):
    """A leaf for each update, whose gradient is a product over the batch."""

    shapes: dict

    @nn.compact
    def __call__(self, x):
        leaves = [self.param(name, nn.initializers.normal(), shape) for name, shape in self.shapes.items()]
        return [x[:, :len(leaf)] @ leaf.reshape(len(leaf), -1) for leaf in leaves]


def loss(model, batch):
    return sum(jnp.mean((out - batch["y"]) ** 2) for out in model(batch["x"]))


def difference(updates, shapes, stage, devices=4):
    """The largest difference of a parameter after two steps from one device; leaf i of `shapes[i]` is updated by i."""
    names = [f"leaf_{number:03}" for number in range(len(updates))]
    model = Leaves(dict(zip(names, shapes, strict=True)))
    optimizer = optax.chain(optax.stateless(lambda grads, params: {
        name: update(grads[name]) for name, update in zip(names, updates, strict=True)}), optax.sgd(0.5, momentum=0.9))
    rng = np.random.default_rng(1)
    batches = [{"x": rng.normal(size=(24, 80)).astype(np.float32), "y": rng.normal(size=(24, 1)).astype(np.float32)}
               for _ in range(2)]
    run = {"batches": batches, "loss": loss, "optimizer": optimizer}
    return param_difference(train(model, stage, devices, **run), oracle(model, **run))


@weekly("shape", [(67, 71), (64, 8)])
@weekly("stage", [3, 1, slow(2)])
def test_updates_of_parts_are_those_of_one_device(stage, shape):
    assert difference(NAMED, [shape] * len(NAMED), stage) < 1e-5


@pytest.mark.grid
@pytest.mark.parametrize("first, stage, devices", [(0, 2, 4), *(
    slow(first, 1 + first % 3, (4, 8, 3)[first // 3 % 3]) for first in range(1, 18))])
def test_random_updates_are_those_of_one_device(first, stage, devices):
    seeds = range(12 * first, 12 * first + 12)
    shapes = [SHAPES[seed % len(SHAPES)] for seed in seeds]
    updates = [random_update(seed, shape) for seed, shape in zip(seeds, shapes, strict=True)]
    assert difference(updates, shapes, stage, devices) < 1e-4


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="its XLA computes them rightly")
@pytest.mark.parametrize("update", NAMED[:2])
def test_what_xla_makes_of_them_is_caught(update):
    """Negative control: XLA:CPU's own partition of such an update, as of jax 0.10.2."""
    mesh = zero_jax.make_mesh(4)
    shards, rng = NamedSharding(mesh, P("data")), np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 64), (64, 8)))

    def updated(w, x, shards=None):
        grad = x.T @ (x @ w)
        return w - update(grad if shards is None else lax.with_sharding_constraint(grad, shards))

    sharded = jax.jit(functools.partial(updated, shards=shards), in_shardings=(None, shards), out_shardings=shards)
    assert np.max(np.abs(sharded(w, x) - jax.jit(updated)(w, x))) > 1e-2
