"""What lies in memory while a compiled program runs: its buffers, and when each is alive.

A walk along the schedule, as the compiler's own heap simulation does it: a loop's body counts once, and what a loop
carries is one buffer from its start to its end. Only CPU hands out its buffer assignment, and without lifetimes; a
described accelerator hands out none, so that the text is what every backend has.
"""

import dataclasses
import re
from collections.abc import Iterable

from zero_jax import hlo_text
from zero_jax.hlo_alias import SAME, arrays_of, renamed, update_of
from zero_jax.hlo_shape import Array, Path
from zero_jax.hlo_text import Computation, Instruction, Module

Key = tuple[int, str, Path]
"""A value: frame, instruction, path."""

_ELEMENTWISE = {
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "select", "convert", "negate", "exponential", "tanh",
    "sqrt", "rsqrt", "abs", "log", "power", "and", "or", "not", "compare", "reduce-precision", "copy",
}  # fmt: skip

@dataclasses.dataclass(frozen=True)
class Value:
    """One array of the result of one instruction, made at `instant`; a frame is a computation as it is called once."""

    instant: int
    frame: int
    computation: str
    instruction: Instruction
    path: Path
    array: Array


@dataclasses.dataclass
class Buffer:
    """Memory that values share one after another, alive from instant `start` to instant `end`.

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
        """0: device memory, 5: host memory, others lie on the chip."""
        return self.values[0].array.space


class Buffers:
    """The buffers of one module."""

    def __init__(self, text: str):
        self.module: Module = hlo_text.parse(text)
        self.values: dict[Key, Value] = {}
        self._parent: dict[Key, Key] = {}
        self._starts: dict[Key, int] = {}
        self._ends: dict[Key, int] = {}
        self._shares: list[tuple[int, Key, Key]] = []
        self._time = self._frames = 0
        self._kinds: dict[Key, str] = {}
        entry = self.module.computations[self.module.entry]
        frame = self._visit(entry)
        for path in arrays_of(entry, entry.root):
            self._use((frame, entry.root, path))
            self._kinds[(frame, entry.root, path)] = "output"
        self.all = self._collect()

    @property
    def temporaries(self) -> list[Buffer]:
        """Those in device memory that are neither arguments, nor outputs, nor constants."""
        return [buffer for buffer in self.all if buffer.kind == "temporary" and buffer.space == 0]

    def at_peak(self, buffers: Iterable[Buffer]) -> tuple[int, list[Buffer]]:
        """The instant at which most bytes of `buffers` are alive, and those that are, the largest first."""
        chosen = list(buffers)
        change: dict[int, int] = {}
        for buffer in chosen:
            change[buffer.start] = change.get(buffer.start, 0) + buffer.bytes
            change[buffer.end + 1] = change.get(buffer.end + 1, 0) - buffer.bytes
        held = most = peak = 0
        for instant in sorted(change):
            held += change[instant]
            if held > most:
                most, peak = held, instant
        return peak, sorted((each for each in chosen if each.start <= peak <= each.end), key=lambda each: -each.bytes)

    def arguments(self) -> dict[str, int]:
        """Bytes of each argument in device memory by its JAX name, without padding."""
        entry = self.module.computations[self.module.entry]
        sizes: dict[str, int] = {}
        for name in entry.parameters.values():
            label = re.sub(r"\\(.)", r"\1", self.module.metadata(entry.instructions[name])[0])
            sizes[label] = sizes.get(label, 0) + sum(
                hlo_text.shape_bytes(array.dtype, array.dims)
                for array in arrays_of(entry, name).values() if array.space == 0)
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
                    for path in arrays_of(computation, name):
                        self._use((frame, name, path))
                self._alias(frame, computation, instruction)
        return frame

    def _define(self, frame: int, computation: Computation, instruction: Instruction) -> None:
        for path, array in arrays_of(computation, instruction.name).items():
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
        """Results that are written over an operand: always, or (noted for later) if it dies here."""
        for path, array in arrays_of(computation, instruction.name).items():
            key = frame, instruction.name, path
            update = update_of(self.module, instruction, path)
            if update and update.into:
                self._union(key, (frame, update.into, ()))
            elif instruction.opcode in _ELEMENTWISE or (
                    instruction.opcode == "fusion" and instruction.attribute("kind") == "kLoop"):
                for operand in instruction.operands:
                    # As XLA, only from what the operand itself has made: not where it is another name of it.
                    if next(renamed(computation, computation.instructions[operand]), None):
                        continue
                    for other, old in arrays_of(computation, operand).items():
                        if (old.bytes, old.space) == (array.bytes, array.space):
                            self._shares.append((self._time, key, (frame, operand, other)))

    def _loop(self, frame: int, computation: Computation, instruction: Instruction) -> None:
        for key in ("condition", "body"):
            inside = self.module.computations[instruction.attribute(key)]
            within = self._visit(inside)
            self._time += 1
            for path in arrays_of(computation, instruction.name):
                carried = frame, instruction.name, path
                self._union(carried, (within, inside.parameters[0], path))
                if key == "body":
                    self._union(carried, (within, inside.root, path))
                self._use(carried)

    def _call(self, frame: int, computation: Computation, instruction: Instruction) -> None:
        inside = self.module.computations[instruction.callees[0]]
        within = self._visit(inside)
        for number, operand in enumerate(instruction.operands):
            for path in arrays_of(computation, operand):
                self._union((frame, operand, path), (within, inside.parameters[number], path))
        for path in arrays_of(computation, instruction.name):
            self._union((frame, instruction.name, path), (within, inside.root, path))

    def _branches(self, frame: int, computation: Computation, instruction: Instruction) -> None:
        for operand, name in zip(instruction.operands[1:], instruction.callees, strict=True):
            inside = self.module.computations[name]
            within = self._visit(inside)
            for path in arrays_of(computation, operand):
                self._union((frame, operand, path), (within, inside.parameters[0], path))
                self._use((frame, operand, path))
            for path in arrays_of(computation, instruction.name):
                self._union((frame, instruction.name, path), (within, inside.root, path))

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
