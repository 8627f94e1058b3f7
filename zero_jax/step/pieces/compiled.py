"""A step that runs in pieces, as data: what each of its programs sends, as often as it runs, and the largest memory."""

import dataclasses
import functools
from typing import Any

from zero_jax.contract.report import Contract
from zero_jax.jaxpr.rounds import Rounds
from zero_jax.sharding.layout import Layout
from zero_jax.step.compiled import CompiledStep
from zero_jax.step.pieces.program import Pieces
from zero_jax.xla.events import Event, repeated


@dataclasses.dataclass(frozen=True)
class CompiledPieces(CompiledStep):
    """As `CompiledStep`; its text and memory are those of the piece that needs the most memory.

    Attributes:
        pieces: every piece, and how often a step runs it, in order.
    """

    pieces: tuple[tuple[CompiledStep, int], ...] = dataclasses.field(default=(), repr=False)

    @functools.cached_property
    def schedule(self) -> tuple[Event, ...]:
        """What runs, in order; the rounds of a loop as a loop."""
        return tuple(event for piece, rounds in self.pieces for event in (
            piece.schedule if rounds == 1 else (repeated(piece.schedule, rounds),)))

    @functools.cached_property
    def gathered_bytes(self) -> int:
        """As `CompiledStep`, the most of all pieces."""
        return max(piece.gathered_bytes for piece, _ in self.pieces)


def compiled_pieces(program: Pieces, layout: Layout, contract: Contract) -> CompiledPieces:
    """The pieces of a program beside its contract."""
    pieces = [
        (CompiledStep(each.run.as_text() or "", _memory(each.run.memory_analysis(), each.other_bytes), layout,
                      contract), each.piece.scan.length if isinstance(each.piece, Rounds) else 1)
        for each in program.pieces]
    largest = max((piece for piece, _ in pieces), key=lambda piece: piece.device_bytes if piece.memory else 0)
    return CompiledPieces(largest.text, largest.memory, layout, contract, tuple(pieces),
                          saved_bytes=program.saved.device_bytes)


class _Memory:
    """XLA's memory analysis of a piece, whose arguments count what it does not read, too."""

    def __init__(self, memory: Any, other_bytes: int):
        self._memory = memory
        self.argument_size_in_bytes = memory.argument_size_in_bytes + other_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


def _memory(memory: Any, other_bytes: int) -> Any:
    return None if memory is None else _Memory(memory, other_bytes)
