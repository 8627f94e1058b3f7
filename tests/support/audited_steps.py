"""Train steps in plain JAX for the audit: clean ones, and the same with one planted fault each.

A scan over layers in bf16, with fp32 parameters and Adam in shards over `data`. Nothing runs: shapes are large, so that
products hide what is sent, and compiling takes a second.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HIDDEN, TOKENS = 4, 2048, 8192, 8 * 16384
WHOLE, DATA, ROWS = P(), P("data"), P(None, "data")


def mesh_of_8(*names_and_sizes):
    """A mesh of the eight simulated devices; one axis, `data`, by default."""
    names, sizes = zip(*(names_and_sizes or (("data", 8),)), strict=True)
    return Mesh(np.array(jax.devices()[:8]).reshape(sizes), names)


def shape(mesh, dims, spec=WHOLE, dtype=jnp.float32, memory=None):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec, memory_kind=memory))


@dataclasses.dataclass(frozen=True)
class Step:
    """What `zero_jax.audit` takes: `audit(step.jitted, *step.shapes, **step.options)`."""

    jitted: Any
    shapes: tuple
    options: dict


def scanned(*, params=ROWS, moments=ROWS, one_moment=None, batch=DATA, donate=(0, 1),
            remat=True, cast="shard", scan=True, microbatches=1, grads="state", tensor=1, layers=LAYERS, width=WIDTH,
            hidden=HIDDEN, tokens=TOKENS, products=1, compute=jnp.bfloat16, activations=DATA, options=None,
            memory=None, update="shard", captured=False, target="h100:8", names=("params", "opt_state")):
    """The step; every argument but the sizes plants a fault where it is not the default."""
    mesh = mesh_of_8(("data", 8 // tensor), ("tensor", tensor)) if tensor > 1 else mesh_of_8()
    up = P(*params, "tensor") if tensor > 1 else params
    down = P(None, "tensor", "data") if tensor > 1 else params
    specs = {"down": down, "up": up}
    dims = {"down": (layers, hidden, width), "up": (layers, width, hidden)}
    weights = {name: shape(mesh, dims[name], specs[name]) for name in dims}
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(optimizer.init, weights)

    def placed(path, leaf):
        name = str(getattr(path[-1], "key", ""))
        spec = moments if leaf.ndim and tensor == 1 else specs.get(name, P())
        if one_moment is not None and "mu" in jax.tree_util.keystr(path) and name == "up":
            spec = one_moment
        return shape(mesh, leaf.shape, spec, leaf.dtype, memory if leaf.ndim else None)

    state = jax.tree_util.tree_map_with_path(placed, state)
    whole = {"down": P("tensor") if tensor > 1 else P(), "up": P(None, "tensor") if tensor > 1 else P()}
    constant = np.random.default_rng(0).random((width, width), np.float32) if captured else None

    def to(x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def gathered(w, name):
        if cast == "shard":
            w = to(w.astype(compute), P(*specs[name][1:]))
        return to(w, whole[name]).astype(compute)

    def layer(x, weights):
        w = {name: gathered(weights[name], name) for name in weights}
        h = x
        for _ in range(products):
            h = jax.nn.relu(h @ w["up"]) @ w["down"]
        if captured:
            h = h @ jnp.asarray(constant, compute)
        return to(x + h, activations), None

    body = jax.checkpoint(layer) if remat else layer

    def loss(weights, x):
        if scan:
            x, _ = jax.lax.scan(body, x.astype(compute), weights)
        else:
            x = x.astype(compute)
            for number in range(layers):
                x, _ = body(x, jax.tree.map(lambda leaf: leaf[number], weights))  # noqa: B023
        return (x.astype(jnp.float32) ** 2).mean()

    def value_and_grad(weights, x):
        if microbatches == 1:
            return jax.value_and_grad(loss)(weights, x)
        parts = to(x.reshape(microbatches, -1, width), P(None, "data"))

        def add(total, part):
            value, grad = jax.value_and_grad(loss)(weights, part)
            return jax.tree.map(jnp.add, total, grad), value

        grads, values = jax.lax.scan(add, jax.tree.map(lambda w: jnp.zeros(w.shape), weights), parts)
        return values.mean(), grads

    def step(weights, state, x):
        if memory:
            state = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, moments, memory_kind="device"))
                                 if leaf.ndim else leaf, state)
        value, gradients = value_and_grad(weights, x)
        if grads != "state":
            gradients = jax.tree.map(lambda leaf: to(leaf, grads), gradients)
        if update == "whole":
            state = jax.tree.map(lambda leaf: to(leaf, P()) if leaf.ndim else leaf, state)
            gradients = jax.tree.map(lambda leaf: to(leaf, P()), gradients)
        updates, state = optimizer.update(gradients, state, weights)
        new = optax.apply_updates(weights, updates)
        # Outputs are stored as inputs are.
        new = jax.tree_util.tree_map_with_path(lambda path, leaf: to(leaf, specs[path[-1].key]), new)
        state = jax.tree_util.tree_map_with_path(
            lambda path, leaf: to(leaf, placed(path, leaf).sharding.spec) if leaf.ndim else leaf, state)
        if memory:
            state = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, moments, memory_kind=memory))
                                 if leaf.ndim else leaf, state)
        return new, state, value

    if names == ("params", "opt_state"):
        def named(params, opt_state, batch):
            return step(params, opt_state, batch)
    else:
        def named(a, b, c):
            return step(a, b, c)

    return Step(jax.jit(named, donate_argnums=donate), (weights, state, shape(mesh, (tokens, width), batch)),
                {"target": target, "compiler_options": options})
