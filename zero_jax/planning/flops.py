"""FLOPs of a model as written: the matrix products and convolutions of its jaxpr, before any compiler."""

import math

from zero_jax.jaxpr.equations import ClosedJaxpr, Jaxpr, JaxprEqn, closed_jaxpr, inner_jaxprs, primitive_of, shape_of
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


def traced_flops(jaxpr: Jaxpr | ClosedJaxpr) -> float:
    """FLOPs of the products in `jaxpr` (closed or not), 2 for each multiplication and addition.

    A scan counts as often as it runs, a Pallas kernel as often as its grid says, a conditional as its costliest branch,
    a while loop once since its trips are unknown. What a mask hides from attention is counted, as in PaLM's definition
    of model FLOPs (arXiv 2204.02311, appendix B). Elementwise operations are not counted.
    """
    return sum(_flops(eqn) for eqn in closed_jaxpr(jaxpr).jaxpr.eqns)


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
