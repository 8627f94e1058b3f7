"""FLOPs of a model as it is written: the matrix products and convolutions of its trace."""

import math
from typing import Any

from jax.extend import core


def traced_flops(jaxpr: Any) -> float:
    """FLOPs of the products in `jaxpr` (closed or not), 2 for each multiplication and addition.

    A scan counts as often as it runs, of branches the longest one, a while loop (its trips are unknown) once.
    Elementwise work is not counted.
    """
    inner = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    return sum(_flops(eqn) for eqn in inner.eqns)


def _flops(eqn: core.JaxprEqn) -> float:
    name, params = eqn.primitive.name, eqn.params
    out = math.prod(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else 0
    if name == "dot_general":
        shape, contracted = eqn.invars[0].aval.shape, params["dimension_numbers"][0][0]  # pyright: ignore
        return 2.0 * out * math.prod(shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval.shape, params["dimension_numbers"].rhs_spec  # pyright: ignore
        return 2.0 * out * math.prod(kernel[dim] for dim in spec[1:])
    inside = [traced_flops(inner) for inner in core.jaxprs_in_params(params)]
    if name == "cond":
        return max(inside, default=0.0)
    if name == "custom_vjp_call":  # the forward rule is there, too
        return traced_flops(params["call_jaxpr"])
    return sum(inside) * (params["length"] if name == "scan" else 1)
