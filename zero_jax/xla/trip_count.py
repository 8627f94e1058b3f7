"""How often a while loop of compiled HLO runs, and what its counters are in an iteration."""

import itertools
import math
import operator
import re

from zero_jax.xla.parser import Frame, Instruction, Module

_ARITHMETIC = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min, "maximum": max,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "shift-left": operator.lshift, "shift-right-arithmetic": operator.rshift,
    "divide": lambda a, b: abs(a) // abs(b) * _sign(a) * _sign(b), "remainder": lambda a, b: abs(a) % abs(b) * _sign(a)}
"""Of integers; HLO's division drops the fraction, and its remainder has the sign of what is divided."""
_SAME_VALUE = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape")


def trip_count(module: Module, frame: Frame, loop: Instruction) -> int | None:
    """How often the while `loop`, an instruction of `frame`, runs; None if the data decides.

    The compiler's `known_trip_count` where it prints one (CPU, GPU), else (TPU) from the condition
    `i < constant`, the start and the body's `i + step`, through copies, fusions and invariants.
    """
    if known := re.search(r"known_trip_count\W+n\W+(\d+)", loop.tail):
        return int(known[1])
    condition, body = (module.frame(loop.attribute(name), loop, frame) for name in ("condition", "body"))
    test_frame, test = _resolve(module, condition, condition.computation.root)
    if test.opcode != "compare" or len(test.operands) != 2:
        return None
    direction, sides = test.attribute("direction"), [(test_frame, name) for name in test.operands]
    bounds = [_constant(module, *side) for side in sides]
    if bounds[0] is not None:
        direction = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
        sides, bounds = sides[::-1], bounds[::-1]
    _, counter = _resolve(module, *sides[0])
    if bounds[0] is not None or bounds[1] is None or counter.opcode != "get-tuple-element":
        return None
    index = int(counter.attribute("index"))
    start = _element(module, frame, loop.operands[0], index)
    after = _element(module, body, body.computation.root, index)
    first = _constant(module, *start) if start else None
    step = _steps(module, *after, index) if after else None
    if first is None or not step:
        return None
    distance = (bounds[1] - first) * (1 if step > 0 else -1)
    if direction not in (("LT", "LE", "NE") if step > 0 else ("GT", "GE", "NE")):
        return None
    distance += direction in ("LE", "GE")
    return max(0, math.ceil(distance / abs(step)))


def runs(module: Module, frame: Frame) -> int:
    """How often one run of the program runs `frame`; a loop whose length is not known counts once."""
    return math.prod(trip_count(module, *call) or 1 for call in frame.calls() if call[1].opcode == "while")


def _steps(module: Module, frame: Frame, name: str, index: int) -> int | None:
    """What the body of a loop adds to element `index`; None if it changes it in any other way."""
    frame, instruction = _resolve(module, frame, name)
    if instruction.opcode == "get-tuple-element":
        of = frame.computation.instructions[instruction.operands[0]].opcode
        return 0 if of == "parameter" and instruction.attribute("index") == str(index) else None
    if instruction.opcode not in ("add", "subtract"):
        return None
    left, right = instruction.operands
    amount = _constant(module, frame, right)
    if amount is None and instruction.opcode == "add":
        left, amount = right, _constant(module, frame, left)
    before = _steps(module, frame, left, index)
    if before is None or amount is None:
        return None
    return before + (amount if instruction.opcode == "add" else -amount)


def _constant(module: Module, frame: Frame, name: str) -> int | None:
    _, instruction = _resolve(module, frame, name)
    is_integer = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.arguments)
    return int(instruction.arguments) if is_integer else None


def _resolve(module: Module, frame: Frame, name: str) -> tuple[Frame, Instruction]:
    """Follow a value through copies, tuples, fusions and loop invariants to where it is computed."""
    while True:
        instruction = frame.computation.instructions[name]
        step: tuple[Frame, str] | None = None
        if instruction.opcode in _SAME_VALUE:
            step = frame, instruction.operands[0]
        elif instruction.opcode == "get-tuple-element":
            step = _element(module, frame, instruction.operands[0], int(instruction.attribute("index")))
        elif instruction.opcode in ("fusion", "call"):
            inside = module.frame(instruction.callees[0], instruction, frame)
            step = inside, inside.computation.root
        elif instruction.opcode == "parameter" and frame.caller and frame.parent and (
                frame.caller.opcode in ("fusion", "call")):
            step = frame.parent, frame.caller.operands[int(instruction.arguments)]
        if step is None:
            return frame, instruction
        frame, name = step


