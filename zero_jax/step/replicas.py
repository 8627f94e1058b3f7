"""Silent corruption: whether the copies of what is stored on several devices are still the same bits.

What a stage does not shard is computed alike on each device, from the same bits, so that copies can differ only where
hardware or a collective has failed (Dixit et al., "Silent data corruptions at scale", arXiv 2102.11245). Each device
takes a digest of what it stores itself; only digests are sent, 8 bytes per leaf and device.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.errors import ReplicaError, few
from zero_jax.layout.layout import Layout
from zero_jax.sharding.checksum import part_words, seed_of
from zero_jax.sharding.host_arrays import fetch
from zero_jax.sharding.partition import names_of
from zero_jax.tree import as_numbers, leaf_bytes, named_leaves
from zero_jax.typing import Pytree


@dataclasses.dataclass(frozen=True)
class Replicas:
    """What a comparison of copies has looked at, and what it cannot see. Sizes are in bytes per device.

    leaves, bytes: of the state that other devices have copies of. other_leaves, other_bytes: that no other device has.
    """

    leaves: int
    bytes: int
    other_leaves: int
    other_bytes: int

    def __str__(self) -> str:
        share = self.bytes / max(1, self.bytes + self.other_bytes)
        return (f"{self.leaves} leaves, {share:.1%} of the state's bytes on a device, have copies that are compared; "
                f"{self.other_leaves} leaves have none.")


def replicas_of(layout: Layout) -> Replicas:
    """What a comparison can look at."""
    sizes = {True: [0, 0], False: [0, 0]}
    for _, leaf in named_leaves(layout.state):
        size = sizes[bool(_copy_axes(leaf.sharding))]
        size[0] += 1
        size[1] += leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    return Replicas(*sizes[True], *sizes[False])


def copies_digests(state: Pytree, layout: Layout) -> jax.Array:
    """uint32 (devices in the order of the mesh, leaves with copies, 2), replicated; traceable.

    Of what each device stores: nothing is gathered, so that no copy stands for another.
    """
    leaves, specs, shapes = [], [], []
    for (_, leaf), (_, like) in zip(named_leaves(state), named_leaves(layout.state), strict=True):
        if _copy_axes(like.sharding):
            leaves.append(as_numbers(fetch(leaf)))
            specs.append(like.sharding.spec)
            shapes.append(leaves[-1].shape)

    def each(*parts: jax.Array) -> jax.Array:
        return jnp.stack([part_words(part, seed_of(shape, part.dtype), shape, spec)
                          for part, shape, spec in zip(parts, shapes, specs, strict=True)])[None]

    mesh = layout.axes.mesh
    if not leaves:
        return jnp.zeros((mesh.size, 0, 2), jnp.uint32)
    return jax.shard_map(each, mesh=mesh, in_specs=tuple(specs), out_specs=P(mesh.axis_names), check_vma=False)(*leaves)


def compare(words: np.ndarray, layout: Layout) -> None:
    """Raises ReplicaError where copies have other digests, of `copies_digests`, than most; with each such device.

    Where there is no majority, as with two copies, all devices of the copies are named.
    """
    mesh: Mesh = layout.axes.mesh
    devices, grid = mesh.devices, words.reshape(*mesh.devices.shape, *words.shape[1:])
    leaves = [(name, leaf) for name, leaf in named_leaves(layout.state) if _copy_axes(leaf.sharding)]
    wrong: dict[Any, list[str]] = collections.defaultdict(list)
    undecided: dict[tuple[Any, ...], list[str]] = collections.defaultdict(list)
    for number, (name, leaf) in enumerate(leaves):
        copies = [mesh.axis_names.index(axis) for axis in _copy_axes(leaf.sharding)]
        order = [*(axis for axis in range(devices.ndim) if axis not in copies), *copies]
        many = math.prod(devices.shape[axis] for axis in copies)
        owners = devices.transpose(order).reshape(-1, many)
        found = grid[..., number, :].transpose(*order, devices.ndim).reshape(-1, many, 2)
        for group, digests in zip(owners, map(lambda rows: [tuple(row) for row in rows.tolist()], found), strict=True):
            (most, count), *others = collections.Counter(digests).most_common()
            if not others:
                continue
            if 2 * count > many:
                for device, digest in zip(group, digests, strict=True):
                    if digest != most:
                        wrong[device].append(name)
            else:
                undecided[tuple(group)].append(name)
    if wrong or undecided:
        raise ReplicaError(_message(wrong, undecided))


def _message(wrong: dict[Any, list[str]], undecided: dict[tuple[Any, ...], list[str]]) -> str:
    told = [f"{_text(device)} differs from most of its copies in {_of(names)}" for device, names in wrong.items()]
    told += [f"{' and '.join(map(_text, group))} differ in {_of(names)}, and no majority tells which is wrong"
             for group, names in undecided.items()]
    return (f"Copies that must be the same bits are not: {'; '.join(told[:8])}"
            f"{f'; and {len(told) - 8} more' if len(told) > 8 else ''}. A device or a link has failed: go on from the "
            "last checkpoint that was saved before, without that device.")


def _text(device: Any) -> str:
    return f"device {device.id} ({device.platform}, process {device.process_index})"


def _of(names: Sequence[str]) -> str:
    return f"{len(names)} leaves ({few(names, 3)})" if len(names) > 1 else few(names)


def _copy_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """The axes of the mesh, larger than 1, along which devices have copies of a leaf."""
    used = names_of(sharding.spec)
    return tuple(axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used)
