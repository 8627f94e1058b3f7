"""Which rows of host memory the loops of a compiled program read and write, by its index and by what a GPU runs.

XLA:GPU writes the walk of a slice in a loop beside it, as an offset and a stride in bytes, and copies by these alone.
Of jaxlib 0.10.2 the walk of a reversed slice in host memory is a forward one, so that a backward pass reads the rows of
other layers without a word (openxla/xla pull requests 46231 and 46308). Of 0.12.0.1 that is right, and the walk of an
index that a pipelined loop carries from the iteration before is not: blocks of 3,351 rows of an embedding were written
one row after another (1T on 64 H100s, parameters in host memory).
"""

import dataclasses
import re

from zero_jax.xla.parser import Frame, Instruction, Module, parse
from zero_jax.xla.shapes import HOST, Array, shape_bytes
from zero_jax.xla.trip_count import Known, trip_count, value_in_iteration

_SLICES = {"dynamic-slice": 1, "dynamic-update-slice": 2}
"""Opcodes, and the number of their first index operand."""
_WALK = re.compile(r'"byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"')
"""The last one counts: jaxlib 0.12 writes zeros, and then the walk as `"linear":{...}`."""


@dataclasses.dataclass(frozen=True)
class HostSlice:
    """A slice of an array in host memory, in a loop.

    Attributes:
        name: of the instruction. op_name, source: where the program's author wrote it.
        writes: whether it is an update.
        offsets: the bytes at which its iterations begin, by its index; None where they cannot be computed.
        walk: the offset and stride in bytes that the compiler wrote beside it; None where it wrote none, and the index
            itself is used.
    """

    name: str
    op_name: str
    source: str
    writes: bool
    offsets: tuple[int, ...] | None
    walk: tuple[int, int] | None

    @property
    def is_right(self) -> bool:
        """Whether the rows that are read or written are those of the index."""
        if self.walk is None:
            return True
        start, stride = self.walk
        return self.offsets is not None and all(
            start + i * stride == offset for i, offset in enumerate(self.offsets))

    def __str__(self) -> str:
        rows = "an index that cannot be followed"
        if self.offsets is not None:
            more = ", ..." * (len(self.offsets) > 3)
            rows = f"an index that begins at bytes {', '.join(map(str, self.offsets[:3]))}{more}"
        walk = "no walk" if self.walk is None else f"a walk from byte {self.walk[0]} in steps of {self.walk[1]}"
        return (f"{self.name} {'writes to' if self.writes else 'reads from'} the host's memory by {rows}, with {walk}; "
                f"from {self.op_name[-160:] or 'the compiler'}" + (f" ({self.source})" if self.source else ""))


def host_slices(program: str | Module) -> list[HostSlice]:
    """The slices of arrays in host memory in the loops of a compiled program, its text or parsed."""
    module, found = parse(program), list[HostSlice]()
    for frame, instruction in module.walk():
        if instruction.opcode not in _SLICES or not instruction.operands:
            continue
        array = frame.computation.arrays(instruction.operands[0]).get(())
        loop = next((call for call in frame.calls() if call[1].opcode == "while"), None)
        if array is not None and array.space == HOST and loop is not None:
            op_name, source = module.metadata(instruction)
            walks = _WALK.findall(instruction.tail)
            found.append(HostSlice(
                instruction.name, op_name, source, instruction.opcode == "dynamic-update-slice",
                _offsets(module, frame, instruction, array, loop),
                (int(walks[-1][0]), int(walks[-1][1])) if walks else None))
    return found


def _offsets(module: Module, frame: Frame, instruction: Instruction, array: Array,
             loop: tuple[Frame, Instruction]) -> tuple[int, ...] | None:
    """Where each iteration begins, in bytes, clamped as HLO clamps an index."""
    iterations = trip_count(module, *loop)
    first = _SLICES[instruction.opcode]
    part = (frame.computation.arrays(instruction.operands[1]) if first == 2 else instruction.arrays).get(())
    if iterations is None or part is None:
        return None
    strides, step = dict.fromkeys(range(len(array.dims)), 0), shape_bytes(array.dtype, ())
    for dim in array.minor_to_major or reversed(range(len(array.dims))):
        strides[dim], step = step, step * array.dims[dim]
    offsets, known = list[int](), Known()
    for i in range(iterations):
        indices = [value_in_iteration(module, frame, name, loop[1], i, known) for name in instruction.operands[first:]]
        if None in indices:
            return None
        offsets.append(sum(
            strides[dim] * min(max(index or 0, 0), array.dims[dim] - part.dims[dim])
            for dim, index in enumerate(indices)))
    return tuple(offsets)
