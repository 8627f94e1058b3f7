"""FLOPs: of a model as written (the products and convolutions of its jaxpr) and of its compiled step; MFU and HFU."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    inner_jaxprs,
    is_literal,
    primitive_of,
    scope_of,
    shape_of,
)
from zero_jax.jaxpr.primitives import (
    COND,
    CONV,
    CUDNN_ATTENTION,
    CUSTOM_VJP,
    DOT,
    call_jaxpr,
    conv_dims,
    dot_dims,
    is_causal_kernel,
    num_iterations,
    own_use,
)
from zero_jax.transforms.tiled_products import TILED_PRODUCT
from zero_jax.xla.events import Event, opaque_calls, totals
from zero_jax.xla.kernels import CAUSAL_SCOPE


def traced_flops(jaxpr: Jaxpr | ClosedJaxpr, *, in_causal: bool = False) -> float:
    """FLOPs of the products in `jaxpr` (closed or not), 2 for each multiplication and addition.

    A scan counts as often as it runs, a Pallas kernel as often as its grid says, a conditional as its costliest branch,
    a while loop once since its trips are unknown. Causal attention counts half where it is known as such (cuDNN's
    kernel, and `zero_jax.attention` with any), as compiled kernels do that skip what the mask hides; PaLM's definition
    of model FLOPs (arXiv 2204.02311, appendix B) has all of it. Elementwise operations are not counted.

    in_causal: `jaxpr` is of a causal attention whose FLOPs the caller halves.
    """
    return sum(_flops(eqn, in_causal) for eqn in jaxpr.eqns)


def _flops(eqn: JaxprEqn, in_causal: bool = False) -> float:
    if not in_causal and CAUSAL_SCOPE in scope_of(eqn):
        return _flops(eqn, in_causal=True) / 2
    primitive = primitive_of(eqn)
    out = math.prod(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else 0
    if primitive == DOT:
        shape = shape_of(eqn.invars[0]).shape
        return 2.0 * out * math.prod(shape[dim] for dim in dot_dims(eqn).contracted[0])
    if primitive == TILED_PRODUCT:
        return own_use(eqn).flops
    if primitive == CONV:
        kernel = shape_of(eqn.invars[1]).shape
        return 2.0 * out * math.prod(kernel[dim] for dim in conv_dims(eqn).kernel[1:])
    if primitive == CUDNN_ATTENTION:  # (batch, seq, heads, head dim) queries and keys, whose heads may be fewer
        batch, queries, heads, head_dim = shape_of(eqn.invars[0]).shape
        whole = 4.0 * batch * heads * queries * shape_of(eqn.invars[1]).shape[1] * head_dim
        return whole / 2 if not in_causal and is_causal_kernel(eqn) else whole
    if primitive == CUSTOM_VJP:  # the forward rule is among its parameters, too
        return traced_flops(call_jaxpr(eqn), in_causal=in_causal)
    inside = [traced_flops(inner, in_causal=in_causal) for inner in inner_jaxprs(eqn)]
    return max(inside, default=0.0) if primitive == COND else sum(inside) * num_iterations(eqn)


def frozen_flops(jaxpr: Jaxpr, frozen: Sequence[bool | None]) -> float:
    """Of `traced_flops` those of products by a weight that is not trained, whose gradient backward does not compute.

    frozen: of each input whether it is such a weight; None: a constant, beside which a weight stays one.
    """
    return _frozen(jaxpr, frozen)[0]


def _frozen(jaxpr: Jaxpr, frozen: Sequence[bool | None]) -> tuple[float, list[bool | None]]:
    """(`frozen_flops`, of each output whether it is computed from frozen weights alone)."""
    known: dict[Any, bool | None] = dict(zip(jaxpr.invars, frozen, strict=True))
    known |= dict.fromkeys(jaxpr.constvars)
    total = 0.0

    def of(atom: Any) -> bool | None:
        return None if is_literal(atom) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [of(atom) for atom in eqn.invars]
        if primitive_of(eqn) in (DOT, TILED_PRODUCT) and sorted(map(bool, operands)) == [False, True]:
            total += _flops(eqn)
        derived = False if False in operands else True if True in operands else None
        outs: list[bool | None] = [derived] * len(eqn.outvars)
        inner = [call_jaxpr(eqn).jaxpr] if primitive_of(eqn) == CUSTOM_VJP else inner_jaxprs(eqn)
        inside = [_frozen(each, operands[len(operands) - len(each.invars):]) for each in inner
                  if len(each.invars) in (len(operands), len(operands) - 1)]  # branches do not take the index
        if inside:
            total += max(flops for flops, _ in inside) * num_iterations(eqn)
            outs = inside[0][1] if len(inside[0][1]) == len(outs) else outs
        known |= dict(zip(eqn.outvars, outs, strict=True))
    return total, [of(atom) for atom in jaxpr.outvars]


def model_flops(step: Any, batch: Any) -> float:
    """FLOPs of a step as its model is written: three times those of forward, less gradients that nothing needs.

    step: a `ZeroTrainStep`. batch: of it, or abstract. Of a weight that is not trained backward computes no gradient.
    """
    forward, state = step.trace_forward(batch), step.abstract_state(batch)
    marked = jax.tree.map(lambda _: False, state)
    flags = jax.tree.leaves(dataclasses.replace(marked, frozen=jax.tree.map(lambda _: True, state.frozen)))
    flags += [False] * (len(forward.jaxpr.invars) - len(flags))
    return 3 * traced_flops(forward) - frozen_flops(forward.jaxpr, flags)


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """FLOPs of one train step on all devices, and what they come to in a step of so many seconds.

    Attributes:
        model: of the model as written (`model_flops`), without recomputation.
        program: of the compiled program on all devices, with what it recomputes and what devices repeat; None where it
            calls kernels whose FLOPs are not known.
        num_devices: that share them.
        peak: dense bf16 FLOP/s of one device, whatever the precision, as in `plan`; None where it is not known.
    """

    model: float
    program: float | None
    num_devices: int
    peak: float | None

    def tflops(self, seconds: float) -> float:
        """TFLOP/s of one device, of the model as written: what does not grow by recomputing more."""
        return self.model / seconds / self.num_devices / 1e12

    def mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilisation: model / (seconds x devices x peak), with half of causal attention."""
        return None if self.peak is None else self.model / (seconds * self.num_devices * self.peak)

    def hfu(self, seconds: float) -> float | None:
        """Hardware FLOPs utilisation: program / (seconds x devices x peak)."""
        if self.peak is None or self.program is None:
            return None
        return self.program / (seconds * self.num_devices * self.peak)


def step_flops(model: float, schedule: Iterable[Event], *, num_devices: int, peak: float | None) -> StepFlops:
    """The FLOPs of a step from those of its model, for the global batch, and its compiled schedule.

    schedule: of one device. peak: as in `StepFlops`.
    """
    schedule = tuple(schedule)
    known = not any(opaque_calls(schedule))
    program = num_devices * sum(totals(schedule).flops.values()) if known else None
    return StepFlops(model, program, num_devices, peak)
