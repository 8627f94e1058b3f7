"""HLO text -> computations of instructions: their shapes, operands, calls and trip counts.

One instruction per line, `%name = shape opcode(operands), attribute=value, ...`. Only parts that
are asked for are parsed. Raises ValueError where the text is no HLO.
"""

import dataclasses
import functools
import math
import re

Shape = tuple[str, tuple[int, ...]]

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_DTYPE = re.compile(r"(?:bf|f|s|u|c)(\d+)(?:e\d+m\d+\w*)?")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"')
_SAME_VALUE = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations"
    r"|true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)


def shape_bytes(dtype: str, dims: tuple[int, ...]) -> int:
    """Bytes of one dense array; layout and tile padding do not count. s4 takes half a byte."""
    if dtype in ("token", "opaque"):
        return 0
    bits = _DTYPE.fullmatch(dtype)
    if bits is None and dtype != "pred":
        raise ValueError(f"unknown HLO dtype {dtype!r} of {dtype}{list(dims)}")
    return math.ceil(math.prod(dims) * (int(bits[1]) if bits else 8) / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line. `tail` is all behind the opening parenthesis of the operands."""

    name: str
    opcode: str
    shape_text: str
    tail: str

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """`(dtype, dims)` of each array, tuples flattened."""
        return tuple(
            (dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim))
            for dtype, dims in _ARRAY.findall(self.shape_text)
        )

    @functools.cached_property
    def _split(self) -> tuple[str, str]:
        # Operands may carry shapes with tilings, T(8,128), so parentheses must be counted.
        depth = 1
        for match in re.finditer(r'"(?:\\.|[^"\\])*"|[()]', self.tail):
            depth += {"(": 1, ")": -1}.get(match[0], 0)
            if depth == 0:
                return self.tail[: match.start()], self.tail[match.end() :]
        return self.tail, ""

    @functools.cached_property
    def arguments(self) -> str:
        """The text between the parentheses: operands, or the value of a constant."""
        return self._split[0]

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(re.findall(r"%([\w.\-]+)", self.arguments))

    @functools.cached_property
    def attributes(self) -> str:
        """The attributes, every quoted string emptied so that a name stack cannot imitate one."""
        return _QUOTED.sub('""', self._split[1])

    def attribute(self, key: str) -> str:
        """Text of `key=value` without a leading %: up to a comma, or in braces; "" if absent."""
        match = re.search(rf"\b{key}=(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|[^,\s]+)", self.attributes)
        return match[1].removeprefix("%") if match else ""

    @functools.cached_property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        if "=%" not in self.tail and "computations={" not in self.tail:
            return ()
        return tuple(
            name
            for value in _CALLS.findall(self.attributes)
            for name in re.findall(r"%([\w.\-]+)", value)
        )


@dataclasses.dataclass
class Computation:
    """Instructions by name, in the order of the schedule; `root` is the name of the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str = ""

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """`(instruction, position)` of every use of a name as an operand."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for position, name in enumerate(instruction.operands):
                users.setdefault(name, []).append((instruction, position))
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """Names of the parameters by number."""
        return {int(i.arguments): i.name for i in self.instructions.values() if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Frame:
    """A computation as called from `caller`, an instruction of the computation of `parent`."""

    computation: Computation
    caller: Instruction | None
    parent: "Frame | None"


@dataclasses.dataclass
class Module:
    """A parsed module. `num_devices` = replicas x partitions."""

    computations: dict[str, Computation]
    entry: str
    num_devices: int
    sources: dict[str, str]

    def metadata(self, instruction: Instruction) -> tuple[str, str]:
        """`(op_name, "file:line")` of an instruction; "" where the compiler kept none."""
        op_name = re.search(r'metadata=\{op_name="((?:\\.|[^"\\])*)"', instruction.tail)
        if frame := re.search(r"\bstack_frame_id=(\d+)", instruction.attributes):
            source = self.sources.get(frame[1], "")
        else:
            file = re.search(r'\bsource_file="([^"]*)"', instruction.tail)
            line = re.search(r"\bsource_line=(\d+)", instruction.attributes)
            source = f"{file[1]}:{line[1] if line else '?'}" if file else ""
        return (op_name[1] if op_name else "", source)


def parse(text: str) -> Module:
    """Parse a whole module. Raises ValueError if there is no ENTRY computation."""
    computations: dict[str, Computation] = {}
    entry, current, preamble = "", None, []
    for line in text.splitlines():
        if current is None or not line.startswith(" "):
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], Computation(header[2], {}))
                entry = header[2] if header[1] else entry
            elif current is None:
                preamble.append(line)
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, tail = match.groups()
            current.instructions[name] = Instruction(name, opcode, shape, tail)
            current.root = name if root else current.root
    if not entry:
        raise ValueError(
            "no ENTRY computation: pass the text of jitted.lower(...).compile().as_text()"
        )
    head = preamble[0] if preamble else ""
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head)
    return Module(computations, entry, math.prod(map(int, sizes)), _sources(preamble))


def _sources(preamble: list[str]) -> dict[str, str]:
    """Stack frame -> "file:line", from the tables that newer XLA prints before the computations."""
    tables: dict[str, dict[str, str]] = {}
    title = ""
    for line in preamble:
        number, _, row = line.partition(" ")
        if number.isdigit():
            tables.setdefault(title, {})[number] = row
        elif line:
            title = line.strip()
    files, places = tables.get("FileNames", {}), tables.get("FileLocations", {})
    sources = {}
    for frame, row in tables.get("StackFrames", {}).items():
        place = re.search(r"file_location_id=(\d+)", row)
        where = re.search(
            r"file_name_id=(\d+).* line=(\d+)", places.get(place[1], "") if place else ""
        )
        if where:
            sources[frame] = f"{files.get(where[1], '').strip(chr(34))}:{where[2]}"
    return sources


def trip_count(module: Module, frame: Frame, loop: Instruction) -> int | None:
    """How often the while `loop`, an instruction of `frame`, runs; None if the data decides.

    The compiler's `known_trip_count` where it prints one (CPU, GPU), else (TPU) from the condition
    `i < constant`, the start and the body's `i + step`, through copies, fusions and invariants.
    """
    if known := re.search(r"known_trip_count\W+n\W+(\d+)", loop.tail):
        return int(known[1])
    condition = Frame(module.computations[loop.attribute("condition")], loop, frame)
    body = Frame(module.computations[loop.attribute("body")], loop, frame)
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


def _steps(module: Module, frame: Frame, name: str, index: int) -> int | None:
    """Return what the body adds to element `index`; None if it does anything else to it."""
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
    """Follow a value through copies, tuples, fusions and invariants to where it is computed."""
    while True:
        instruction = frame.computation.instructions[name]
        step: tuple[Frame, str] | None = None
        if instruction.opcode in _SAME_VALUE:
            step = frame, instruction.operands[0]
        elif instruction.opcode == "get-tuple-element":
            step = _element(
                module, frame, instruction.operands[0], int(instruction.attribute("index"))
            )
        elif instruction.opcode in ("fusion", "call"):
            inside = Frame(module.computations[instruction.callees[0]], instruction, frame)
            step = inside, inside.computation.root
        elif (
            instruction.opcode == "parameter"
            and frame.caller is not None
            and frame.parent is not None
        ):
            if frame.caller.opcode in ("fusion", "call"):
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
    kept = body.instructions.get(result.operands[index]) if result.opcode == "tuple" else None
    while kept is not None and kept.opcode in ("copy", "bitcast"):
        kept = body.instructions[kept.operands[0]]
    if kept is None or kept.opcode != "get-tuple-element" or kept.attribute("index") != str(index):
        return None
    if body.instructions[kept.operands[0]].opcode != "parameter":
        return None
    return _element(module, frame, loop.operands[0], index)
