"""Where the state of a layout lies in files: which record holds which block of which leaf. Pure data.

A generation is a whole state: the leaves that are only in files, and a copy of every other one. What an update replaces
lies in its blocks, so that a piece of the update reads and writes whole records; what else there is lies behind them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jax.sharding import NamedSharding

from zero_jax.disk.records import Record, RecordLayout
from zero_jax.optim.disk_update import Group
from zero_jax.optim.update_tasks import Task
from zero_jax.sharding.layout import Layout
from zero_jax.step.disk.leaf import StoredLeaf
from zero_jax.step.disk.plan import GRADIENTS, UpdatePlan
from zero_jax.tree import named_leaves

MIN_RECORD_BYTES = 2**20
"""Bytes of the records of what is in memory, at least, where the model has that many."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of a group of tasks.

    Attributes:
        number: of the group.
        reads: the records that the update reads.
        writes: those that it writes: of the states, of what the model reads layer by layer, and of a copy of what is in
            memory, each where there is such.
        layer: the number of the layer that it is of; None where blocks are cut otherwise.
    """

    number: int
    group: Group
    index: int
    rest: bool
    reads: tuple[Record, ...]
    writes: tuple[Record, ...]
    layer: int | None = None

    def block(self, at: int, leaf: StoredLeaf) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(start, sizes) of its block of `leaf`, of task `at`, in a device's shard."""
        if not self.group.blocks:
            return (0,) * len(leaf.local), leaf.local
        return self.group.place(at, self.index, self.rest)


class StateRecords:
    """The records of a generation.

    Attributes:
        leaves: how each leaf of the state is stored, by name.
        layout: the records.
        pieces: of the update, in order.
        others: the records of what no piece replaces.
        layers: for each leaf that the model reads layer by layer the records of each layer, in order.
    """

    def __init__(self, layout: Layout, plan: UpdatePlan):
        """plan: of the update, whose blocks the records follow."""
        self._names, self._of_layers, self._copied = plan.names, layout.disk_layers, set(plan.copied)
        self._on_disk, self._is_by_layer = plan.on_disk, plan.is_by_layer
        # What an update replaces lies in the files as the update shards it: at stages 1 and 2 not as it is stored.
        specs = dict(zip(plan.names, plan.specs, strict=False))
        self.leaves = {name: StoredLeaf(leaf if name not in specs else leaf.update(
            sharding=NamedSharding(layout.mesh, specs[name]))) for name, leaf in named_leaves(layout.state)
            if name != "disk"}
        self.layout = RecordLayout()
        self.layers: dict[str, list[list[Record]]] = {
            name: [[] for _ in range(self.leaves[name].local[0])] for name in layout.disk_layers}
        self.pieces = [self._piece(number, group, index, rest) for number, group in enumerate(plan.groups)
                       for index, rest in group.pieces()]
        frozen = [name for name in layout.disk_layers if name.startswith("frozen/")]
        for name in sorted(frozen):
            leaf = self.leaves[name]
            for index, records in enumerate(self.layers[name]):
                start, sizes = (index, *[0] * (len(leaf.local) - 1)), (1, *leaf.local[1:])
                records.append(self._add([(name, start, sizes)], once=True))
        done = {part.leaf for record in self.layout.records for part in record.parts}
        self.frozen = [record for name in sorted(frozen) for records in self.layers[name] for record in records]
        others = [name for name in self.leaves if name not in done and not name.startswith("weights/")]
        self.others = [*self._whole([name for name in others if not name.startswith("frozen/")], once=False),
                       *self._whole([name for name in others if name.startswith("frozen/")], once=True)]

    def _piece(self, number: int, group: Group, index: int, rest: bool) -> Piece:
        piece = Piece(number, group, index, rest, (), ())

        def record(numbers: Callable[[Task], Iterable[int]]) -> Record | None:
            names = [(at, self._names[number]) for at, task in enumerate(group.tasks) for number in numbers(task)]
            return self._add([(name, *piece.block(at, self.leaves[name])) for at, name in names]) if names else None

        def in_files(task: Task, *, layers: bool) -> list[int]:
            return [number for number in task.replaced(self._on_disk) if not self._names[number].startswith(GRADIENTS)
                    and (self._names[number] in self._of_layers) == layers]

        states = record(lambda task: in_files(task, layers=False))
        layers = record(lambda task: in_files(task, layers=True))
        copies = record(lambda task: [number for number in task.writes if number in self._copied])
        for part in layers.parts if layers is not None else ():
            if part.shard == 0:
                assert part.sizes[0] == 1 and layers is not None
                self.layers[part.leaf][part.start[0]].append(layers)
        read = {self._names[number] for task in group.tasks for number in task.stored}
        writes = tuple(each for each in (states, layers, copies) if each is not None)
        reads = tuple(each for each in (states, layers) if each is not None and any(
            part.leaf in read for part in each.parts))
        layer = group.place(0, index, rest)[0][0] if self._is_by_layer(group) else None
        return dataclasses.replace(piece, reads=reads, writes=writes, layer=layer)

    def _add(self, blocks: Iterable[tuple[str, tuple[int, ...], tuple[int, ...]]], *, once: bool = False) -> Record:
        """The next record, of (leaf, start, sizes) for each block of every shard."""
        return self.layout.add(((name, shard, start, sizes, self.leaves[name].dtype.name)
                                for name, start, sizes in blocks
                                for shard in range(len(self.leaves[name].owners))), once=once)

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
