"""The state of a committed generation, some leaves or one layer of stacks at a time: what a checkpoint saves."""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zero_jax.disk.records import Part, Record
from zero_jax.distributed.agreement import all_or_none
from zero_jax.step.disk.leaf import StoredLeaf, chunks, layer_of
from zero_jax.step.disk.states import DiskStates


class CommittedState:
    """Reads what is in files.

    Attributes:
        stacks: the names of those leaves in files that are read layer by layer.
        others: of the other ones in files.
    """

    def __init__(self, states: DiskStates):
        """What the model reads of parameters beside these is left out."""
        self._states = states
        self._parts: dict[str, StoredLeaf] = {}
        in_files = [name for name in states.layout.disk if not name.startswith("weights/")]
        self.stacks = sorted(stacked_leaves(states).intersection(in_files))
        self.others = sorted(set(in_files).difference(self.stacks))

    def layers(self, names: Sequence[str]) -> contextlib.AbstractContextManager[
            Iterator[tuple[int, dict[str, list[np.ndarray]]]]]:
        """In it, (number, what `layer` takes of some of the stacks `names`, by name), until all are read, ahead."""
        wanted = set(names)
        groups = [(index, leaves, [record for record in records if any(part.leaf in wanted for part in record.parts)])
                  for index, leaves, records in _groups(self._states) if not leaves.isdisjoint(wanted)]
        return self._layers(groups, {name: self._part(name) for name in names})

    def layer(self, name: str, shards: Sequence[np.ndarray]) -> jax.Array:
        """The layer of a stack whose shards of this process these are."""
        return self._part(name).array(shards)

    def _part(self, name: str) -> StoredLeaf:
        if name not in self._parts:
            self._parts[name] = StoredLeaf(layer_of(self._states.leaves[name].like))
        return self._parts[name]

    @contextlib.contextmanager
    def _layers(self, groups: Sequence[tuple[int, set[str], Sequence[Record]]], parts: Mapping[str, StoredLeaf]
                ) -> Iterator[Iterator[tuple[int, dict[str, list[np.ndarray]]]]]:
        def use(record: Record, buffer: memoryview) -> list[tuple[Part, np.ndarray]]:
            return [(part, np.array(part.view(buffer)[0])) for part in record.parts if part.leaf in parts]

        with self._states.streaming.read([record for *_, records in groups for record in records], use) as ahead:
            def layer(leaves: set[str], records: Sequence[Record]) -> dict[str, list[np.ndarray]]:
                shards = {name: [np.empty(parts[name].local, parts[name].dtype) for _ in parts[name].owners]
                          for name in sorted(leaves.intersection(parts))}
                for _ in records:
                    for part, block in next(ahead):
                        shards[part.leaf][part.shard][part.index[1:]] = block
                return shards

            yield ((index, all_or_none(functools.partial(layer, leaves, records))) for index, leaves, records in groups)

    def chunks(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The `others` among `names`, some at a time, which take no more of a device than the largest of them."""
        for chunk in chunks(names, {name: self._states.leaves[name].like for name in names}):
            yield self._states.read_leaves(chunk)


def stacked_leaves(states: DiskStates) -> set[str]:
    """The leaves that lie in the files layer by layer."""
    return set[str]().union(*(leaves for _, leaves, _ in _groups(states)))


def leaves_together(states: DiskStates) -> list[set[str]]:
    """Of those, which lie together in each layer."""
    return [set(leaves) for leaves in dict.fromkeys(frozenset(leaves) for _, leaves, _ in _groups(states))]


def _groups(states: DiskStates) -> list[tuple[int, set[str], list[Record]]]:
    """(number of a layer, leaves, their records of that layer) in the order of the file."""
    def number(piece: Any) -> Any:
        return piece.number, piece.layer

    groups = []
    for (_, index), pieces in itertools.groupby(
            (piece for piece in states.pieces if piece.layer is not None), number):
        records = [record for piece in pieces for record in piece.writes]
        groups.append((index, {part.leaf for record in records for part in record.parts}, records))
    for name, layers in states.records.layers.items():
        if name.startswith("frozen/"):
            groups += [(index, {name}, records) for index, records in enumerate(layers)]
    return groups
