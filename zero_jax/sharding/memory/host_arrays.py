"""Arrays in the memory of the host: their shardings, and moves to the device and back, traceable."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

DEVICE, HOST = "device", "pinned_host"
"""JAX's names of the memories. Only pinned host memory is copied without the processor's help."""


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
