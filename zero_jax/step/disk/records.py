"""Where the state of a layout is in files: which shards of a leaf a process stores, and which record holds which block.

A generation is a whole state: the leaves that are only in files, and a copy of every other one. What an update replaces
is stored in its blocks, so that each reads and writes whole records; what else there is follows them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zero_jax.disk.record_file import Record, RecordLayout
from zero_jax.layout.layout import Layout
from zero_jax.offload.file_update import Group
from zero_jax.offload.split import Unit
from zero_jax.step.disk.update import UpdatePlan
from zero_jax.tree import as_numbers, is_key, key_impl, leaf_bytes, named_leaves

MIN_RECORD_BYTES = 2**20
"""Bytes of the records of what is in memory, at least, where the model has that many."""


class StoredLeaf:
    """How a leaf of the state is stored in a process's files: its distinct shards, and the devices that hold each."""

    def __init__(self, like: jax.ShapeDtypeStruct):
        """like: the leaf as it is stored, with its sharding."""
        self.like, self.is_key = like, is_key(like)
        data = jax.eval_shape(as_numbers, like)
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


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a group of units.

    Attributes:
        group: the number of its group among those of the plan.
        index: its number in the group.
        reads: the record that the update reads; None: none.
        writes: those that it writes: of the states, and of a copy of what is in memory, each where there is such.
    """

    group: int
    index: int
    reads: Record | None
    writes: tuple[Record, ...]


class StateRecords:
    """The records of a generation.

    Attributes:
        leaves: how each leaf of the state is stored, by name.
        layout: the records.
        blocks: of the update, in order.
        others: the records of what no block replaces.
    """

    def __init__(self, layout: Layout, plan: UpdatePlan):
        """plan: of the update, whose blocks the records follow."""
        self._names, self._copied, self._programs = plan.names, set(plan.copied), plan.programs
        # What an update replaces is in the files as the update shards it: at stages 1 and 2 not as it is stored.
        specs = dict(zip(plan.names, plan.specs, strict=False))
        self.leaves = {name: StoredLeaf(leaf if name not in specs else leaf.update(
            sharding=NamedSharding(layout.mesh, specs[name]))) for name, leaf in named_leaves(layout.state)
            if name != "disk"}
        self.layout = RecordLayout()
        self.blocks = [self._block(number, group, index) for number, group in enumerate(plan.groups)
                       for index in range(len(group.places))]
        done = {part.leaf for record in self.layout.records for part in record.parts}
        others = [name for name in self.leaves if name not in done and not name.startswith("weights/")]
        self.others = [*self._whole([name for name in others if not name.startswith("frozen/")], once=False),
                       *self._whole([name for name in others if name.startswith("frozen/")], once=True)]

    def _block(self, number: int, group: Group, index: int) -> Block:
        def place(at: int, leaf: StoredLeaf) -> tuple[tuple[int, ...], tuple[int, ...]]:
            """(start, sizes) of the block of `leaf`, of unit `at`, in a device's shard."""
            return group.places[index][at] if group.shapes else ((0,) * len(leaf.local), leaf.local)

        def record(numbers: Callable[[Unit], Iterable[int]]) -> Record | None:
            names = [(at, self._names[number]) for at, unit in enumerate(group.units) for number in numbers(unit)]
            return self.layout.add(
                (name, shard, *place(at, leaf), leaf.dtype.name) for at, name in names for leaf in [self.leaves[name]]
                for shard in range(len(leaf.owners))) if names else None

        states = record(self._programs.replaced_of)
        copies = record(lambda unit: [number for number in self._programs.buffers_of(unit) if number in self._copied])
        read = {self._names[number] for unit in group.units for number in unit.stored}
        reads = states if states is not None and any(part.leaf in read for part in states.parts) else None
        return Block(number, index, reads, tuple(each for each in (states, copies) if each is not None))

    def _whole(self, names: Sequence[str], *, once: bool) -> list[Record]:
        """Records of whole leaves, as bytes."""
        limit, blocks, size, records = max(self.layout.largest, MIN_RECORD_BYTES), [], 0, []
        for name in names:
            leaf = self.leaves[name]
            total = int(np.prod(leaf.local, dtype=np.int64)) * leaf.dtype.itemsize
            for shard in range(len(leaf.owners)):
                for first in range(0, total, limit):
                    count = min(limit, total - first)
                    if blocks and size + count > limit:
                        records.append(self.layout.add(blocks, once=once))
                        blocks, size = [], 0
                    blocks.append((name, shard, (first,), (count,), "uint8"))
                    size += count + 64
        if blocks:
            records.append(self.layout.add(blocks, once=once))
        return records
