"""What the rounds of forward leave for those of backward, in a file for the time of a step."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from zero_jax.disk.records import Record, RecordLayout
from zero_jax.disk.scratch import ScratchFile
from zero_jax.disk.streaming import Streaming
from zero_jax.jaxpr.rounds import Rounds
from zero_jax.step.disk.leaf import StoredLeaf
from zero_jax.tree import leaf_bytes


class SavedRounds:
    """The saved stacks of a program: one record for each round of each loop that makes some."""

    def __init__(self, loops: Sequence[Rounds], parts: Mapping[Any, jax.ShapeDtypeStruct]):
        """parts: of each saved stack, what a round makes of it, with its sharding. Opens nothing yet."""
        self._leaves = {stack: StoredLeaf(like) for stack, like in parts.items()}
        self._records, self._layout = dict[tuple[Any, int], Record](), RecordLayout()
        self._files: ScratchFile | None = None
        for number, loop in enumerate(loops):
            for index in loop.order if loop.saves else ():
                record = self._layout.add(
                    (f"activations of round {index} of loop {number}", shard, (0,) * len(leaf.local), leaf.local,
                     leaf.dtype.name)
                    for leaf in map(self._leaves.__getitem__, loop.saves) for shard in range(len(leaf.owners)))
                self._records |= {(stack, index): record for stack in loop.saves}
        self._makers = {stack: loop for loop in loops for stack in loop.saves}

    @property
    def device_bytes(self) -> int:
        """Bytes of the file for each device, without alignment."""
        return sum(leaf_bytes(leaf.local, leaf.dtype) * self._makers[stack].scan.length
                   for stack, leaf in self._leaves.items())

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        """In it, rounds can be written and read; the file is made in `folder` once, and kept until `close`."""
        if self._files is None:
            self._files = ScratchFile(folder, self._layout)
            self._streaming = Streaming(self._files)
        with self._streaming.abandoned_by_errors():
            yield

    def write(self, loop: Rounds, index: int, parts: Sequence[jax.Array]) -> None:
        """Writes what round `index` made, by `loop.saves`, once it is there; waits where more than two are waiting."""
        made = list(parts)

        def fill(record: Record, buffer: memoryview) -> None:
            shards = [shard for stack, part in zip(loop.saves, made, strict=True)
                      for shard in self._leaves[stack].shards(part)]
            for part, shard in zip(record.parts, shards, strict=True):
                part.view(buffer)[...] = shard
            made.clear()

        self._streaming.write(self._of(loop.saves[0], index), fill)

    @contextlib.contextmanager
    def read(self, loop: Rounds) -> Iterator[Callable[[], list[jax.Array]]]:
        """In it, what each round of `loop` fetches, by `loop.fetches`, when it is called; read ahead."""
        if not loop.fetches:
            yield list
            return
        self._streaming.finish()
        makers = list(dict.fromkeys(self._makers[stack] for stack in loop.fetches))
        order = [(maker, self._records[maker.saves[0], index]) for index in loop.order for maker in makers]
        maker_of = {record.number: maker for maker, record in order}

        def use(record: Record, buffer: memoryview) -> dict[Any, Any]:
            views = iter(record.parts)
            arrays = {}
            for stack in maker_of[record.number].saves:
                leaf = self._leaves[stack]
                shards = [next(views).view(buffer) for _ in leaf.owners]
                if stack in loop.fetches:
                    arrays[stack] = leaf.array(shards)
            return arrays

        with self._streaming.read([record for _, record in order], use) as ahead:
            def fetched() -> list[jax.Array]:
                arrays: dict[Any, Any] = {}
                for _ in makers:
                    arrays |= next(ahead)
                return [arrays[stack] for stack in loop.fetches]

            yield fetched

    def _of(self, stack: Any, index: int) -> Record:
        """The record in which round `index` writes its part of a stack."""
        return self._records[stack, index]

    def close(self) -> None:
        """Ends the threads and gives the space back."""
        if self._files is not None:
            self._streaming.close()
            self._files = None

