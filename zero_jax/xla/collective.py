"""One collective of compiled HLO: kind, bytes, group and run count, read from its instruction and its surroundings."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zero_jax.xla import replica_groups
from zero_jax.xla.parser import Computation, Frame, Instruction, Module
from zero_jax.xla.shapes import Shape, shape_bytes

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
    """One collective instruction of the compiled program, which may combine many arrays.

    Attributes:
        kind: one of `KINDS`. TPU's `all-reduce-scatter` is a "reduce-scatter".
        shapes: `(dtype, dims)` of each buffer of the payload, as one device sees it.
        payload_bytes: the whole logical buffer: result of an all-gather, operand of the others.
        group: device (partition) numbers of the first replica group; `group_size` is its length.
        count: how often one step runs it: the product of the trip counts of the loops around it.
        count_known: False if a loop around it has no static trip count; that loop counts once.
        in_loop: whether it runs in a loop.
        asynchronous: whether it is split into start and done, so that compute can overlap.
        computation: name of its computation.
        name: name of the instruction.
        op_name: the JAX name stack it comes from; "" if the compiler introduced it.
        source: "file:line" of the Python code; "" if unknown.
        serves: paths of the parameters that it gathers, or whose gradients it reduces.
        then: the groups of the next gathers that all that a gather returns goes into; of the next scatters and
            all-reduces that a part of what a scatter or an all-reduce sums goes into; and () where it is moved on by a
            permute or an all-to-all, or as rows of a table.
        overlapped_flops: FLOPs scheduled between its start and its done, in one run; 0 if synchronous.
        overlapped_bytes: HBM bytes of the same instructions.
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
    serves: tuple[str, ...] = ()
    then: tuple[tuple[int, ...], ...] = ()
    overlapped_flops: float = 0.0
    overlapped_bytes: float = 0.0

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Names of the mesh axes that it runs over.

        Args:
            sizes: axis name -> size, in the order of the mesh: `mesh.shape`.
        """
        return replica_groups.mesh_axes(self.group, sizes)

    @property
    def group_size(self) -> int:
        """Number of devices that take part in one instance."""
        return len(self.group)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Distinct dtypes that are sent, in order of appearance."""
        return tuple(dict.fromkeys(dtype for dtype, _ in self.shapes))

    @property
    def elements(self) -> int:
        """Elements of the payload."""
        return sum(math.prod(dims) for _, dims in self.shapes)

    @property
    def step_bytes(self) -> float:
        """Bytes that each device sends per step: `communication_bytes` times `count`."""
        return self.communication_bytes * self.count

    @property
    def communication_bytes(self) -> float:
        """Bytes that each device sends in one run on an ideal ring; `count` is not included.

        With N = group size and B = payload: all-gather, reduce-scatter and all-to-all (N-1)/N * B (a ragged one sends
        at most that), all-reduce 2 (N-1)/N * B, collective-permute and collective-broadcast B.
        """
        if self.group_size <= 1:
            return 0.0
        ring = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * ring, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return factor.get(self.kind, ring) * self.payload_bytes


@dataclasses.dataclass(frozen=True)
class Execution:
    """How often, and how, everything in a computation runs: the loops and the asynchronous wrapper around it."""

    count: int = 1
    known: bool = True
    in_loop: bool = False
    asynchronous: bool = False

    def loop(self, trips: int | None) -> "Execution":
        """The same inside a loop of `trips` iterations; None is unknown and counts once."""
        times = 1 if trips is None else trips
        return dataclasses.replace(self, count=self.count * times, known=self.known and trips is not None, in_loop=True)


def total_bytes(collectives: Iterable[Collective]) -> float:
    """Bytes that each device sends for them per step."""
    return sum(each.step_bytes for each in collectives)


def kind_of(instruction: Instruction) -> str | None:
    """One of `KINDS` for a collective or its start, None for all else."""
    kind = instruction.opcode.removesuffix("-start")
    if kind == "send" and "is_host_transfer=true" not in instruction.tail:
        return "collective-permute"  # GPU pipelines a permute as a send and a receive
    return kind if kind in KINDS else None


def is_sync(instruction: Instruction) -> bool:
    """Whether GPU runs a `-start` to its end before it goes on."""
    return '"is_sync":true' in instruction.tail


def chain_of(instruction: Instruction) -> tuple[str, str, str] | None:
    """The key that all parts of one asynchronous TPU collective share; None for any other instruction."""
    chain = re.search(r'chain_id="(\w+)"', instruction.tail)
    return (instruction.opcode, instruction.attribute("channel_id"), chain[1]) if chain else None


def read_collective(module: Module, frame: Frame, instruction: Instruction, execution: Execution) -> Collective:
    """The collective that `instruction` of `frame` is, or starts; its `kind_of` is not None."""
    kind = kind_in(frame, instruction)
    assert kind is not None, instruction.opcode
    sent = _sent(module, frame.computation, instruction)
    shapes: list[Shape] = [shape for each in sent for shape in each.shapes]
    if kind == "collective-permute":
        group = replica_groups.ring(instruction.tail)
        shapes = _permuted(instruction, shapes)
    else:
        group = replica_groups.first_group(instruction.attributes, module.num_devices)
    if kind == "ragged-all-to-all":
        del shapes[1:]  # where it is written, and offsets and sizes, which say how much of the first is sent
    if kind == "all-gather":
        dim = instruction.integers("dimensions")[0]
        shapes = [(dtype, (*dims[:dim], dims[dim] * len(group), *dims[dim + 1 :])) for dtype, dims in shapes]
    op_name, source = _origin(module, frame, instruction, sent, scatters=kind == "reduce-scatter")
    return Collective(
        kind=kind,
        shapes=tuple(shapes),
        payload_bytes=sum(shape_bytes(*shape) for shape in shapes),
        group=group,
        count=execution.count,
        count_known=execution.known,
        in_loop=execution.in_loop,
        asynchronous=execution.asynchronous or (instruction.opcode.endswith("-start") and not is_sync(instruction)),
        computation=frame.computation.name,
        name=instruction.name,
        op_name=op_name,
        source=source,
    )


