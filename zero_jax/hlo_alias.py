"""Which results lie in the memory of an operand: the same array by another name, or one that is updated in place."""

import dataclasses
import re
from collections.abc import Collection, Iterator

from zero_jax.hlo_shape import Array, Path, arrays
from zero_jax.hlo_text import Computation, Instruction, Module

SAME = {"bitcast", "optimization-barrier", "add-dependency", "domain"}
_RENAMES = {"bitcast", "convert", "copy"}
_MOVES = _RENAMES | {"transpose", "reshape", "copy-start", "reduce-precision", "slice", "dynamic-slice"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""What writes into its first operand, and the number of the operand that it writes."""
_ALIASING = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


@dataclasses.dataclass(frozen=True)
class Update:
    """A result written over the operand `into`, with the operand `operand`; None for what is computed on the way."""

    into: str | None
    operand: str | None


def arrays_of(computation: Computation, name: str) -> dict[Path, Array]:
    """The arrays of the result of `name`."""
    instruction = computation.instructions.get(name)
    return arrays(instruction.shape_text) if instruction else {}


def renamed(computation: Computation, instruction: Instruction) -> Iterator[tuple[Path, tuple[str, Path]]]:
    """Results that are an operand's array under another name: path, (operand, its path)."""
    opcode, operands = instruction.opcode, instruction.operands
    own = arrays_of(computation, instruction.name)
    if opcode == "tuple":
        yield from (((place, *path), (name, path)) for place, name in enumerate(operands)
                    for path in arrays_of(computation, name))
    elif opcode == "get-tuple-element":
        index = int(instruction.attribute("index"))
        yield from ((path, (operands[0], (index, *path))) for path in own)
    elif opcode in SAME or opcode == "while" or opcode.endswith("-update"):
        yield from ((path, (operands[0], path)) for path in own)
    elif opcode.endswith("-done"):
        started = arrays_of(computation, operands[0])
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
    for mine, number, theirs in _ALIASING.findall(instruction.attribute("output_to_operand_aliasing")):
        yield _path(mine), (operands[int(number)], _path(theirs))


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
    """What gives the result at `path`: in a fusion (the first of the two) an instruction in it."""
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
    instruction = computation.instructions[name]
    while instruction.opcode in moves:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _origin(inside: Computation | None, name: str, caller: Instruction, moves: Collection[str]) -> str | None:
    """The operand of `caller` that `name` comes from, within the fusion that it calls if it is one."""
    if inside is None:
        return name
    found = _through(inside, name, moves)
    return caller.operands[int(found.arguments)] if found.opcode == "parameter" else None


def _path(text: str) -> Path:
    return tuple(int(part) for part in text.replace(" ", "").split(",") if part)
