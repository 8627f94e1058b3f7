"""Which results share the memory of an operand: the same array by another name, or one that is updated in place."""

import dataclasses
from collections.abc import Collection, Iterator

from zero_jax.xla.parser import Computation, Instruction, Module
from zero_jax.xla.shapes import Path, aliases

SAME = {"bitcast", "optimization-barrier", "add-dependency", "domain"}
_RENAMES = {"bitcast", "convert", "copy"}
_MOVES = _RENAMES | {"transpose", "reshape", "copy-start", "reduce-precision", "slice", "dynamic-slice"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcodes that write into their first operand, and the number of the operand that they write."""


@dataclasses.dataclass(frozen=True)
class Update:
    """A result written over the operand `into`, from the operand `operand`; None for a value computed in the fusion."""

    into: str | None
    operand: str | None


def renamed(computation: Computation, instruction: Instruction) -> Iterator[tuple[Path, tuple[str, Path]]]:
    """Results that are an operand's array under another name: path, (operand, its path)."""
    opcode, operands = instruction.opcode, instruction.operands
    own = instruction.arrays
    if opcode == "tuple":
        yield from (((place, *path), (name, path)) for place, name in enumerate(operands)
                    for path in computation.arrays(name))
    elif opcode == "get-tuple-element":
        index = int(instruction.attribute("index"))
        yield from ((path, (operands[0], (index, *path))) for path in own)
    elif opcode in SAME or opcode == "while" or opcode.endswith("-update"):
        yield from ((path, (operands[0], path)) for path in own)
    elif opcode.endswith("-done"):
        started = computation.arrays(operands[0])
        prefix: Path = (0,) if opcode == "copy-done" else (1,)
        if opcode == "all-reduce-done":
            prefix = ()
        for path in own:
            if (*prefix, *path) in started:
                yield path, (operands[0], (*prefix, *path))
    elif opcode.endswith("-start") and opcode != "all-reduce-start":
        if opcode == "copy-start":
            yield (1,), (operands[0], ())
        elif (0,) in own:
            yield (0,), (operands[0], ())
        else:
            yield from (((0, place), (name, ())) for place, name in enumerate(operands) if (0, place) in own)
    for result, number, path in aliases(instruction.attribute("output_to_operand_aliasing")):
        yield result, (operands[number], path)


def is_sent(instruction: Instruction, path: Path) -> bool:
    """Whether the result at `path` is an operand that a `-start` repeats."""
    return instruction.opcode.endswith("-start") and path[:1] == ((1,) if instruction.opcode == "copy-start" else (0,))


def update_of(module: Module, instruction: Instruction, path: Path) -> Update | None:
    """How the result at `path` updates an operand in place; None if it does not."""
    inside, end = _end(module, instruction, path)
    if end is None or end.opcode not in _UPDATES:
        return None
    into = _origin(inside, end.operands[0], instruction, _RENAMES)
    return Update(into, _origin(inside, end.operands[_UPDATES[end.opcode]], instruction, _MOVES))


def moved_from(module: Module, instruction: Instruction, path: Path) -> str | None:
    """The operand that the result at `path` is a copy, a slice or a conversion of; None if it is computed."""
    inside, end = _end(module, instruction, path)
    if end is None or (inside is None and end.opcode not in _MOVES):
        return None
    return _origin(inside, end.name if inside else end.operands[0], instruction, _MOVES)


def _end(module: Module, instruction: Instruction, path: Path) -> tuple[Computation | None, Instruction | None]:
    """(computation of the fusion or None, the instruction that computes the result at `path` or None)."""
    if instruction.opcode == "fusion-start":
        if path[0] != 1:
            return None, None
        path = path[1:]
    elif instruction.opcode != "fusion":
        return None, None if path else instruction
    inside = module.computations[instruction.callees[0]]
    end = inside.instructions[inside.root]
    if path and end.opcode == "tuple":
        end = inside.instructions[end.operands[path[0]]]
    return inside, _through(inside, end.name, _RENAMES)


def _through(computation: Computation, name: str, moves: Collection[str]) -> Instruction:
    """Where the value `name` comes from, through instructions whose opcode is in `moves`."""
    instruction = computation.instructions[name]
    while instruction.opcode in moves:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _origin(inside: Computation | None, name: str, caller: Instruction, moves: Collection[str]) -> str | None:
    """The operand of `caller` that `name` comes from, within the fusion that it calls if it is one."""
    if inside is None:
        return name
    source = _through(inside, name, moves)
    return caller.operands[int(source.arguments)] if source.opcode == "parameter" else None
