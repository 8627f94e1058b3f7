"""FLOPs of the kernels behind custom calls: cuBLAS, cuDNN's convolutions and attention, and Pallas kernels on TPU.

XLA's cost analysis calls all of them free. What a mask lets a kernel skip is left out where the call says so (cuDNN:
causal, sliding windows; Pallas: the scope `CAUSAL_SCOPE`) and counted where it does not, so that another Pallas kernel
with a causal mask may count up to twice its FLOPs. A call that is not known here is named by `is_opaque`, and its bytes
alone are counted.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from zero_jax.xla.parser import Instruction
from zero_jax.xla.shapes import Shape, integers, shape_bytes

CAUSAL_SCOPE = "zero_causal"
"""The `jax.named_scope` of causal attention; of its Pallas kernels those that skip the blocks that the mask hides."""
_CUDNN_ROLES = {"Forward": "io", "BiasActivationForward": "io", "BackwardInput": "oi", "BackwardFilter": "if"}
_PALLAS_PRODUCTS = (  # products of (queries x keys) by (head dim), of the kernels that JAX ships
    (r"flash_mha_bwd_dq|splash_m[hq]a_dq", 3),  # scores again, gradient of the probabilities, of the queries
    (r"flash_mha_bwd_dkv|splash_m[hq]a_dkv", 4),  # the first two, gradients of the keys and of the values
    (r"flash_attention|splash_m[hq]a_fwd", 2),
)
_NO_PRODUCTS = re.compile(
    r"__cub\$|cu_threefry|TopK$|Sharding$|SPMD\w+Shape$|\w*[Bb]itcast|AllocateBuffer$|AssumeGatherIndicesInBound$"
    r"|(AsyncCollective|PrepareAsyncCall)(Start|Done)$|GatherScatterIndicesBitpacked$|MoveTo(Host|Device)$"
    r"|annotate_device_placement$|PadToStatic$|SliceToDynamic$|__gpu\$TopK$|SparseCore\w*$|\w*Barrier\w*$|\w*[Rr]ng\w*$")
"""Targets of custom calls that compute no products: their bytes are all of their cost."""

Convolution = Callable[[Instruction, tuple, tuple, tuple], float]
"""FLOPs of a convolution from the shapes of its image, its kernel and its result."""


def kernel_flops(instruction: Instruction, operands: Sequence[Shape], convolution: Convolution) -> Counter[str]:
    """FLOPs of a custom call by dtype of its operands; empty for one without products and for one not known here.

    Args:
        instruction: the custom call.
        operands: `(dtype, dims)` of each operand; the first result of the call is its product, others are scratch.
        convolution: gives the FLOPs of a convolution.
    """
    target = instruction.custom_call_target
    if target.startswith("__cublas$"):
        return _cublas(instruction, operands)
    if target.startswith("__cudnn$fmha"):
        return _cudnn_attention(instruction, operands)
    if target == "tpu_custom_call":
        return _pallas(instruction, operands)
    roles = _CUDNN_ROLES.get(target.removeprefix("__cudnn$conv")) if target.startswith("__cudnn$conv") else None
    if roles is None:
        return Counter()
    (dtype, left), right, result = operands[0], operands[1][1], instruction.shapes[0][1]
    # A gradient convolution has the FLOPs of the forward one, whose operands its labels name.
    image, kernel, out = {"io": (left, right, result), "oi": (result, right, left), "if": (left, result, right)}[roles]
    return Counter({dtype: convolution(instruction, image, kernel, out)})


def attention_kernel(instruction: Instruction, operands: Sequence[Shape]) -> tuple[str, int] | None:
    """Head dim and direction as "64 forward", and keys of each sequence, of a kernel of attention; else None."""
    arrays = [dims for dtype, dims in operands if len(dims) > 2 and dtype in ("bf16", "f16", "f32")]
    named = instruction.custom_call_target.startswith("__cudnn$fmha")
    if len(arrays) < 2 or not (named or any(re.match(name, instruction.name) for name, _ in _PALLAS_PRODUCTS)):
        return None
    scores = re.search(r'"intermediate_tensor_shape".*?"dimensions":\s*\[([^]]*)', instruction.tail)
    length = integers(scores[1])[-1] if scores else arrays[1][-2]
    backward = re.search("Backward", instruction.custom_call_target) or re.search("bwd|_dq|_dkv", instruction.name)
    return f"{arrays[0][-1]} {'backward' if backward else 'forward'}", length


def is_opaque(instruction: Instruction, flops: Mapping[str, float]) -> bool:
    """Whether `instruction` is a custom call of which nobody here knows what it computes; flops: those counted."""
    target = instruction.custom_call_target if instruction.opcode == "custom-call" else ""
    return bool(target) and not flops and not instruction.callees and not _NO_PRODUCTS.match(target)


def wider(*shapes: Shape) -> str:
    """The dtype of most bits, in which a product of arrays of different dtypes is computed."""
    return max((dtype for dtype, _ in shapes), key=lambda dtype: shape_bytes(dtype, (8,)))


def _cublas(instruction: Instruction, operands: Sequence[Shape]) -> Counter[str]:
    left, result = operands[0][1], instruction.shapes[0][1]
    dims = re.search(r"lhs_contracting_dimensions[^[]*\[([^]]*)", instruction.tail)
    contracted = [left[dim] for dim in integers(dims[1])] if dims else [left[-1]]
    return Counter({wider(*operands[:2]): 2.0 * math.prod(result) * math.prod(contracted)})


def _cudnn_attention(instruction: Instruction, operands: Sequence[Shape]) -> Counter[str]:
    """Two products forward. Backward five: the scores again, and the gradients of values, probabilities, keys, queries.

    Queries are (batch, seq, heads, head dim), as XLA lays them out for cuDNN.
    """
    scores = re.search(r'"intermediate_tensor_shape".*?"dimensions":\s*\[([^]]*)', instruction.tail)
    if scores is None:
        return Counter()
    batch, heads, queries, keys = integers(scores[1])
    products = 5 if "Backward" in instruction.custom_call_target else 2
    causal = re.search(r'"mask_type":\s*"\w*CAUSAL', instruction.tail) is not None
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', instruction.tail)
    pairs = _pairs(queries, keys, causal=causal, window=int(window[1]) if window else 0)
    dtype, (*_, head_dim) = operands[0]
    return Counter({dtype: 2.0 * products * batch * heads * pairs * head_dim})


def _pairs(queries: int, keys: int, *, causal: bool, window: int) -> float:
    """Pairs of a query and a key that it attends to: of `keys`, up to its own position, the last `window` of those."""
    if not causal:
        return float(queries * keys)
    seen = min(window or keys, keys)
    ramp = min(queries, seen)  # the first queries see fewer keys than the others
    return ramp * (ramp + 1) / 2 + max(0, queries - ramp) * seen


def _pallas(instruction: Instruction, operands: Sequence[Shape]) -> Counter[str]:
    """By the kernel's own estimate, else by its name, of those that JAX ships; batch and heads lead its operands."""
    arrays = [shape for shape in operands if len(shape[1]) > 2 and shape[0] in ("bf16", "f16", "f32")]
    estimate = re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', instruction.tail)
    if estimate:
        return Counter({wider(*(arrays or operands)): float(estimate[1])}) if int(estimate[1]) else Counter()
    products = next((count for name, count in _PALLAS_PRODUCTS if re.match(name, instruction.name)), 0)
    if not products or len(arrays) < 2:
        return Counter()
    products += '\\"use_fused_bwd_kernel\\": true' in instruction.tail and "dkv" in instruction.name
    (dtype, (*leading, length, head_dim)), (_, keys) = arrays[:2]
    pairs = _block_pairs(instruction.tail, length, keys[-2])
    return Counter({dtype: 2.0 * products * math.prod(leading) * head_dim * pairs})


def _block_pairs(tail: str, queries: int, keys: int) -> float:
    """Pairs of a query and a key in the blocks that a kernel computes: of a causal one, those up to the diagonal."""
    sizes = [re.search(rf'block_{name}\w*\\": (\d+)', tail) for name in ("q", "kv")]
    if CAUSAL_SCOPE not in tail or not all(sizes):
        return float(queries * keys)
    rows, columns = (int(size[1]) for size in sizes if size)
    return float(sum(rows * min(keys, math.ceil(end / columns) * columns)
                     for end in range(rows, queries + 1, rows)))
