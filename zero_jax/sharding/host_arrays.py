"""Arrays in the memory of the host: their shardings, moves to the device and back, and how they are made in groups."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from zero_jax.tree import leaf_bytes
from zero_jax.typing import Pytree

HOST = "pinned_host"
"""JAX's name of the memory: only pinned host memory is copied without the processor's help."""

GROUP_BYTES = 2**28
"""Bytes on a device of the leaves that one program makes; a larger leaf has a program of its own."""


def on_host(sharding: NamedSharding) -> NamedSharding:
    """`sharding` in host memory. JAX drops this for GPUs of a target topology, which `xla.host_memory` mends."""
    return sharding.with_memory_kind(HOST)


def on_device(sharding: NamedSharding) -> NamedSharding:
    """`sharding` in the device's memory."""
    return NamedSharding(sharding.mesh, sharding.spec)


def is_on_host(value: Any) -> bool:
    """Whether an array or tracer is in host memory."""
    return jax.typeof(value).memory_space == jax.memory.Space.Host


def carrier_of(value: jax.Array) -> jax.Array:
    """For an array in host memory zeros of its shape in device memory, in which to differentiate; else the array."""
    return jnp.zeros(value.shape, value.dtype) if is_on_host(value) else value


def fetch(value: Any) -> Any:
    """A tree with its arrays in device memory; traceable."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if is_on_host(leaf) else leaf, value)


def put_on_host(value: jax.Array) -> jax.Array:
    """`value` in host memory; traceable."""
    return value if is_on_host(value) else jax.device_put(value, jax.memory.Space.Host)


def copied_on_host(value: jax.Array) -> jax.Array:
    """An array in host memory with the values of `value`, which is there as well, in memory of its own.

    NumPy reads host memory in place, and what NumPy looks at cannot be donated: a GPU's program fails.
    """
    parts = [jax.device_put(np.array(shard.data), shard.data.sharding) for shard in value.addressable_shards]
    return jax.make_array_from_single_device_arrays(value.shape, value.sharding, parts)


def in_groups(make: Callable[..., Pytree], like: Pytree, *, in_shardings: Any = None) -> Callable[..., Pytree]:
    """`make`, compiled as one program for each group of its leaves: no device holds all that goes to the host at once.

    like: the leaves as `jax.ShapeDtypeStruct`s, sharded.

    Each program computes what its leaves need and no other: what several leaves share is computed for each of them.
    """
    leaves, treedef = jax.tree.flatten(like)
    groups = _groups([leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves])

    def compiled(group: Sequence[int]) -> Any:
        def some(*args: Any) -> list[Any]:
            made = jax.tree.leaves(make(*args))
            return [made[i] for i in group]

        options = {} if in_shardings is None else {"in_shardings": in_shardings}
        return jax.jit(some, out_shardings=[leaves[i].sharding for i in group], **options)

    def run(*args: Any) -> Pytree:
        made: list[Any] = [None] * len(leaves)
        for group in groups:
            for i, leaf in zip(group, jax.block_until_ready(compiled(group)(*args)), strict=True):
                made[i] = leaf
        return jax.tree.unflatten(treedef, made)

    return run


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of `sizes` in order, in groups of at most `GROUP_BYTES` unless one alone is more."""
    groups: list[list[int]] = []
    total = 0
    for i, size in enumerate(sizes):
        if not groups or total + size > GROUP_BYTES:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += size
    return groups
