"""Which parameter a collective serves, found by following values through the compiled program.

A gathered value is followed back to the inputs of the program, a reduced gradient forward to the output that is
written over an input (`input_output_alias`). Only data movement and elementwise operations are followed: a matrix
product, a reduction, a lookup or a scalar ends the path, so that an activation leads to no parameter.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from zero_jax.xla.parser import Frame, Instruction, Module
from zero_jax.xla.shapes import Path, aliases

Value = tuple[Frame, str, Path]
_LIMIT = 50_000  # values visited for one operand

_MOVES = {
    "copy", "bitcast", "convert", "reshape", "transpose", "slice", "dynamic-slice", "pad", "reduce-precision",
    "reverse", "bitcast-convert", "copy-start", "copy-done", "slice-start", "slice-done", "negate", "broadcast",
}  # fmt: skip
_MIXES = {
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "select", "clamp", "concatenate", "sqrt",
    "rsqrt", "and", "or", "xor", "shift-left", "shift-right-logical", "abs", "sign", "add-dependency",
}  # fmt: skip
_INTO = ("fusion", "call", "fusion-start", "call-start", "async-start")
_GATHERS = ("all-gather", "collective-permute", "all-to-all", "collective-broadcast")
UPDATE_SLICES = ("dynamic-update-slice", "dynamic-update-slice-start")
"""Opcodes of what writes a part of an array; XLA:TPU starts a write to host memory, and waits for it elsewhere."""
_COLLECTIVES = (*_GATHERS, "all-reduce", "reduce-scatter", "ragged-all-to-all")


class Flow:
    """The data flow of one module."""

    def __init__(self, module: Module):
        """Take a parsed module, whose header has the aliases of inputs and outputs."""
        self.module = module
        self._inputs = module.computations[module.entry].parameters
        self._aliases = {output: number for output, number, _ in aliases(module.header)}

    def serves(self, frame: Frame, collective: Instruction, kind: str) -> tuple[str, ...]:
        """Paths of the parameters that `collective` of `frame` gathers, or whose gradients it reduces; () if unknown.

        kind: as `Collective.kind`.
        """
        served: dict[str, None] = {}  # an ordered set
        for position, operand in enumerate(collective.operands):
            if _is_small(frame, operand):
                continue
            value = frame, operand, ()
            result = frame, collective.name, ((position,) if len(collective.operands) > 1 else ())
            back = kind in _GATHERS or self._is_placed(frame, operand)
            names = self._back([value]) if back else self._forward(result)
            if back and not names and kind != "all-gather":
                names = self._forward(result)
            served.update(dict.fromkeys(names))
        return tuple(served)

    def input_of(self, value: Value) -> str:
        """The op_name of the nearest input of the program that `value` comes from, as its author wrote it; or "".

        An array of which parts are written is the one that they are written to, not what they are computed from.
        """
        number = next(self._inputs_of([value], self._array_of), None)
        if number is None:
            return ""
        entry = self.module.computations[self.module.entry]
        return self.module.metadata(entry.instructions[self._inputs[number]])[0].replace("\\", "")

    def _is_placed(self, frame: Frame, name: str) -> bool:
        """Whether a shard is written into zeros: an all-reduce of that is how TPU gathers small arrays."""
        while (instruction := frame.computation.instructions[name]).opcode in ("bitcast", "copy", "fusion"):
            if instruction.opcode == "fusion":
                frame = self.module.frame(instruction.callees[0], instruction, frame)
                name = frame.computation.root
            else:
                name = instruction.operands[0]
        return instruction.opcode == "dynamic-update-slice"

    def _back(self, values: Iterable[Value]) -> list[str]:
        return list(dict.fromkeys(name for number in self._inputs_of(values) if (name := self._parameter(number))))

    def _array_of(self, value: Value) -> Iterable[Value]:
        """As `sources`, but that of an updated slice there is the array alone."""
        sources = list(self.sources(value))
        return sources[-1:] if _instruction(value).opcode in UPDATE_SLICES else sources

    def _inputs_of(self, values: Iterable[Value], step: Callable[[Value], Iterable[Value]] | None = None
                   ) -> Iterator[int]:
        """Numbers of the inputs of the program that `values` come from by `step` (`sources`), nearest first."""
        for frame, name, path in search(values, step or self.sources):
            instruction = frame.computation.instructions[name]
            if instruction.opcode == "parameter" and frame.caller is None and not path:
                yield int(instruction.arguments)

    def _forward(self, value: Value) -> list[str]:
        """Inputs that are replaced by outputs which `value` reaches, else those with which it is first combined."""
        values = [value, *self._tables(value)]
        replaced: dict[str, None] = {}  # an ordered set
        partners: list[Value] = []
        for frame, name, path in search(values, self.uses):
            within = frame.computation
            if frame.caller is None and name == within.root and path in self._aliases:
                if parameter := self._parameter(self._aliases[path]):
                    replaced[parameter] = None
            for user, position in within.users.get(name, ()):
                if user.opcode in _MIXES - {"concatenate"}:
                    partners += [(frame, o, ()) for i, o in enumerate(user.operands) if i != position]
        if replaced:
            return list(replaced)
        return next((names for each in partners[:64] if (names := self._back([each]))), [])

    def _tables(self, value: Value) -> Iterator[Value]:
        """Gradients of tables that `value` is scattered into. Sums are not followed: they may be activations."""

        def moved(value: Value) -> Iterator[Value]:
            return (use for use in self.uses(value) if _instruction(use).opcode not in _MIXES)

        for frame, name, _ in search([value], moved):
            for user, position in frame.computation.users.get(name, ()):
                if user.opcode == "scatter" and position == len(user.operands) - 1:
                    yield frame, user.name, ()

    def sources(self, value: Value) -> Iterator[Value]:
        """The values that `value` comes from, one step back."""
        frame, name, path = value
        instruction = frame.computation.instructions[name]
        opcode, operands = instruction.opcode, instruction.operands
        kind = re.sub("-(start|done)$", "", opcode)
        if opcode == "parameter":
            yield from self._arguments(value, int(instruction.arguments))
        elif opcode == "get-tuple-element":
            yield frame, operands[0], (int(instruction.attribute("index")), *path)
        elif opcode == "tuple" and path:
            yield frame, operands[path[0]], path[1:]
        elif opcode == "while":
            yield frame, operands[0], path
            yield from self._root(instruction.attribute("body"), instruction, frame, path)
        elif opcode in _INTO:
            yield from self._root(instruction.callees[0], instruction, frame, path)
        elif opcode == "optimization-barrier" or opcode.endswith(("-done", "-update")):
            yield frame, operands[0], path
        elif kind in _GATHERS or kind == "all-reduce":
            operand = operands[path[-1] if path and len(operands) > path[-1] else 0]
            if kind != "all-reduce" or self._is_placed(frame, operand):
                yield frame, operand, ()
        elif opcode in UPDATE_SLICES:
            yield from ((frame, name, ()) for name in operands[1::-1])
        elif "AsyncCollective" in instruction.tail:  # TPU: the start of a gather, or the shard beside it
            yield frame, operands[0], ()
        elif _moves(frame, instruction):
            yield frame, operands[0], ()
        elif opcode in _MIXES or "ConcatBitcast" in instruction.tail:
            yield from ((frame, name, ()) for name in operands if not _is_small(frame, name))

    def uses(self, value: Value) -> Iterator[Value]:
        """The values that `value` goes into, one step forward."""
        frame, name, path = value
        for user, position in frame.computation.users.get(name, ()):
            opcode, kind = user.opcode, re.sub("-(start|done)$", "", user.opcode)
            if opcode == "get-tuple-element":
                # A start holds operands and results, so that its done sees the last of the path.
                if path and int(user.attribute("index")) == path[0]:
                    yield frame, user.name, path[1:]
            elif opcode == "tuple":
                yield frame, user.name, (position, *path)
            elif opcode == "while":
                yield from self._parameter_of(user.attribute("body"), user, frame, 0, path)
            elif opcode in _INTO:
                yield from self._parameter_of(user.callees[0], user, frame, position, path)
            elif opcode == "conditional" and position:
                yield from self._parameter_of(user.callees[position - 1], user, frame, 0, path)
            elif opcode == "optimization-barrier" or opcode.endswith(("-done", "-update")):
                yield frame, user.name, path
            elif "AsyncCollectiveStart" in user.tail:  # TPU: its result is the second of what is carried along
                yield frame, user.name, (1,)
            elif "AsyncCollectiveDone" in user.tail:
                yield frame, user.name, ()
            elif kind in _COLLECTIVES:
                yield frame, user.name, (position,) if len(user.operands) > 1 else ()
            elif (opcode in UPDATE_SLICES and position < 2) or (opcode == "scatter" and position == 0):
                yield frame, user.name, ()
            elif (position == 0 and _moves(frame, user)) or (
                    (opcode in _MIXES or "ConcatBitcast" in user.tail) and not _is_small(frame, name)):
                yield frame, user.name, ()
        if name == frame.computation.root and frame.caller is not None and frame.parent is not None:
            if frame.caller.opcode == "while":
                yield frame, frame.computation.parameters[0], path
            yield frame.parent, frame.caller.name, path

    def _arguments(self, value: Value, number: int) -> Iterator[Value]:
        """What the caller passes, or the loop carries, for a parameter."""
        frame, _, path = value
        caller, parent = frame.caller, frame.parent
        if caller is None or parent is None:
            return
        if caller.opcode == "conditional":
            number = caller.callees.index(frame.computation.name) + 1
        if number < len(caller.operands):
            yield parent, caller.operands[number], path
        if caller.opcode == "while" and caller.attribute("body") == frame.computation.name:
            yield frame, frame.computation.root, path

    def _root(self, name: str, caller: Instruction, frame: Frame, path: Path) -> Iterator[Value]:
        inside = self.module.frame(name, caller, frame)
        yield inside, inside.computation.root, path

    def _parameter_of(self, name: str, caller: Instruction, frame: Frame, number: int, path: Path) -> Iterator[Value]:
        inside = self.module.frame(name, caller, frame)
        if number in inside.computation.parameters:
            yield inside, inside.computation.parameters[number], path

    def _parameter(self, number: int) -> str | None:
        """`state.params['blocks']['qkv']` -> blocks/qkv; None if the input is not a parameter of the model."""
        entry = self.module.computations[self.module.entry]
        op_name, _ = self.module.metadata(entry.instructions[self._inputs[number]])
        keys = re.fullmatch(r"(?:\w+\.)*(?:params|weights)((?:\[[^]]*\]|\.\w+)+)", op_name.replace("\\", ""))
        return "/".join(re.findall(r"\w[^]'\".]*", keys[1])) if keys else None


def _moves(frame: Frame, instruction: Instruction) -> bool:
    """Whether it only moves its first operand; a scalar, or what is smaller than its broadcast, is used and not moved.

    XLA expresses a reshape as a reduction over dims of size 1, too.
    """
    if instruction.opcode not in _MOVES and instruction.opcode != "reduce":
        return False
    size = frame.computation.instructions[instruction.operands[0]].elements
    return size > 1 and (size == instruction.elements or instruction.opcode not in ("broadcast", "reduce"))


def _is_small(frame: Frame, name: str) -> bool:
    return frame.computation.instructions[name].elements <= 1


def _instruction(value: Value) -> Instruction:
    return value[0].computation.instructions[value[1]]


def search(values: Iterable[Value], step: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    """The values that `step` reaches from `values`, breadth first, each once and at most `_LIMIT` of them."""
    queue, seen = deque(values), set()
    while queue and len(seen) < _LIMIT:
        frame, name, path = value = queue.popleft()
        key = frame.computation.name, frame.caller and frame.caller.name, name, path
        if key not in seen:
            seen.add(key)
            yield value
            queue.extend(step(value))
