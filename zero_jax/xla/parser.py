"""HLO text -> computations of instructions: their arrays, operands, attributes and the computations they call.

One instruction per line, `%name = shape opcode(operands), attribute=value, ...`; the metadata of a Pallas kernel breaks
its line. An instruction parses a part of its line when that part is first asked for: a program has a hundred thousand
of them, and most parts are never read.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

from zero_jax.xla.shapes import Array, Path, Shape, arrays, integers

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"')
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations"
    r"|true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `tail` is everything after the opening parenthesis of the operands."""

    name: str
    opcode: str
    shape_text: str
    tail: str

    @property
    def arrays(self) -> Mapping[Path, Array]:
        """The arrays of the result by their path in nested tuples."""
        return arrays(self.shape_text)

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """`(dtype, dims)` of each array, tuples flattened."""
        return tuple(array.shape for array in self.arrays.values())

    @functools.cached_property
    def elements(self) -> int:
        """Elements of the largest array of the result; 0 without one."""
        return max((array.size for array in self.arrays.values()), default=0)

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

    def integers(self, key: str) -> tuple[int, ...]:
        """The whole numbers in the attribute `key`, such as dims; () if it is absent."""
        return integers(self.attribute(key))

    @functools.cached_property
    def custom_call_target(self) -> str:
        """What a custom call calls; "" of any other instruction."""
        match = re.search(r'custom_call_target="([^"]*)"', self.tail)
        return match[1] if match else ""

    @functools.cached_property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        if "=%" not in self.tail and "computations={" not in self.tail:
            return ()
        return tuple(name for value in _CALLS.findall(self.attributes) for name in re.findall(r"%([\w.\-]+)", value))


@dataclasses.dataclass
class Computation:
    """Instructions by name, in the order of the schedule; `root` is the name of the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str = ""

    def extend_last(self, text: str) -> None:
        """Adds `text` to the tail of the last instruction, whose line was broken before it."""
        name, last = self.instructions.popitem()
        self.instructions[name] = dataclasses.replace(last, tail=last.tail + text)

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """`(instruction, position)` of every use of a name as an operand."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for position, name in enumerate(instruction.operands):
                users.setdefault(name, []).append((instruction, position))
        return users

    def arrays(self, name: str) -> Mapping[Path, Array]:
        """The arrays of the result of `name`; none where this computation has no such instruction."""
        instruction = self.instructions.get(name)
        return instruction.arrays if instruction else {}

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """Names of the parameters by number."""
        return {int(i.arguments): i.name for i in self.instructions.values() if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Frame:
    """A computation as called by `caller`, an instruction in the computation of `parent`; both None for ENTRY."""

    computation: Computation
    caller: Instruction | None
    parent: "Frame | None"

    def calls(self) -> "Iterator[tuple[Frame, Instruction]]":
        """The calls around it, the innermost first: (frame of the caller, caller)."""
        frame = self
        while frame.caller is not None and frame.parent is not None:
            yield frame.parent, frame.caller
            frame = frame.parent


@dataclasses.dataclass
class Module:
    """A parsed module.

    Attributes:
        computations: by name.
        entry: name of the computation that runs.
        num_devices: replicas x partitions.
        sources: stack frame -> "file:line".
        header: the first line, with the aliases of inputs and outputs.
    """

    computations: dict[str, Computation]
    entry: str
    num_devices: int
    sources: dict[str, str]
    header: str = ""

    def frame(self, name: str, caller: Instruction | None = None, parent: Frame | None = None) -> Frame:
        """The computation `name` as `caller`, an instruction of `parent`, calls it; without these as ENTRY."""
        return Frame(self.computations[name], caller, parent)

    def walk(self, frame: Frame | None = None) -> Iterator[tuple[Frame, Instruction]]:
        """Every instruction that `frame` (default: ENTRY) runs, with its frame; conditions of loops are left out."""
        frame = frame or self.frame(self.entry)
        for instruction in frame.computation.instructions.values():
            yield frame, instruction
            loop = instruction.opcode == "while"
            for name in (instruction.attribute("body"),) if loop else instruction.callees:
                yield from self.walk(self.frame(name, instruction, frame))

    def metadata(self, instruction: Instruction) -> tuple[str, str]:
        """`(op_name, "file:line")` of an instruction; "" where the compiler dropped it."""
        op_name = re.search(r'metadata=\{op_name="((?:\\.|[^"\\])*)"', instruction.tail)
        if frame := re.search(r"\bstack_frame_id=(\d+)", instruction.attributes):
            source = self.sources.get(frame[1], "")
        else:
            file = re.search(r'\bsource_file="([^"]*)"', instruction.tail)
            line = re.search(r"\bsource_line=(\d+)", instruction.attributes)
            source = f"{file[1]}:{line[1] if line else '?'}" if file else ""
        return (op_name[1] if op_name else "", source)


def parse(text: str | Module) -> Module:
    """Parse a whole module; one that is parsed already is returned as it is.

    Raises ValueError if there is no ENTRY computation.
    """
    if isinstance(text, Module):
        return text
    computations: dict[str, Computation] = {}
    entry, current, preamble = "", None, []
    for line in text.splitlines():
        if current is None or not line.startswith(" "):
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], Computation(header[2], {}))
                entry = header[2] if header[1] else entry
            elif current is None:
                preamble.append(line)
            elif line not in ("", "}") and current.instructions:
                current.extend_last(line)
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, tail = match.groups()
            current.instructions[name] = Instruction(name, opcode, shape, tail)
            current.root = name if root else current.root
    if not entry:
        raise ValueError("no ENTRY computation: pass the text of jitted.lower(...).compile().as_text()")
    header = preamble[0] if preamble else ""
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return Module(computations, entry, math.prod(map(int, sizes)), _sources(preamble), header)


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
        if where := re.search(r"file_name_id=(\d+).* line=(\d+)", places.get(place[1], "") if place else ""):
            sources[frame] = f"{files.get(where[1], '').strip(chr(34))}:{where[2]}"
    return sources
