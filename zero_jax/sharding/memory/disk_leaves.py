"""Leaves of the state that are in files between steps (ZeRO-Infinity, arXiv 2104.07857), and what stands for them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.sharding.layout import Layout
from zero_jax.sharding.stored_shape import identity_shape
from zero_jax.tree import leaf_bytes, map_named, named_leaves


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OnDisk:
    """In a `ZeroState`, in the place of a leaf that is in files: no leaf to JAX. shape: as it is stored."""

    shape: tuple[int, ...]
    dtype: str


def with_disk(layout: Layout, names: frozenset[str], gradients: Mapping[str, jax.ShapeDtypeStruct]) -> Layout:
    """`layout` with the leaves `names` of its state in files, and with the token of their generation.

    gradients: what is in files from backward to the update, by the name of the parameter.
    """
    token = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=NamedSharding(layout.mesh, P()))
    return dataclasses.replace(
        layout, disk=names, disk_gradients=gradients, state=dataclasses.replace(layout.state, disk=token),
        stored_shapes=dataclasses.replace(layout.stored_shapes, disk=identity_shape((2,))))


@dataclasses.dataclass(frozen=True)
class DiskTraffic:
    """Bytes of files for each device.

    read, written: of states, by the update. stored: two generations. layers: of parameters, which forward reads, and
    backward once more. gradients: which backward writes and the update reads. saved: activations, which forward writes
    and backward reads.
    """

    read: int
    written: int
    stored: int
    layers: int = 0
    gradients: int = 0
    saved: int = 0

    @property
    def needed(self) -> int:
        """Bytes of all files."""
        return self.stored + self.gradients + self.saved


def disk_traffic(layout: Layout, local_devices: int) -> DiskTraffic:
    """What a layout with files asks of the disks; local_devices: that share the files of a process.

    Without the alignment of records. Files have one copy of what several devices of a process hold.
    """
    read = written = once = layers = 0
    grads = dict(named_leaves(layout.gradients))
    for name, leaf in named_leaves(layout.state):
        field, _, param = name.partition("/")
        if field == "disk" or field == "weights" and name not in layout.disk:
            continue
        # The parameters lie in the files as the update shards them.
        sharding = grads[param] if field == "params" else leaf.sharding
        shape = sharding.shard_shape(leaf.shape)
        shards = min(local_devices, math.prod(leaf.shape) // math.prod(shape))
        size = leaf_bytes(shape, leaf.dtype) * shards
        # The update makes the copy that the model reads, and reads none.
        read += size * (name in layout.disk and field not in ("weights", "frozen"))
        layers += size * (name in layout.disk_layers)
        written += size * (field != "frozen")
        once += size * (field == "frozen")
    gradients = sum(leaf_bytes(like.sharding.shard_shape(like.shape), like.dtype)
                    for like in layout.disk_gradients.values())
    return DiskTraffic(read // local_devices, written // local_devices, 2 * (written + once) // local_devices,
                       layers // local_devices, gradients)


def in_arrays(layout: Layout) -> Layout:
    """`layout` with every leaf in an array: of a state that was read from files, to be saved or converted."""
    if not layout.disk:
        return layout
    known = vars(layout)
    if "_in_arrays" not in known:  # one object, on which what is compiled for it is kept
        known["_in_arrays"] = dataclasses.replace(
            layout, disk=frozenset(), disk_gradients={}, state=dataclasses.replace(layout.state, disk=None),
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


def with_layers(layout: Layout, state: Any) -> Any:
    """`state`, as users have it, with the abstract array of each leaf of which loops read a layer at a time."""
    given, layers = dict(named_leaves(state)), layout.disk_layers
    return map_named(lambda name, like: given.get(name, like if name in layers else OnDisk(
        like.shape, str(like.dtype))), layout.state)