def _element(module: Module, frame: Frame, name: str, index: int) -> tuple[Frame, str] | None:
    """Element `index` of the tuple `name`: where it comes from, None if a loop changes it."""
    frame, base = _resolve(module, frame, name)
    if base.opcode == "tuple":
        return frame, base.operands[index]
    loop = base if base.opcode == "while" else frame.caller
    if base.opcode == "parameter" and loop is not None and loop.opcode == "while":
        frame = frame.parent if frame.parent is not None else frame
    elif base.opcode != "while":
        return None
    assert loop is not None
    body = module.computations[loop.attribute("body")]
    result = body.instructions[body.root]
    carried = body.instructions.get(result.operands[index]) if result.opcode == "tuple" else None
    while carried is not None and carried.opcode in ("copy", "bitcast"):
        carried = body.instructions[carried.operands[0]]
    if carried is None or carried.opcode != "get-tuple-element" or carried.attribute("index") != str(index):
        return None
    if body.instructions[carried.operands[0]].opcode != "parameter":
        return None
    return _element(module, frame, loop.operands[0], index)


Known = dict[tuple[tuple[str, ...], int], int | None]
"""Integers by the names of the calls that they are in, their own, and the iteration."""


def value_in_iteration(module: Module, frame: Frame, name: str, loop: Instruction, number: int, known: Known
                       ) -> int | None:
    """The integer `name` in iteration `number` of `loop`, in whose body `frame` is; None where it cannot be computed.

    Followed through copies, fusions and asynchronous calls to the loop's counters, and through integer arithmetic.
    known: what was computed before for this loop. Without it a select of what a select computes doubles the work.
    """
    callers = (caller.name for _, caller in itertools.takewhile(lambda call: call[1] is not loop, frame.calls()))
    key = (*callers, name), number
    if key not in known:
        known[key] = _computed(module, frame, name, loop, number, known)
    return known[key]


def _computed(module: Module, frame: Frame, name: str, loop: Instruction, number: int, known: Known) -> int | None:
    frame, instruction = _resolve(module, frame, name)
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
        return _constant(module, frame, instruction.name)
    if opcode == "parameter" and frame.caller and frame.parent and (
            frame.caller.opcode in ("fusion-start", "async-start", "call-start")):
        caller = frame.caller.operands[int(instruction.arguments)]
        return value_in_iteration(module, frame.parent, caller, loop, number, known)
    if opcode == "get-tuple-element":
        return _counter_in_iteration(module, frame, instruction, loop, number, known)
    values = [value_in_iteration(module, frame, operand, loop, number, known) for operand in operands]
    if opcode == "compare" and len(values) == 2 and None not in values:
        left, right = (value or 0 for value in values)
        return int({"LT": left < right, "LE": left <= right, "GT": left > right, "GE": left >= right,
                    "EQ": left == right, "NE": left != right}[instruction.attribute("direction")])
    if opcode in ("sign", "negate") and values[0] is not None:
        return _sign(values[0]) if opcode == "sign" else -values[0]
    if opcode == "shift-right-logical" and len(values) == 2 and None not in values and (values[0] or 0) >= 0:
        return (values[0] or 0) >> (values[1] or 0)
    if opcode in ("divide", "remainder") and values[-1] == 0:
        return None
    if opcode == "select" and len(values) == 3 and values[0] is not None:
        return values[1 if values[0] else 2]
    if opcode not in _ARITHMETIC or len(values) != 2 or None in values:
        return None
    return _ARITHMETIC[opcode](*(value or 0 for value in values))


def _counter_in_iteration(module: Module, frame: Frame, element: Instruction, loop: Instruction, number: int,
                          known: Known) -> int | None:
    """An element of what `loop` carries: a counter, or what the body computes of counters in the iteration before.

    Loops that XLA has pipelined carry the index of the iteration before, or of the next one.
    """
    if frame.caller is not loop or frame.parent is None or (
            frame.computation.instructions[element.operands[0]].opcode != "parameter"):
        return None
    index = int(element.attribute("index"))
    start = _element(module, frame.parent, loop.operands[0], index)
    after = _element(module, frame, frame.computation.root, index)
    first = _constant(module, *start) if start else None
    step = _steps(module, *after, index) if after else None
    if first is None or after is None:
        return None
    if step is None:
        return value_in_iteration(module, *after, loop, number - 1, known) if number else first
    return first + number * step


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
