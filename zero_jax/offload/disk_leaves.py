"""Leaves of the state that are in files between steps (ZeRO-Infinity, arXiv 2104.07857), and what stands for them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.layout.layout import Layout
from zero_jax.sharding.stored_shape import identity_shape
from zero_jax.tree import leaf_bytes, map_named, named_leaves


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OnDisk:
    """In a `ZeroState`, in the place of a leaf that is in files: no leaf to JAX. shape: as it is stored."""

    shape: tuple[int, ...]
    dtype: str


def with_disk(layout: Layout, names: frozenset[str]) -> Layout:
    """`layout` with the leaves `names` of its state in files, and with the token of their generation."""
    token = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=NamedSharding(layout.mesh, P()))
    return dataclasses.replace(
        layout, disk=names, state=dataclasses.replace(layout.state, disk=token),
        stored_shapes=dataclasses.replace(layout.stored_shapes, disk=identity_shape((2,))))


@dataclasses.dataclass(frozen=True)
class DiskTraffic:
    """Bytes of files for each device. read, written: by the update. stored: two generations."""

    read: int
    written: int
    stored: int


def disk_traffic(layout: Layout, local_devices: int) -> DiskTraffic:
    """What a layout with files asks of the disks; local_devices: that share the files of a process.

    Without the alignment of records. Files have one copy of what several devices of a process hold.
    """
    read = written = once = 0
    grads = dict(named_leaves(layout.gradients))
    for name, leaf in named_leaves(layout.state):
        field, _, param = name.partition("/")
        if field in ("disk", "weights"):
            continue
        # The parameters are in the files as the update shards them.
        sharding = grads[param] if field == "params" else leaf.sharding
        shape = sharding.shard_shape(leaf.shape)
        shards = min(local_devices, math.prod(leaf.shape) // math.prod(shape))
        size = leaf_bytes(shape, leaf.dtype) * shards
        read += size * (name in layout.disk)
        written += size * (field != "frozen")
        once += size * (field == "frozen")
    return DiskTraffic(read // local_devices, written // local_devices, 2 * (written + once) // local_devices)


def in_arrays(layout: Layout) -> Layout:
    """`layout` with every leaf in an array: of a state that was read from files, to be saved or converted."""
    if not layout.disk:
        return layout
    known = vars(layout)
    if "_in_arrays" not in known:  # one object, on which what is compiled for it is kept
        known["_in_arrays"] = dataclasses.replace(
            layout, disk=frozenset(), state=dataclasses.replace(layout.state, disk=None),
            stored_shapes=dataclasses.replace(layout.stored_shapes, disk=None))
    return known["_in_arrays"]


def resident(layout: Layout, tree: Any) -> Any:
    """`tree`, of the structure of the layout's state, with an `OnDisk` for each leaf in files."""
    if not layout.disk:
        return tree
    likes = dict(named_leaves(layout.state))
    return map_named(lambda name, leaf: OnDisk(likes[name].shape, str(likes[name].dtype)) if name in layout.disk
                     else leaf, tree)


def expanded(layout: Layout, state: Any) -> Any:
    """`state`, as users have it, with the abstract array of each leaf in files: of the structure of the layout's."""
    if not layout.disk:
        return state
    given = dict(named_leaves(state))
    return map_named(lambda name, like: given.get(name, like), layout.state)
