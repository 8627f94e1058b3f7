"""Cost of an instruction of compiled HLO: FLOPs of its matrix products, and bytes to and from HBM.

Only matrix products count as FLOPs (dot, convolution, and kernels that compute them, see `kernels`): 2 for each
multiply and add. Elementwise operations, reductions and softmax are bound by the bytes they move, so they have bytes
and no FLOPs.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from zero_jax.xla.kernels import attention_kernel, kernel_flops, wider
from zero_jax.xla.parser import Computation, Frame, Instruction, Module
from zero_jax.xla.shapes import Array

WRAPPERS = ("fusion", "fusion-start", "call-start", "async-start")  # one instruction that runs a whole computation
_TAP = re.compile(r"\b(size|stride|pad|lhs_dilate|rhs_dilate)=([\dx_-]+)")
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "opt-barrier", "while", "conditional", "call", "add-dependency", "domain",
}  # fmt: skip
_FREE_CALLS = (
    "AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "AsyncCollectiveStart", "AsyncCollectiveDone",
    "PrepareAsyncCallStart", "PrepareAsyncCallDone",
)  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_RESHAPES = ("bitcast", "copy", "convert", "reshape", "transpose")
_COLLECTIVE = re.compile(r"(all-gather|all-reduce|reduce-scatter|(ragged-)?all-to-all|collective-\w+)$")


def flops(module: Module, frame: Frame, instruction: Instruction) -> Mapping[str, float]:
    """FLOPs of one run of `instruction` of `frame`, by the dtype of the operands ("bf16", "f32", the wider of two).

    Fusions, calls and asynchronous wrappers are entered; the body of a loop is not.
    """
    return _flops(_memo(module), module, frame.computation, instruction)


def kernel(module: Module, within: Computation, instruction: Instruction) -> tuple[str, int]:
    """What sets the rate of the first product of `instruction`: its kind, and keys of each sequence of attention.

    "64 forward": attention of heads of 64. "odd": a product that reads 16-bit rows of no multiple of 16 bytes, which
    the tensor cores of GPUs cannot load at once. "": any other.
    """
    if instruction.opcode in ("dot", "convolution", "custom-call") and not instruction.callees:
        operands = [array for name in instruction.operands for array in within.arrays(name).values()]
        if found := attention_kernel(instruction, [array.shape for array in operands]):
            return found
        minor = ((array.dtype, array.dims[array.minor_to_major[0]]) for array in operands[:2] if array.minor_to_major)
        return "odd" if any(dtype in ("bf16", "f16") and size % 8 for dtype, size in minor) else "", 0
    inside = (module.computations[name] for name in instruction.callees)
    products = ((computation, each) for computation in inside for each in computation.instructions.values()
                if _flops(_memo(module), module, computation, each))
    return next((kernel(module, *product) for product in products), ("", 0))


def hbm_bytes(module: Module, frame: Frame, instruction: Instruction) -> float:
    """Bytes that a scheduled `instruction` of `frame` (not one inside a fusion) reads from HBM and writes to it.

    An operand that is only sliced or gathered counts the slice, an update in place counts the update. Bitcasts, tuples
    and the ends of asynchronous pairs move nothing; a collective counts as communication and not here. Arrays in TPU's
    VMEM and in host memory are not in HBM.
    """
    opcode, kind = instruction.opcode, instruction.opcode.removesuffix("-start")
    if opcode in _FREE or opcode.endswith(("-done", "-update")) or _COLLECTIVE.match(kind):
        return 0.0
    if opcode == "custom-call" and instruction.custom_call_target in _FREE_CALLS or kind in ("send", "recv"):
        return 0.0
    table = frame.computation.instructions
    if kind in ("copy", "slice") and kind != opcode:  # the tuple names source, destination and a semaphore
        ends = list(instruction.arrays.values())[:2]
        moved = min(array.dense_bytes for array in ends)
        return float(sum(moved for array in ends if array.in_hbm))
    called = [module.computations[name] for name in instruction.callees] if opcode in WRAPPERS else []
    outputs = instruction.arrays.values()
    if called:
        inside = called[0]
        reads = [_read_inside(module, inside, i) for i in range(len(instruction.operands))]
        writes = [_written(inside, name) for name in _results(inside)]
        if opcode != "fusion":  # a start names its operands too
            outputs = inside.arrays(inside.root).values()
    else:
        reads = [_read_by(module, instruction, i) for i in range(len(instruction.operands))]
        writes = [_updated(frame.computation, instruction)] * len(outputs)
    total = 0.0
    for name, part in zip(instruction.operands, reads, strict=True):
        total += sum(_moved(array, part) for array in table[name].arrays.values())
    if len(writes) != len(outputs):  # a result that is no flat tuple
        return total + sum(_moved(array, math.inf) for array in outputs)
    return total + sum(_moved(array, part) for array, part in zip(outputs, writes, strict=True))


def _moved(array: Array, elements: float) -> float:
    """Bytes of HBM traffic for `elements` of `array`, or all of it where it has fewer."""
    return array.in_hbm * min(1.0, elements / max(1, array.size)) * array.dense_bytes


def _memo(module: Module) -> dict[str, Counter[str]]:
    """FLOPs by computation, cached on the module."""
    return module.__dict__.setdefault("_flops", {})


def _flops(memo: dict[str, Counter[str]], module: Module, within: Computation, instruction: Instruction) -> Counter:
    table = within.instructions
    if instruction.opcode in ("dot", "convolution"):
        left, right = (table[name].shapes[0] for name in instruction.operands[:2])
        if instruction.opcode == "dot":
            contracted = [left[1][dim] for dim in instruction.integers("lhs_contracting_dims")]
            amount = 2.0 * math.prod(instruction.shapes[0][1]) * math.prod(contracted)
        else:
            amount = _convolution(instruction, left[1], right[1], instruction.shapes[0][1])
        return Counter({wider(left, right): amount})
    if instruction.opcode == "custom-call" and not instruction.callees:
        return kernel_flops(instruction, [table[name].shapes[0] for name in instruction.operands], _convolution)
    total: Counter[str] = Counter()
    for name in instruction.callees if instruction.opcode in (*WRAPPERS, "call", "custom-call") else ():
        if name not in memo:
            inside = module.computations[name]
            memo[name] = sum((_flops(memo, module, inside, i) for i in inside.instructions.values()), Counter())
        total += memo[name]
    return total


def _convolution(instruction: Instruction, image: tuple, kernel: tuple, out: tuple) -> float:
    """2 x results x input features x taps that read an element of the image, not padding nor a gap of a dilation.

    TPU writes a batched matmul as a dilated convolution with one such tap per result, so the gaps matter: counting
    them would multiply its FLOPs by the batch.
    """
    labels = re.match(r"([\w?]+)_([\w?]+)->([\w?]+)", instruction.attribute("dim_labels"))
    if labels is None:
        return 0.0
    window = dict(_TAP.findall(instruction.attribute("window")))
    total = 2.0 * kernel[labels[2].index("i")]
    for label, size in zip(labels[3], out, strict=True):
        if not label.isdigit():
            total *= size
            continue
        at = int(label)
        stride, rhs_dilation, lhs_dilation = (int(window[key].split("x")[at]) if key in window else 1
                                              for key in ("stride", "rhs_dilate", "lhs_dilate"))
        low = int(window["pad"].split("x")[at].split("_")[0]) if "pad" in window else 0
        taps = kernel[labels[2].index(label)]
        total *= _valid_taps(size, taps, stride, rhs_dilation, lhs_dilation, low, image[labels[1].index(label)])
    return total


@functools.cache
def _valid_taps(out: int, taps: int, stride: int, rhs_dilation: int, lhs_dilation: int, low: int, image: int) -> int:
    """Pairs of an output position and a tap, along one dimension, that read an element of the image."""
    offsets = (position * stride + tap * rhs_dilation - low for position in range(out) for tap in range(taps))
    return sum(offset % lhs_dilation == 0 and 0 <= offset // lhs_dilation < image for offset in offsets)


def _elements(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.arrays.values())


def _read_by(module: Module, user: Instruction, position: int) -> float:
    """Elements that `user` reads of its operand at `position`; inf for all of it."""
    if position == 0 and user.opcode in _SLICES:
        return _elements(user)
    if position == 0 and user.opcode in ("dynamic-update-slice", "scatter"):
        return 0.0  # in place
    if user.opcode in ("tuple", "get-tuple-element") or _COLLECTIVE.match(user.opcode):
        return 0.0
    if user.opcode == "custom-call" and user.custom_call_target in _FREE_CALLS:
        return 0.0
    return _read_inside(module, module.computations[user.callees[0]], position) if user.opcode == "fusion" else math.inf


def _read_inside(module: Module, within: Computation, number: int) -> float:
    """Elements that a fused computation reads of its parameter `number`."""
    return _read_of(module, within, within.parameters[number]) if number in within.parameters else 0.0


def _read_of(module: Module, within: Computation, name: str) -> float:
    total = 0.0
    for user, position in within.users.get(name, ()):
        chained = user.opcode in _RESHAPES and user.name != within.root
        total += _read_of(module, within, user.name) if chained else _read_by(module, user, position)
    return total


def _results(within: Computation) -> Iterator[str]:
    """Names of the results, the elements of a tuple one by one."""
    root = within.instructions[within.root]
    yield from root.operands if root.opcode == "tuple" else [root.name]


def _written(within: Computation, name: str) -> float:
    """Elements that a result of a fused computation writes; inf for all of it."""
    instruction, passed = within.instructions[name], True
    while instruction.opcode in (*_RESHAPES, "get-tuple-element", "dynamic-slice"):
        passed = passed and instruction.opcode in ("bitcast", "get-tuple-element")
        if instruction.opcode == "dynamic-slice" and not _COLLECTIVE.match(_source(within, instruction).opcode):
            break
        instruction = within.instructions[instruction.operands[0]]
    carried = instruction.opcode == "custom-call" and instruction.custom_call_target in _FREE_CALLS
    if carried or _COLLECTIVE.match(instruction.opcode) or (passed and instruction.opcode == "parameter"):
        return 0.0
    return _updated(within, instruction)


def _source(within: Computation, instruction: Instruction) -> Instruction:
    """The instruction that a slice reads from, through bitcasts."""
    while instruction.opcode in ("dynamic-slice", "bitcast", "get-tuple-element", "reshape"):
        instruction = within.instructions[instruction.operands[0]]
    return instruction


def _updated(within: Computation, instruction: Instruction) -> float:
    """Elements that `instruction` writes; of an update in place, the updated ones alone."""
    if instruction.opcode not in ("dynamic-update-slice", "scatter"):
        return math.inf
    return _elements(within.instructions[instruction.operands[1 if "update" in instruction.opcode else -1]])
