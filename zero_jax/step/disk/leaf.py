"""One leaf of the state in files: which shards a process stores, and how they become arrays."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.tree import key_impl, leaf_bytes


class StoredLeaf:
    """How a leaf of the state lies in this process's files: its distinct shards, each with the devices that hold it."""

    def __init__(self, like: jax.ShapeDtypeStruct):
        """like: the leaf as it is stored, with its sharding."""
        self.like, self.is_key = like, jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
        data = jax.eval_shape(jax.random.key_data, like) if self.is_key else like
        self.shape, self.dtype = data.shape, np.dtype(data.dtype)
        self.sharding: Any = like.sharding
        owners: dict[Any, list[Any]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(like.shape).items():
            key = tuple((each.start, each.stop) for each in index or ())
            owners.setdefault(key, []).append(device)
        self.owners = list(owners.values())
        self.local = data.shape if self.is_key else self.sharding.shard_shape(like.shape)

    def shards(self, value: Any) -> list[np.ndarray]:
        """The distinct shards of an array, in host memory; waits for it."""
        value = jax.random.key_data(value) if self.is_key else resharded(value, self.sharding)
        by_device = {shard.device: shard.data for shard in value.addressable_shards}
        return [np.asarray(by_device[devices[0]]) for devices in self.owners]

    def array(self, shards: Sequence[np.ndarray], shape: tuple[int, ...] | None = None) -> Any:
        """The array of copies of `shards`; shape: of a block, sharded as the leaf."""
        if self.is_key:
            data = jax.device_put(np.array(shards[0]), self.sharding)
            return jax.random.wrap_key_data(data, impl=key_impl(self.like))
        # A copy for each device: JAX on CPU uses the memory of an array that it is given, and the update writes to it.
        parts = [jax.device_put(np.array(shard), device)
                 for shard, devices in zip(shards, self.owners, strict=True) for device in devices]
        return jax.make_array_from_single_device_arrays(shape or self.like.shape, self.sharding, parts)

    def block_shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of the array whose shards have `sizes`."""
        return tuple(size * whole // part for size, whole, part in zip(sizes, self.shape, self.local, strict=True))


def resharded(value: Any, sharding: Any) -> Any:
    """`value`, sharded as `sharding`; a block, whose devices hold other parts of the same dims, stays as it is."""
    if value.sharding.is_equivalent_to(sharding, value.ndim):
        return value
    return jax.jit(lambda leaf: leaf, out_shardings=sharding)(value)


def shard_bytes(like: Any) -> int:
    """Bytes of a leaf, abstract or not, on each device."""
    return leaf_bytes(like.sharding.shard_shape(like.shape), like.dtype)


def chunks(names: Iterable[str], likes: Mapping[str, Any]) -> Iterator[list[str]]:
    """`names` in order, some at a time, which take no more of a device than the largest of them."""
    names = list(names)
    limit, chunk, size = max((shard_bytes(likes[name]) for name in names), default=0), [], 0
    for name in names:
        if chunk and size + shard_bytes(likes[name]) > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(name)
        size += shard_bytes(likes[name])
    if chunk:
        yield chunk
