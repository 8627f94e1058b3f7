"""Microbatches: one step's gradient from a loop over parts of its batch.

A compiled loop cannot carry a sum over devices that is not yet made: the partitioner makes it in every round. So the
sum is either made in each round and the loop carries shards of it (`reduce="every"`, the memory of ZeRO-2), or each
device's rows are a microbatch of their own, mapped over a leading dim that lies over the devices, and the loop carries
each device's own sum, as large as all parameters, which is reduced once (`reduce="once"`, the wire of one batch).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.batch import Accumulation
from zero_jax.gather import used
from zero_jax.gradients import Reading, Told
from zero_jax.layout import Layout
from zero_jax.scatter import reduce_parts
from zero_jax.tree import map_named, named_leaves


def accumulated(gradient: Callable[..., tuple[Told, Any]], accumulation: Accumulation, layout: Layout,
               axes: tuple[str, ...], weights: Any, reading: Reading, batch: Any, scale: Any) -> tuple[Told, Any]:
    """The loss, metrics and gradient of a whole batch as the weighted mean over its microbatches.

    gradient: as `gradients.gradient_function` makes it. axes: the mesh axes over which the batch is laid. Gradients
    are summed in float32, or what is wider, and lie as `layout.gradients` says.
    """
    run = _once if accumulation.once else _every
    return run(gradient, accumulation.microbatches, layout, axes, weights, reading, batch, scale)


def _every(gradient: Any, count: int, layout: Layout, axes: tuple[str, ...], weights: Any, reading: Reading, batch: Any,
           scale: Any) -> tuple[Told, Any]:
    def body(carry: Any, xs: Any) -> Any:
        total, variables = carry
        number, part = xs
        now = reading._replace(variables=variables, rng=jax.random.fold_in(reading.rng, number))
        told, grads = gradient(weights, now, part, scale)
        # Else XLA:TPU moves sums over devices out of the loop, which then carries whole gradients; libtpu 0.0.48 adds
        # an embedding's rows wrongly when it does (openxla/xla issue 49143).
        grads = jax.lax.optimization_barrier(grads)
        total = jax.tree.map(lambda sum, grad, at: constrain(sum + told.weight * grad.astype(sum.dtype), at),
                             total, grads, layout.gradients)
        return (total, _alike(told.variables, variables)), told._replace(variables=None)

    zeros = jax.tree.map(lambda leaf, at: constrain(jnp.zeros(leaf.shape, _wide(leaf)), at), weights, layout.gradients)
    parts = jax.tree.map(lambda leaf: _split(leaf, count, layout, axes, apart=False), batch)
    (total, variables), told = jax.lax.scan(body, (zeros, reading.variables), (jnp.arange(count), parts))
    told, weight = _mean(told)
    return told._replace(variables=variables), jax.tree.map(lambda grad: grad / weight, total)


def _once(gradient: Any, count: int, layout: Layout, axes: tuple[str, ...], weights: Any, reading: Reading, batch: Any,
          scale: Any) -> tuple[Told, Any]:
    mesh = layout.mesh
    ways = math.prod(mesh.shape[axis] for axis in axes)

    def own(at: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, P(axes, *used(at.spec)))

    def key_of(device: Any) -> jax.Array:
        return jax.random.fold_in(reading.rng, device)

    each = jax.vmap(gradient, in_axes=(None, Reading(None, 0, 0), 0, None), spmd_axis_name=axes)
    device_keys = jax.vmap(key_of)(jnp.arange(ways))

    def body(carry: Any, xs: Any) -> Any:
        total, variables = carry
        number, part = xs
        keys = jax.vmap(jax.random.fold_in, (0, None))(device_keys, number)
        told, grads = each(weights, Reading(reading.frozen, variables, keys), part, scale)
        total = jax.tree.map(lambda sum, grad, at: constrain(
            sum + jnp.reshape(told.weight, (-1, *[1] * (grad.ndim - 1))) * grad.astype(sum.dtype), own(at)),
            total, grads, layout.gradients)
        return (total, _alike(told.variables, variables)), told._replace(variables=None)

    def zeros(leaf: Any, at: NamedSharding) -> Any:
        return constrain(jnp.zeros((ways, *leaf.shape), _wide(leaf)), own(at))

    parts = jax.tree.map(lambda leaf: _split(leaf, count, layout, axes, apart=True), batch)
    copies = jax.tree.map(lambda leaf: _copies(leaf, ways), reading.variables)
    carry = jax.tree.map(zeros, weights, layout.gradients), copies
    (total, variables), told = jax.lax.scan(body, carry, (jnp.arange(count), parts))
    told, weight = _mean(told)

    def reduce(name: str, grad: Any, like: Any, at: NamedSharding) -> Any:
        dtype = uses[name].reduce if name in uses else like.dtype
        sum_parts = jax.shard_map(
            lambda part: reduce_parts((part[0] / weight).astype(dtype), mesh, at.spec), mesh=mesh,
            in_specs=P(axes, *used(at.spec)), out_specs=at.spec, check_vma=False)
        return sum_parts(grad).astype(grad.dtype)

    uses = dict(named_leaves(layout.uses))  # no entry where a parameter is read as it is stored
    grads = map_named(reduce, total, weights, layout.gradients)
    return told._replace(variables=jax.tree.map(_joined, variables, reading.variables)), grads


def _split(leaf: jax.Array, count: int, layout: Layout, axes: tuple[str, ...], *, apart: bool) -> jax.Array:
    """A batch as (count, rows) microbatches, or `apart` (count, devices, rows): each takes rows of every device."""
    ways = math.prod(layout.mesh.shape[axis] for axis in axes)
    parts = leaf.reshape(ways, count, -1, *leaf.shape[1:]).swapaxes(0, 1)
    if not apart:
        parts = parts.reshape(count, -1, *leaf.shape[1:])
    return constrain(parts, NamedSharding(layout.mesh, P(None, axes)))


def _mean(told: Told) -> tuple[Told, Any]:
    """What microbatches told as one, weighted, and the sum of their weights; 1 where that is 0."""
    weight = jnp.broadcast_to(told.weight, told.loss.shape)
    total = jnp.sum(weight)
    divisor = jnp.where(total == 0, 1, total)
    loss, metrics = jax.tree.map(lambda value: jnp.sum(value * weight) / divisor, (told.loss, told.metrics))
    return Told(loss, metrics, total, None), divisor


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _alike(new: Any, old: Any) -> Any:
    """`new` with the dtypes of `old`, as a loop's carry must be."""
    return jax.tree.map(lambda leaf, like: leaf if _is_key(like) else leaf.astype(like.dtype), new, old)


def _copies(leaf: Any, ways: int) -> Any:
    """A variable for each device. Random streams must differ, or devices drop the same units."""
    copies = jnp.broadcast_to(leaf, (ways, *leaf.shape))
    if not _is_key(leaf):
        return copies
    flat = jax.vmap(lambda keys, i: jax.vmap(lambda key: jax.random.fold_in(key, i))(keys.reshape(-1)))
    return flat(copies, jnp.arange(ways)).reshape(copies.shape)


def _joined(leaf: Any, before: Any) -> Any:
    """The devices' variables as one: means of statistics, the first of counters, random streams as they were."""
    if _is_key(before):
        return before
    return leaf.mean(0).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf[0]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
