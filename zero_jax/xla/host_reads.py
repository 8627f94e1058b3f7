"""What a compiled program copies from host memory to the device's: how much, how often, and beside what."""

import dataclasses
import functools
import re

from zero_jax.xla.collective import Execution, kind_of, read_collective
from zero_jax.xla.cost import flops
from zero_jax.xla.parser import Computation, Frame, Instruction, Module, parse
from zero_jax.xla.provenance import UPDATE_SLICES, Flow, search
from zero_jax.xla.shapes import HOST
from zero_jax.xla.trip_count import runs

_READS = {"dynamic-slice": (), "slice": (), "copy": (), "copy-start": (0,), "dynamic-slice-start": (1,)}
"""Opcodes, and where in the result the copy is."""
_SAME_VALUE = ("fusion-done", "async-done", "copy-done", "dynamic-slice-done", "copy", "bitcast", "reshape",
               "get-tuple-element")
_WORK = ("fusion", "custom-call", "dot", "convolution", "while")
"""Opcodes of what computes, beside which a copy may be under way."""
_PRODUCTS = ("custom-call", "while")
"""Those of them that are more than elementwise work, whatever is known of their FLOPs."""
_FASTER = 16
"""By how much a GPU reaches others faster than its host, at most: NVLink has 7 (H100) to 14 times (B200) the rate of
PCIe, and a network less. What sends as many times the bytes of a copy takes at least as long."""


@dataclasses.dataclass(frozen=True)
class HostRead:
    """A copy of an array in host memory, or of a part of one, to device memory.

    Attributes:
        name: of the instruction.
        source: the input of the program that is read, as `state.weights['blocks']['kernel']`; "" where it is not found.
        bytes: of one run. runs: how often a step runs it; a loop whose length is not known counts once.
        in_loop: whether it is in a loop.
        is_ahead: in a loop, whether only the next iteration uses it, and this one does something else while it is
            copied: a product, half of its other work, or, on a GPU, sending 16 times the bytes of all that is copied
            meanwhile.
        is_slice: whether it reads a part, as a layer: by an index, or that of an iteration which XLA has taken out of a
            loop.
        op_name: where the program's author wrote it, or what first uses it: XLA:TPU starts the first iteration's read
            ahead of a loop, without a name.
    """

    name: str
    source: str
    bytes: int
    runs: int
    in_loop: bool
    is_ahead: bool
    is_slice: bool
    op_name: str = ""

    @property
    def field(self) -> str:
        """The field of the state that is read: params, weights, opt_state and so on; "" where it is not known."""
        match = re.match(r"(?:\w+\.)*(params|weights|frozen|opt_state|ema)\b", self.source)
        return match[1] if match else ""


def host_reads(program: str | Module) -> list[HostRead]:
    """The reads of host memory of a compiled program, its text or parsed."""
    module = parse(program)
    flow, found, iterations = Flow(module), list[HostRead](), dict[str, _Iteration]()
    for frame, instruction in module.walk():
        if size := copied_bytes(frame.computation, instruction, to_host=False):
            body, within = _in_loop(frame, instruction)
            if body is not None and body.computation.name not in iterations:
                iterations[body.computation.name] = _Iteration(module, body)
            found.append(HostRead(
                instruction.name, flow.input_of((frame, instruction.operands[0], ())), size, runs(module, frame),
                body is not None, body is not None and iterations[body.computation.name].is_ahead(within),
                "slice" in instruction.opcode, _scope(flow, frame, instruction)))
    return found


@dataclasses.dataclass(frozen=True)
class HostWrite:
    """A write of a part of an array in host memory.

    Attributes:
        stack_bytes: of the array. bytes: of the part. runs: how often a step writes one.
        op_name: where the program's author wrote it.
    """

    stack_bytes: int
    bytes: int
    runs: int
    op_name: str = ""


def host_writes(program: str | Module) -> list[HostWrite]:
    """The writes of a compiled program to parts of arrays in host memory that are no inputs of it.

    Such as gradients or checkpoints of layers, by a loop and by the iterations of it that XLA takes out of it: of
    temporaries in host memory, those that are made there.
    """
    module = parse(program)
    flow, found = Flow(module), list[HostWrite]()
    for frame, instruction in module.walk():
        if instruction.opcode in UPDATE_SLICES:
            array, part = (frame.computation.arrays(name).get(()) for name in instruction.operands[:2])
            if array and part and array.space == HOST and not flow.input_of((frame, instruction.operands[0], ())):
                found.append(HostWrite(array.dense_bytes, part.dense_bytes, runs(module, frame),
                                       module.metadata(instruction)[0]))
    return found


