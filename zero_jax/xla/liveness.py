"""Buffers of a compiled program, and when each is alive.

A walk along the schedule, as in XLA's own heap simulation: a loop's body counts once, and what a loop carries is one
buffer from its start to its end. Only CPU returns its buffer assignment, without lifetimes, and compilation for a
target topology returns none, so this reads the program text, which every backend has.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable

from zero_jax.xla.aliasing import SAME, renamed, update_of
from zero_jax.xla.parser import Computation, Instruction, Module, parse
from zero_jax.xla.shapes import Array, Path

Key = tuple[int, str, Path]
"""A value: number of the frame, name of the instruction, path."""

_ELEMENTWISE = {
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "select", "convert", "negate", "exponential", "tanh",
    "sqrt", "rsqrt", "abs", "log", "power", "and", "or", "not", "compare", "reduce-precision", "copy",
}  # fmt: skip

@dataclasses.dataclass(frozen=True)
class Value:
    """One array of the result of one instruction, computed at `instant`; a frame is one call of a computation."""

    instant: int
    frame: int
    computation: str
    instruction: Instruction
    path: Path
    array: Array


@dataclasses.dataclass
class Buffer:
    """Memory that values share, one after another; alive from instant `start` to instant `end`.

    kind: "temporary", "argument", "output" or "constant".
    """

    values: list[Value]
    start: int
    end: int
    kind: str

    @property
    def bytes(self) -> int:
        """Of the largest of its values."""
        return max(value.array.bytes for value in self.values)

    @property
    def space(self) -> int:
        """Memory space. 0: device memory, 5: host memory, others: on-chip memory."""
        return self.values[0].array.space


class Buffers:
    """The buffers of one module."""

    def __init__(self, text: str | Module):
        self.module: Module = parse(text)
        self.values: dict[Key, Value] = {}
        self._parent: dict[Key, Key] = {}
        self._starts: dict[Key, int] = {}
        self._ends: dict[Key, int] = {}
        self._shares: list[tuple[int, Key, Key]] = []
        self._time = self._frames = 0
        self._kinds: dict[Key, str] = {}
        entry = self.module.computations[self.module.entry]
        frame = self._visit(entry)
        for path in entry.arrays(entry.root):
            self._use((frame, entry.root, path))
            self._kinds[(frame, entry.root, path)] = "output"
        self.all = self._collect()

    @functools.cached_property
    def owners(self) -> dict[Key, Buffer]:
        """The buffer of each value."""
        return {(value.frame, value.instruction.name, value.path): buffer
                for buffer in self.all for value in buffer.values}

    @property
    def temporaries(self) -> list[Buffer]:
        """Buffers in device memory that are neither arguments, nor outputs, nor constants."""
        return [buffer for buffer in self.all if buffer.kind == "temporary" and buffer.space == 0]

    def at_peak(self, buffers: Iterable[Buffer]) -> tuple[int, list[Buffer]]:
        """The instant at which most bytes of `buffers` are alive, and the buffers alive then, the largest first."""
        chosen = list(buffers)
        change: dict[int, int] = {}
        for buffer in chosen:
            change[buffer.start] = change.get(buffer.start, 0) + buffer.bytes
            change[buffer.end + 1] = change.get(buffer.end + 1, 0) - buffer.bytes
        alive = most = peak = 0
        for instant in sorted(change):
            alive += change[instant]
            if alive > most:
                most, peak = alive, instant
        return peak, sorted((each for each in chosen if each.start <= peak <= each.end), key=lambda each: -each.bytes)

    def arguments(self) -> dict[str, int]:
        """Bytes of each argument in device memory by its JAX name, without tile padding."""
        entry = self.module.computations[self.module.entry]
        sizes: dict[str, int] = {}
        for name in entry.parameters.values():
            label = re.sub(r"\\(.)", r"\1", self.module.metadata(entry.instructions[name])[0])
            sizes[label] = sizes.get(label, 0) + sum(
                array.dense_bytes for array in entry.arrays(name).values() if array.space == 0)
        return sizes

    # -- the walk -------------------------------------------------------------------------------------------------

    def _visit(self, computation: Computation) -> int:
        self._frames += 1
        frame = self._frames
        for instruction in computation.instructions.values():
            self._time += 1
            self._define(frame, computation, instruction)
            handler = {"while": self._loop, "call": self._call, "conditional": self._branches}.get(instruction.opcode)
            if handler:
                handler(frame, computation, instruction)
            elif instruction.opcode not in {"tuple", "get-tuple-element", *SAME}:
                for name in instruction.operands:
                    for path in computation.arrays(name):
                        self._use((frame, name, path))
                self._alias(frame, computation, instruction)
        return frame

    def _define(self, frame: int, computation: Computation, instruction: Instruction) -> None:
        for path, array in instruction.arrays.items():
            key = frame, instruction.name, path
            self.values[key] = Value(self._time, frame, computation.name, instruction, path, array)
            self._parent[key] = key
            self._starts[key] = self._ends[key] = self._time
            if instruction.opcode == "constant":
                self._kinds[key] = "constant"
            if instruction.opcode == "parameter" and computation.name == self.module.entry:
                self._kinds[key] = "argument"
                self._starts[key] = 0
        for mine, other in renamed(computation, instruction):
            self._union((frame, instruction.name, mine), (frame, *other))

    def _alias(self, frame: int, computation: Computation, instruction: Instruction) -> None:
        """Results that are written over an operand: always, or (recorded for later) if the operand dies here."""
        for path, array in instruction.arrays.items():
            key = frame, instruction.name, path
            update = update_of(self.module, instruction, path)
            if update and update.into:
                self._union(key, (frame, update.into, ()))
            elif instruction.opcode in _ELEMENTWISE or (
                    instruction.opcode == "fusion" and instruction.attribute("kind") == "kLoop"):
                for operand in instruction.operands:
                    # As in XLA, only of an array that the operand itself has computed: not of another name for it.
                    if next(renamed(computation, computation.instructions[operand]), None):
                        continue
                    for other, old in computation.arrays(operand).items():
                        if (old.bytes, old.space) == (array.bytes, array.space):
                            self._shares.append((self._time, key, (frame, operand, other)))

    def _loop(self, frame: int, computation: Computation, instruction: Instruction) -> None:
        for key in ("condition", "body"):
            inside = self.module.computations[instruction.attribute(key)]
            within = self._visit(inside)
            self._time += 1
            for path in instruction.arrays:
                carried = frame, instruction.name, path
                self._union(carried, (within, inside.parameters[0], path))
                if key == "body":
                    self._union(carried, (within, inside.root, path))
                self._use(carried)

    def _call(self, frame: int, computation: Computation, instruction: Instruction) -> None:
        self._enter(frame, computation, instruction, instruction.callees[0], instruction.operands)

    def _branches(self, frame: int, computation: Computation, instruction: Instruction) -> None:
        for operand, name in zip(instruction.operands[1:], instruction.callees, strict=True):
            self._enter(frame, computation, instruction, name, (operand,))
            for path in computation.arrays(operand):
                self._use((frame, operand, path))

    def _enter(self, frame: int, computation: Computation, caller: Instruction, name: str, operands: tuple[str, ...]
               ) -> None:
        inside = self.module.computations[name]
        within = self._visit(inside)
        for number, operand in enumerate(operands):
            for path in computation.arrays(operand):
                self._union((frame, operand, path), (within, inside.parameters[number], path))
        for path in caller.arrays:
            self._union((frame, caller.name, path), (within, inside.root, path))

    # -- the sets of values that share memory ---------------------------------------------------------------------

    def _use(self, key: Key) -> None:
        if key in self._ends:
            self._ends[key] = self._time

    def _find(self, key: Key) -> Key:
        while self._parent[key] != key:
            self._parent[key] = self._parent[self._parent[key]]
            key = self._parent[key]
        return key

    def _union(self, one: Key, other: Key) -> None:
        if one in self._parent and other in self._parent:
            self._parent[self._find(one)] = self._find(other)

    def _collect(self) -> list[Buffer]:
        groups = self._groups()
        for instant, result, operand in self._shares:  # in the order of the schedule
            new, old = self._find(result), self._find(operand)
            before, after = groups[old], groups[new]
            if new != old and before.kind == after.kind == "temporary" and before.end == instant == after.start:
                self._parent[old] = new
                groups[new] = Buffer(before.values + after.values, before.start, after.end, after.kind)
                del groups[old]
        return list(groups.values())

    def _groups(self) -> dict[Key, Buffer]:
        groups: dict[Key, Buffer] = {}
        for key, value in self.values.items():
            start, end, kind = self._starts[key], self._ends[key], self._kinds.get(key, "temporary")
            group = groups.setdefault(self._find(key), Buffer([], start, end, "temporary"))
            group.values.append(value)
            group.start, group.end = min(group.start, start), max(group.end, end)
            if kind != "temporary" and group.kind != "argument":
                group.kind = kind
        return groups
