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
from zero_jax.step.disk.plan import UpdatePlan
from zero_jax.tree import named_leaves

MIN_RECORD_BYTES = 2**20
"""Bytes of the records of what is in memory, at least, where the model has that many."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of a group of tasks.

    Attributes:
        number: of the group.
        reads: the record that the update reads; None: none.
        writes: those that it writes: of the states, and of a copy of what is in memory, each where there is such.
    """

    number: int
    group: Group
    index: int
    rest: bool
    reads: Record | None
    writes: tuple[Record, ...]


class StateRecords:
    """The records of a generation.

    Attributes:
        leaves: how each leaf of the state is stored, by name.
        layout: the records.
        pieces: of the update, in order.
        others: the records of what no piece replaces.
    """

    def __init__(self, layout: Layout, plan: UpdatePlan):
        """plan: of the update, whose blocks the records follow."""
        self._names, self._copied, self._on_disk = plan.names, set(plan.copied), plan.on_disk
        # What an update replaces lies in the files as the update shards it: at stages 1 and 2 not as it is stored.
        specs = dict(zip(plan.names, plan.specs, strict=False))
        self.leaves = {name: StoredLeaf(leaf if name not in specs else leaf.update(
            sharding=NamedSharding(layout.mesh, specs[name]))) for name, leaf in named_leaves(layout.state)
            if name != "disk"}
        self.layout = RecordLayout()
        self.pieces = [self._piece(number, group, index, rest) for number, group in enumerate(plan.groups)
                       for index, rest in group.pieces()]
        done = {part.leaf for record in self.layout.records for part in record.parts}
        others = [name for name in self.leaves if name not in done and not name.startswith("weights/")]
        self.others = [*self._whole([name for name in others if not name.startswith("frozen/")], once=False),
                       *self._whole([name for name in others if name.startswith("frozen/")], once=True)]

    def _piece(self, number: int, group: Group, index: int, rest: bool) -> Piece:
        def block(at: int, leaf: StoredLeaf) -> tuple[tuple[int, ...], tuple[int, ...]]:
            """(start, sizes) of the piece's block of `leaf`, of task `at`, in a device's shard."""
            return group.place(at, index, rest) if group.blocks else ((0,) * len(leaf.local), leaf.local)

        def record(numbers: Callable[[Task], Iterable[int]]) -> Record | None:
            names = [(at, self._names[number]) for at, task in enumerate(group.tasks) for number in numbers(task)]
            return self.layout.add(
                (name, shard, *block(at, leaf), leaf.dtype.name) for at, name in names for leaf in [self.leaves[name]]
                for shard in range(len(leaf.owners))) if names else None

        states = record(lambda task: task.replaced(self._on_disk))
        copies = record(lambda task: [number for number in task.writes if number in self._copied])
        read = {self._names[number] for task in group.tasks for number in task.stored}
        reads = states if states is not None and any(part.leaf in read for part in states.parts) else None
        return Piece(number, group, index, rest, reads, tuple(each for each in (states, copies) if each is not None))

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