def kind_in(frame: Frame, instruction: Instruction) -> str | None:
    """`kind_of`, where a TPU's scatters are what they are: an all-reduce in a fusion that takes slices of it."""
    kind, in_fusion = kind_of(instruction), frame.caller is not None and frame.caller.opcode == "fusion"
    sliced = kind == "all-reduce" and in_fusion and _only_sliced(frame.computation, instruction)
    return "reduce-scatter" if sliced else kind


def _origin(module: Module, frame: Frame, instruction: Instruction, sent: Sequence[Instruction], *, scatters: bool
            ) -> tuple[str, str]:
    """Metadata of the first of `_named_alike` that has any: passes drop metadata.

    What XLA:TPU copies for a reduce-scatter within a product has the name of the loop around it, or none: that of the
    loop is taken where there is no other. An all-reduce merges gradients and other sums: what makes one says little.
    """
    of_loop = "", ""
    for candidate in _named_alike(frame, instruction, sent, scatters):
        op_name, source = module.metadata(candidate)
        if op_name and not (scatters and op_name.endswith("/while")):
            return op_name, source
        of_loop = of_loop if of_loop[0] else (op_name, source)
    return of_loop


def _named_alike(frame: Frame, instruction: Instruction, sent: Sequence[Instruction], scatters: bool
                 ) -> Iterator[Instruction]:
    """The instruction, the largest that it sends, its caller, and of a reduce-scatter what makes what it sends.

    Of one that is merged the largest comes first (jaxlib 0.12 writes the names of all, as `step/(first:second)`), and
    no other: that a smaller one is a sum says nothing of it.
    """
    reads = sorted(sent, key=lambda each: -sum(shape_bytes(*shape) for shape in each.shapes))
    is_merged = len(sent) > len(instruction.operands)
    while True:
        yield from (*reads[:1], instruction) if is_merged else (instruction, *reads)
        if scatters and (frame.caller is None or frame.caller.opcode == "while"):
            yield from _makers(frame.computation, instruction)
        if frame.caller is None or frame.parent is None:
            return
        instruction, frame = frame.caller, frame.parent
        is_merged, reads = False, [frame.computation.instructions[name] for name in instruction.operands]


def _makers(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """What makes the first operand of `instruction`, what makes the first operand of that, and so on."""
    while instruction.operands:
        instruction = computation.instructions[instruction.operands[0]]
        if instruction.opcode in ("parameter", "while"):
            return
        yield instruction


def _sent(module: Module, computation: Computation, instruction: Instruction) -> list[Instruction]:
    """The operands of a collective; of an all-reduce that XLA:GPU has merged, what it sums.

    It concatenates the arrays of small all-reduces, flattened, in a fusion without metadata.
    """
    operands = [computation.instructions[name] for name in instruction.operands]
    if kind_of(instruction) != "all-reduce" or len(operands) != 1:
        return operands
    return [_unflattened(computation, name) for name in _concatenated(module, computation, operands[0])] or operands


def _concatenated(module: Module, computation: Computation, instruction: Instruction) -> list[str]:
    """Names of what `instruction` concatenates and does nothing else with; none if it does something else."""
    if instruction.opcode == "concatenate":
        return list(instruction.operands)
    if instruction.opcode != "fusion":
        return []
    fused = module.computations[instruction.callees[0]]
    root, numbers = fused.instructions[fused.root], {name: number for number, name in fused.parameters.items()}
    if root.opcode != "concatenate" or not numbers.keys() >= set(root.operands):
        return []
    return [instruction.operands[numbers[name]] for name in root.operands]


def _unflattened(computation: Computation, name: str) -> Instruction:
    """What bitcasts without metadata were made of: it has the array's own dims, and tells where it is from."""
    instruction = computation.instructions[name]
    while instruction.opcode == "bitcast" and "op_name=" not in instruction.tail:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _only_sliced(computation: Computation, instruction: Instruction) -> bool:
    """Whether every use of an all-reduce is a slice, which is how TPU's compiler writes a reduce-scatter."""
    users = [user for user, _ in computation.users.get(instruction.name, ())]
    through = ("get-tuple-element", "bitcast", "copy", "reshape", "convert")
    return bool(users) and all(
        user.opcode == "dynamic-slice" or (user.opcode in through and _only_sliced(computation, user)) for user in users
    )


def _permuted(instruction: Instruction, shapes: list[Shape]) -> list[Shape]:
    """Return what is sent: the in-execution form has input, output and offsets, a send has a token."""
    shapes = [shape for shape in shapes if shape[0] not in ("token", "opaque")]
    sizes = instruction.attribute("slice_sizes")
    if not sizes:
        return shapes[:1] if instruction.opcode == "send" else shapes
    return [(shapes[0][0], tuple(map(int, dims.split(",")))) for dims in re.findall(r"[\d,]+", sizes)]
