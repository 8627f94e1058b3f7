"""Gradients of stacked layers in a file, from the round of backward that makes them to the update that reads them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from zero_jax.disk.records import Record, RecordLayout
from zero_jax.disk.streamed_scratch import StreamedScratch
from zero_jax.step.disk.leaf import StoredLeaf, layer_of
from zero_jax.step.disk.plan import GRADIENTS
from zero_jax.step.disk.state_records import Piece

AFTER_DAMAGE = "The state in memory is gone: step.stored_state(batch) is the one before the step."


class LayerGradients:
    """One record for each block of a gradient, of the same blocks as the update's."""

    def __init__(self, pieces: Sequence[Piece], names: Sequence[str], likes: Mapping[str, jax.ShapeDtypeStruct]):
        """names: of the arrays that an update carries. likes: the stacks, by the name of the parameter."""
        self._leaves = {f"{GRADIENTS}{name}": StoredLeaf(like) for name, like in likes.items()}
        self._parts = {name: StoredLeaf(layer_of(like)) for name, like in likes.items()}
        self._records: list[Record | None] = []
        self._layers: dict[tuple[str, int], list[Record]] = {}
        layout = RecordLayout()
        for piece in pieces:
            read = [(at, names[number]) for at, task in enumerate(piece.group.tasks) for number in task.stored
                    if names[number] in self._leaves]
            self._records.append(layout.add(
                (name, shard, *piece.block(at, self._leaves[name]), self._leaves[name].dtype.name)
                for at, name in read for shard in range(len(self._leaves[name].owners))) if read else None)
            for _, name in read:
                record = self._records[-1]
                assert record is not None and record.parts[0].sizes[0] == 1
                self._layers.setdefault((name.removeprefix(GRADIENTS), record.parts[0].start[0]), []).append(record)
        self.file = StreamedScratch(layout, AFTER_DAMAGE)

    def write(self, name: str, index: int, part: jax.Array) -> None:
        """Writes the gradient of layer `index`, once it is there; waits where more than two records are waiting."""
        leaf = self._parts[name]

        def fill(record: Record, buffer: memoryview) -> None:
            shards = leaf.shards(part)
            for block in record.parts:
                block.view(buffer)[...] = shards[block.shard][block.index[1:]]

        for record in self._layers[name, index]:
            self.file.streaming.write(record, fill)

    @contextlib.contextmanager
    def read_pieces(self) -> Iterator[Iterator[dict[str, Any]]]:
        """In it, for each piece its block of the gradient as an array, by name, read ahead; or nothing."""
        def use(record: Record, buffer: memoryview) -> dict[str, Any]:
            name = record.parts[0].leaf
            leaf = self._leaves[name]
            return {name: leaf.array([part.view(buffer) for part in record.parts],
                                     leaf.block_shape(record.parts[0].sizes))}

        with self.file.streaming.read([each for each in self._records if each is not None], use) as ahead:
            yield ({} if record is None else next(ahead) for record in self._records)