def _in_loop(frame: Frame, instruction: Instruction) -> tuple[Frame | None, Instruction]:
    """(The body of the innermost loop around an instruction, or None; what of that body runs it)."""
    for parent, caller in frame.calls():
        if caller.opcode == "while":
            return frame, instruction
        frame, instruction = parent, caller
    return None, instruction


def _scope(flow: Flow, frame: Frame, instruction: Instruction) -> str:
    """The op_name of an instruction, or where it has none of the nearest that uses its result."""
    names = (flow.module.metadata(each.computation.instructions[name])[0]
             for each, name, _ in search([(frame, instruction.name, ())], flow.uses))
    return next(filter(None, names), "")


def copied_bytes(computation: Computation, instruction: Instruction, *, to_host: bool) -> int:
    """Bytes that an instruction copies out of host memory to the device's, or within it; 0 for any other."""
    if instruction.opcode not in _READS or not instruction.operands:
        return 0
    source = computation.arrays(instruction.operands[0]).get(())
    target = instruction.arrays.get(_READS[instruction.opcode])
    if source is None or target is None or source.space != HOST or (target.space == HOST) != to_host:
        return 0
    return target.dense_bytes


class _Iteration:
    """One iteration of a loop, as its body is scheduled. A span: the places of a start and of its done in it."""

    def __init__(self, module: Module, frame: Frame):
        self.module, self.frame, self.body = module, frame, frame.computation
        self.order = {name: at for at, name in enumerate(self.body.instructions)}

    @functools.cached_property
    def work(self) -> dict[int, bool]:
        """Whether what computes is a product, by its place."""
        return {self.order[each.name]: each.opcode in _PRODUCTS or bool(flops(self.module, self.frame, each))
                for each in self.body.instructions.values() if each.opcode in _WORK}

    @functools.cached_property
    def collectives(self) -> list[tuple[int, int, float]]:
        """The span of each asynchronous collective of a GPU, and the bytes that a device sends."""
        spans = []
        for each in self.body.instructions.values():
            if kind_of(each) and each.opcode.endswith("-start") and '"is_sync":false' in each.tail:
                sent = read_collective(self.module, self.frame, each, Execution()).communication_bytes
                spans.append((self.order[each.name], self.span(each)[1], sent))
        return spans

    @functools.cached_property
    def copies(self) -> list[tuple[int, int, int]]:
        """The span and the bytes of each copy from host memory that is started here."""
        copies = []
        for each in self.body.instructions.values():
            inside = [(self.body, each), *((self.module.computations[callee], instruction) for callee in each.callees
                                           for instruction in self.module.computations[callee].instructions.values())]
            if size := sum(copied_bytes(*pair, to_host=False) for pair in inside if each.opcode != "while"):
                copies.append((*self.span(each)[:2], size))
        return copies

    def span(self, instruction: Instruction) -> tuple[int, int, bool]:
        """Where it starts, where it is done, and whether this iteration uses its result."""
        first = last = self.order[instruction.name]
        todo, used_here = [instruction.name], False
        while todo:
            for user, _ in self.body.users.get(todo.pop(), ()):
                if user.opcode in _SAME_VALUE or user.opcode == instruction.opcode.replace("-start", "-done"):
                    last = max(last, self.order[user.name]) if user.opcode.endswith("-done") else last
                    todo.append(user.name)
                else:
                    used_here |= user.name != self.body.root
        return first, last, used_here

    def is_ahead(self, instruction: Instruction) -> bool:
        """Whether the result of a copy leaves the iteration unused, and enough is beside it."""
        first, last, used_here = self.span(instruction)
        if used_here:
            return False
        beside = [is_product for at, is_product in self.work.items() if first < at < last]
        return any(beside) or 2 * len(beside) >= len(self.work) or any(
            start < first and last < done and sent >= _FASTER * self.copied(start, done)
            for start, done, sent in self.collectives)

    def copied(self, start: int, done: int) -> int:
        """Bytes of all copies within a span."""
        return sum(size for first, last, size in self.copies if start < first and last < done)
