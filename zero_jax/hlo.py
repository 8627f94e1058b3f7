"""Compiled HLO text -> the collectives it runs: bytes, groups, trip counts, overlap.

The text is read as a structure and walked from ENTRY: a loop body counts as often as the loop runs,
a `-start` / `-done` pair counts once, a fusion is looked into. Three backends spell the same thing
in different ways (tests/test_hlo.py has excerpts), and a regex over lines is wrong on each of them:

- CPU never scatters under `jit`: an all-reduce followed by a slice stays an "all-reduce" here.
- GPU fuses many leaves into one collective of many operands, and splits it into start and done.
- TPU spells a reduce-scatter as a fusion that calls `all-reduce-scatter` (an all-reduce whose users
  are slices) or as a ring of collective-permutes in a loop; it repeats an asynchronous all-gather
  in each fusion that carries it along (same `chain_id`); it prints no `known_trip_count`.
"""

import dataclasses
import re
from collections.abc import Iterable

from zero_jax import hlo_groups, hlo_text
from zero_jax.hlo_text import Computation, Frame, Instruction, Module, Shape

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of the compiled program, however many leaves it carries.

    Attributes:
        kind: one of `KINDS`. TPU's `all-reduce-scatter` is a "reduce-scatter".
        shapes: `(dtype, dims)` of each buffer of the payload, as one device sees it.
        payload_bytes: the whole logical buffer: result of an all-gather, operand of the others.
        group: device (partition) numbers of the first group; `group_size` is its length.
        count: how often one step runs it: the product of the trip counts of the loops around it.
        count_known: False if a loop around it has no static trip count; that loop counts once.
        in_loop: whether any loop is around it.
        asynchronous: whether it is split into start and done, so that compute may overlap.
        computation: name of the computation that holds it.
        name: name of the instruction.
        op_name: the JAX name stack it comes from, "" if the compiler made it up.
        source: "file:line" of the user's code, "" if unknown.
    """

    kind: str
    shapes: tuple[Shape, ...]
    payload_bytes: int
    group: tuple[int, ...]
    count: int
    count_known: bool
    in_loop: bool
    asynchronous: bool
    computation: str
    name: str
    op_name: str
    source: str

    @property
    def group_size(self) -> int:
        """Number of devices that take part in one instance."""
        return len(self.group)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Distinct dtypes on the wire, in order of appearance."""
        return tuple(dict.fromkeys(dtype for dtype, _ in self.shapes))

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, once, by the best ring: `count` is not in it.

        With N = group size and B = payload: all-gather, reduce-scatter and all-to-all (N-1)/N * B,
        all-reduce 2 (N-1)/N * B, collective-permute and collective-broadcast B.
        """
        if self.group_size <= 1:
            return 0.0
        ring = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * ring, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return factor.get(self.kind, ring) * self.payload_bytes


def collectives(text: str) -> list[Collective]:
    """Every collective that `text` runs, in the order of the schedule.

    Of a conditional, only the branch that sends most is listed: one execution runs one branch, so
    the sum is an upper bound that never counts two. Raises ValueError if `text` is no HLO module.

    Args:
        text: `jitted.lower(...).compile().as_text()`, of CPU, GPU or TPU.
    """
    module = hlo_text.parse(text)
    entry = module.computations[module.entry]
    return _Walk(module).visit(Frame(entry, None, None), _Place(1, True, False, False))


def wire_bytes(text: str, *, kinds: Iterable[str] | None = None) -> float:
    """Bytes that each device sends in one run of `text`: the sum of `wire_bytes * count`.

    Raises ValueError for a kind that is none of `KINDS`.
    """
    wanted = set(KINDS if kinds is None else kinds)
    if unknown := wanted - set(KINDS):
        raise ValueError(
            f"unknown kinds of collectives {sorted(unknown)}; known: {', '.join(KINDS)}"
        )
    return float(sum(c.wire_bytes * c.count for c in collectives(text) if c.kind in wanted))


@dataclasses.dataclass(frozen=True)
class _Place:
    """What holds for everything inside the computation that is being walked."""

    count: int
    known: bool
    in_loop: bool
    asynchronous: bool

    def loop(self, trips: int | None) -> "_Place":
        known = self.known and trips is not None
        times = 1 if trips is None else trips
        return dataclasses.replace(self, count=self.count * times, known=known, in_loop=True)


class _Walk:
    """Depth-first walk over the computations of one module."""

    def __init__(self, module: Module):
        self.module = module
        # The pieces of an asynchronous TPU collective share channel and chain. The piece that a
        # custom call AsyncCollectiveStart takes is the collective; later fusions carry the others.
        self.starts = {
            (computation.name, operand)
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
            if 'custom_call_target="AsyncCollectiveStart"' in instruction.tail
            for operand in instruction.operands
        }
        self.chains = {_chain(module.computations[c].instructions[i]) for c, i in self.starts}
        self._talks: dict[str, bool] = {}

    def talks(self, name: str) -> bool:
        """Whether computation `name` or anything that it calls has a collective."""
        if name not in self._talks:
            self._talks[name] = any(
                _kind(instruction) or any(self.talks(callee) for callee in instruction.callees)
                for instruction in self.module.computations[name].instructions.values()
            )
        return self._talks[name]

    def visit(self, frame: Frame, place: _Place) -> list[Collective]:
        found: list[Collective] = []
        if not self.talks(frame.computation.name):
            return found
        for instruction in frame.computation.instructions.values():
            kind = _kind(instruction)
            if kind is not None:
                starts = (frame.computation.name, instruction.name) in self.starts
                if starts or _chain(instruction) is None or _chain(instruction) not in self.chains:
                    found.append(self._read(frame, instruction, kind, place))
            elif instruction.callees and not re.search("-(done|update)$", instruction.opcode):
                found += self._descend(frame, instruction, place)
        return found

    def _descend(self, frame: Frame, instruction: Instruction, place: _Place) -> list[Collective]:
        def enter(callee: str, place: _Place) -> list[Collective]:
            return self.visit(Frame(self.module.computations[callee], instruction, frame), place)

        callees = [callee for callee in instruction.callees if self.talks(callee)]
        if instruction.opcode == "while":
            trips = hlo_text.trip_count(self.module, frame, instruction) if callees else None
            once_more = (
                None if trips is None else trips + 1
            )  # the condition also runs when it says stop
            condition = instruction.attribute("condition")
            return [
                c
                for callee in callees
                for c in enter(callee, place.loop(once_more if callee == condition else trips))
            ]
        if instruction.opcode == "conditional":
            branches = [enter(callee, place) for callee in callees]
            return max(branches, key=lambda b: sum(c.wire_bytes * c.count for c in b), default=[])
        if instruction.opcode == "async-start":
            place = dataclasses.replace(
                place, asynchronous='"is_sync":true' not in instruction.tail
            )
        return [c for callee in callees for c in enter(callee, place)]

    def _read(self, frame: Frame, instruction: Instruction, kind: str, place: _Place) -> Collective:
        shapes: list[Shape] = [
            shape
            for operand in instruction.operands
            for shape in frame.computation.instructions[operand].shapes
        ]
        if kind == "collective-permute":
            group = hlo_groups.ring(instruction.tail)
            shapes = _permuted(instruction, shapes)
        else:
            group = hlo_groups.first_group(instruction.attributes, self.module.num_devices)
        if kind == "all-gather":
            dim = int(instruction.attribute("dimensions").strip("{}"))
            shapes = [
                (dtype, (*dims[:dim], dims[dim] * len(group), *dims[dim + 1 :]))
                for dtype, dims in shapes
            ]
        in_fusion = frame.caller is not None and frame.caller.opcode == "fusion"
        if kind == "all-reduce" and in_fusion and _only_sliced(frame.computation, instruction):
            kind = "reduce-scatter"
        starts = (frame.computation.name, instruction.name) in self.starts
        split = starts or instruction.opcode.endswith("-start")
        op_name, source = self._origin(frame, instruction)
        return Collective(
            kind=kind,
            shapes=tuple(shapes),
            payload_bytes=sum(hlo_text.shape_bytes(*shape) for shape in shapes),
            group=group,
            count=place.count,
            count_known=place.known,
            in_loop=place.in_loop,
            asynchronous=place.asynchronous or (split and '"is_sync":true' not in instruction.tail),
            computation=frame.computation.name,
            name=instruction.name,
            op_name=op_name,
            source=source,
        )

    def _origin(self, frame: Frame, instruction: Instruction) -> tuple[str, str]:
        """Metadata of itself, else of what it reads, else of its caller: passes drop it."""
        while True:
            reads = (frame.computation.instructions[name] for name in instruction.operands)
            for candidate in (instruction, *reads):
                op_name, source = self.module.metadata(candidate)
                if op_name:
                    return op_name, source
            if frame.caller is None or frame.parent is None:
                return "", ""
            instruction, frame = frame.caller, frame.parent


def _kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    if kind == "send" and "is_host_transfer=true" not in instruction.tail:
        return "collective-permute"  # GPU pipelines a permute as a send and a receive
    return kind if kind in KINDS else None


def _chain(instruction: Instruction) -> tuple[str, str, str] | None:
    chain = re.search(r'chain_id="(\w+)"', instruction.tail)
    return (instruction.opcode, instruction.attribute("channel_id"), chain[1]) if chain else None


def _only_sliced(computation: Computation, instruction: Instruction) -> bool:
    """Whether every use of an all-reduce is a slice: what TPU compiles as a reduce-scatter."""
    users = [
        user for user in computation.instructions.values() if instruction.name in user.operands
    ]
    through = ("get-tuple-element", "bitcast", "copy", "reshape", "convert")
    return bool(users) and all(
        user.opcode == "dynamic-slice"
        or (user.opcode in through and _only_sliced(computation, user))
        for user in users
    )


def _permuted(instruction: Instruction, shapes: list[Shape]) -> list[Shape]:
    """Return what is sent: the in-place form has input, output and offsets, a send has a token."""
    shapes = [shape for shape in shapes if shape[0] not in ("token", "opaque")]
    sizes = instruction.attribute("slice_sizes")
    if not sizes:
        return shapes[:1] if instruction.opcode == "send" else shapes
    return [
        (shapes[0][0], tuple(map(int, dims.split(",")))) for dims in re.findall(r"[\d,]+", sizes)
    ]
