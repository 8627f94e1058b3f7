"""FLOPs: of a model as written (the products and convolutions of its jaxpr) and of its compiled step; MFU and HFU."""

import dataclasses
import math
from collections.abc import Iterable

from zero_jax.jaxpr.equations import ClosedJaxpr, Jaxpr, JaxprEqn, inner_jaxprs, primitive_of, shape_of
from zero_jax.jaxpr.primitives import (
    COND,
    CONV,
    CUDNN_ATTENTION,
    CUSTOM_VJP,
    DOT,
    call_jaxpr,
    conv_dims,
    dot_dims,
    num_rounds,
)
from zero_jax.xla.events import Event, opaque_calls, totals


def traced_flops(jaxpr: Jaxpr | ClosedJaxpr) -> float:
    """FLOPs of the products in `jaxpr` (closed or not), 2 for each multiplication and addition.

    A scan counts as often as it runs, a Pallas kernel as often as its grid says, a conditional as its costliest branch,
    a while loop once since its trips are unknown. What a mask hides from attention is counted, as in PaLM's definition
    of model FLOPs (arXiv 2204.02311, appendix B). Elementwise operations are not counted.
    """
    return sum(_flops(eqn) for eqn in jaxpr.eqns)


def _flops(eqn: JaxprEqn) -> float:
    primitive = primitive_of(eqn)
    out = math.prod(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else 0
    if primitive == DOT:
        shape = shape_of(eqn.invars[0]).shape
        return 2.0 * out * math.prod(shape[dim] for dim in dot_dims(eqn).contracted[0])
    if primitive == CONV:
        kernel = shape_of(eqn.invars[1]).shape
        return 2.0 * out * math.prod(kernel[dim] for dim in conv_dims(eqn).kernel[1:])
    if primitive == CUDNN_ATTENTION:  # (batch, seq, heads, head dim) queries and keys, whose heads may be fewer
        batch, queries, heads, head_dim = shape_of(eqn.invars[0]).shape
        return 4.0 * batch * heads * queries * shape_of(eqn.invars[1]).shape[1] * head_dim
    if primitive == CUSTOM_VJP:  # the forward rule is among its parameters, too
        return traced_flops(call_jaxpr(eqn))
    inside = [traced_flops(inner) for inner in inner_jaxprs(eqn)]
    return max(inside, default=0.0) if primitive == COND else sum(inside) * num_rounds(eqn)


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """FLOPs of one train step on all devices, and what they come to in a step of so many seconds.

    Attributes:
        model: of the model as written: three times those of its forward pass, without recomputation.
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
        """Model FLOPs utilisation: model / (seconds x devices x peak); arXiv 2204.02311, appendix B."""
        return None if self.peak is None else self.model / (seconds * self.num_devices * self.peak)

    def hfu(self, seconds: float) -> float | None:
        """Hardware FLOPs utilisation: program / (seconds x devices x peak)."""
        if self.peak is None or self.program is None:
            return None
        return self.program / (seconds * self.num_devices * self.peak)


def step_flops(forward: Jaxpr | ClosedJaxpr, schedule: Iterable[Event], *, num_devices: int,
               peak: float | None) -> StepFlops:
    """The FLOPs of a step from the jaxpr of its loss in evaluation, of the global batch, and its compiled schedule.

    schedule: of one device. peak: as in `StepFlops`.
    """
    schedule = tuple(schedule)
    known = not any(opaque_calls(schedule))
    program = num_devices * sum(totals(schedule).flops.values()) if known else None
    return StepFlops(3 * traced_flops(forward), program, num_devices, peak)
