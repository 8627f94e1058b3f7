"""What the rounds of forward leave for those of backward, in a file for the time of a step."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from zero_jax.disk.records import Record, RecordLayout
from zero_jax.disk.streamed_scratch import StreamedScratch
from zero_jax.jaxpr.rounds import Rounds
from zero_jax.step.disk.leaf import StoredLeaf
from zero_jax.tree import leaf_bytes

AFTER_DAMAGE = "The state is as it was before the step."


class SavedRounds:
    """The saved stacks of a program: one record for each round of each loop that makes some."""

    def __init__(self, loops: Sequence[Rounds], parts: Mapping[Any, jax.ShapeDtypeStruct]):
        """parts: of each saved stack, what a round makes of it, with its sharding. Opens nothing yet."""
        self._leaves = {stack: StoredLeaf(like) for stack, like in parts.items()}
        self._records, self._layout = dict[tuple[Any, int], Record](), RecordLayout()
        for number, loop in enumerate(loops):
            for index in loop.order if self.saves(loop) else ():
                record = self._layout.add(
                    (f"activations of round {index} of loop {number}", shard, (0,) * len(leaf.local), leaf.local,
                     leaf.dtype.name)
                    for leaf in map(self._leaves.__getitem__, self.saves(loop)) for shard in range(len(leaf.owners)))
                self._records |= {(stack, index): record for stack in self.saves(loop)}
        self._makers = {stack: loop for loop in loops for stack in self.saves(loop)}
        self.file = StreamedScratch(self._layout, AFTER_DAMAGE)

    def saves(self, loop: Rounds) -> list[Any]:
        """Those of `loop.saves` that are in the file."""
        return [stack for stack in loop.saves if stack in self._leaves]

    def fetches(self, loop: Rounds) -> list[Any]:
        """Those of `loop.fetches` that are in the file."""
        return [stack for stack in loop.fetches if stack in self._leaves]

    @property
    def device_bytes(self) -> int:
        """Bytes of the file for each device, without alignment."""
        return sum(leaf_bytes(leaf.local, leaf.dtype) * self._makers[stack].scan.length
                   for stack, leaf in self._leaves.items())

    def write(self, loop: Rounds, index: int, parts: Sequence[jax.Array]) -> None:
        """Writes what round `index` made, by `saves(loop)`, once it is there; waits where more than two are waiting."""
        made = list(parts)

        def fill(record: Record, buffer: memoryview) -> None:
            shards = [shard for stack, part in zip(self.saves(loop), made, strict=True)
                      for shard in self._leaves[stack].shards(part)]
            for part, shard in zip(record.parts, shards, strict=True):
                part.view(buffer)[...] = shard
            made.clear()

        self.file.streaming.write(self._of(self.saves(loop)[0], index), fill)

    @contextlib.contextmanager
    def read(self, loop: Rounds) -> Iterator[Callable[[], list[jax.Array]]]:
        """In it, what each round of `loop` fetches, by `fetches(loop)`, when it is called; read ahead."""
        fetches = self.fetches(loop)
        if not fetches:
            yield list
            return
        self.file.streaming.finish()
        makers = list(dict.fromkeys(self._makers[stack] for stack in fetches))
        order = [(maker, self._records[self.saves(maker)[0], index]) for index in loop.order for maker in makers]
        maker_of = {record.number: maker for maker, record in order}

        def use(record: Record, buffer: memoryview) -> dict[Any, Any]:
            views = iter(record.parts)
            arrays = {}
            for stack in self.saves(maker_of[record.number]):
                leaf = self._leaves[stack]
                shards = [next(views).view(buffer) for _ in leaf.owners]
                if stack in fetches:
                    arrays[stack] = leaf.array(shards)
            return arrays

        with self.file.streaming.read([record for _, record in order], use) as ahead:
            def fetched() -> list[jax.Array]:
                arrays: dict[Any, Any] = {}
                for _ in makers:
                    arrays |= next(ahead)
                return [arrays[stack] for stack in fetches]

            yield fetched

    def _of(self, stack: Any, index: int) -> Record:
        """The record in which round `index` writes its part of a stack."""
        return self._records[stack, index]
