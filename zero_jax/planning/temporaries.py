"""What the temporaries of a compiled step are: the residual states of the paper, and the gradients.

A buffer is classified by its last writer and its readers. JAX's name stacks separate forward from backward, and gathers
of parameters have a name scope; gradients are operands and results of reductions over devices.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from zero_jax.gather.gather import GATHER_SCOPE
from zero_jax.transforms.gather_again import BACKWARD_SCOPE
from zero_jax.xla.aliasing import is_sent, moved_from, update_of
from zero_jax.xla.liveness import Buffer, Buffers, Value
from zero_jax.xla.parser import Module

ACTIVATIONS, GATHERED, GRADIENTS, OTHER = "activations", "gathered weights", "gradients", "temporary buffers"
BACKWARD, DIFFERENTIATED = ("transpose(", BACKWARD_SCOPE), "jvp("

_ALIASES = {
    "tuple", "get-tuple-element", "bitcast", "while", "parameter", "optimization-barrier", "call", "conditional",
}  # fmt: skip
_REDUCTIONS = ("reduce-scatter", "all-reduce")


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A buffer that is alive at the peak: `what` is its class, `op_name` and `source` the JAX code that wrote it."""

    bytes: int
    what: str
    op_name: str
    source: str
    shape: str


class LiveTemporaries:
    """The temporaries that are alive at the peak, by class.

    gathers: names of the instructions that gather parameters, beside those in this library's scope.
    """

    def __init__(self, text: str | Module, gathers: Iterable[str] = ()):
        self.buffers = Buffers(text)
        self._gathers = {*gathers}
        self.peak, alive = self.buffers.at_peak(self.buffers.temporaries)
        self._classes: dict[int, str] = {}
        self.live = [self._live_buffer(buffer) for buffer in alive]

    @property
    def uses_chip(self) -> bool:
        """Whether some temporaries are in a TPU's on-chip memory, where they take none of its HBM."""
        return any(each.kind == "temporary" and each.space == 1 for each in self.buffers.all)

    def _live_buffer(self, buffer: Buffer) -> LiveBuffer:
        op_name, source = self.buffers.module.metadata(self._named_writer(buffer).instruction)
        array = self._last_writer(buffer).array
        return LiveBuffer(buffer.bytes, self._class(buffer), op_name, source, f"{array.dtype}{list(array.dims)}")

    def _class(self, buffer: Buffer) -> str:
        if id(buffer) not in self._classes:
            self._classes[id(buffer)] = OTHER  # ends a cycle of moves
            self._classes[id(buffer)] = self._find_class(buffer)
        return self._classes[id(buffer)]

    def _find_class(self, buffer: Buffer) -> str:
        last = self._last_writer(buffer)
        if any(GATHER_SCOPE in self._op_name(value) or value.instruction.name in self._gathers
               for value in _computed(buffer)):
            return GATHERED
        readers = list(self._readers(buffer))
        results = (value.instruction.opcode for value in buffer.values if not is_sent(value.instruction, value.path))
        if any(opcode.startswith(_REDUCTIONS) for opcode in (*results, *readers)) and last.array.dims:
            return GRADIENTS
        moved = {self._class(source) for source in self._sources(last)} - {OTHER}
        if moved:
            return min(moved)
        name = self._op_name(self._named_writer(buffer))
        forward = DIFFERENTIATED in name and not _is_backward(name)
        return ACTIVATIONS if forward and any(map(_is_backward, readers)) else OTHER

    def _last_writer(self, buffer: Buffer) -> Value:
        """The value that fills `buffer`: of a loop that updates it slice by slice, else the last one up to the peak."""
        computed = sorted(_computed(buffer), key=lambda value: value.instant)
        slices = [value for value in computed if update_of(self.buffers.module, value.instruction, value.path)]
        before = [value for value in computed if value.instant <= self.peak]
        return (slices or before or computed or buffer.values)[-1]

    def _named_writer(self, buffer: Buffer) -> Value:
        """The last writer of `buffer`, or another of its values up to the peak where the compiler dropped its name."""
        last = self._last_writer(buffer)
        named = (value for value in reversed(buffer.values) if value.instant <= self.peak and self._op_name(value))
        return last if self._op_name(last) else next(named, last)

    def _readers(self, buffer: Buffer, seen: tuple[Buffer, ...] = ()) -> Iterator[str]:
        """The op_names of the readers of `buffer` or of a copy of it, and the opcodes of the reductions of it."""
        for value in buffer.values:
            computation = self.buffers.module.computations[value.computation]
            for user, _ in computation.users.get(value.instruction.name, ()):
                if user.opcode.startswith(_REDUCTIONS):
                    yield user.opcode
                elif user.opcode not in _ALIASES:
                    yield self.buffers.module.metadata(user)[0]
                copied = self.buffers.owners.get((value.frame, user.name, ()))
                if copied and len(seen) < 2 and copied.kind == "temporary" and copied not in (buffer, *seen) and (
                        moved_from(self.buffers.module, user, ()) == value.instruction.name):
                    yield from self._readers(copied, (buffer, *seen))

    def _sources(self, value: Value) -> Iterator[Buffer]:
        """The buffers that `value` is a copy of, or whose slices it is updated with."""
        update = update_of(self.buffers.module, value.instruction, value.path)
        operand = update.operand if update else moved_from(self.buffers.module, value.instruction, value.path)
        source = self.buffers.owners.get((value.frame, operand, ())) if operand else None
        if source is not None and source.kind == "temporary" and value not in source.values:
            yield source

    def _op_name(self, value: Value) -> str:
        return self.buffers.module.metadata(value.instruction)[0]


def _is_backward(op_name: str) -> bool:
    return any(scope in op_name for scope in BACKWARD)


def _computed(buffer: Buffer) -> Iterator[Value]:
    return (value for value in buffer.values
            if value.instruction.opcode not in _ALIASES and not value.instruction.opcode.endswith(("-done", "-update"))
            and not is_sent(value.instruction, value.path))
