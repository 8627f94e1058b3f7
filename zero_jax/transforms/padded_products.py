"""A pass on the traced loss: products with weights that are stored padded, as they are gathered."""

import dataclasses
import math

import jax
from jax import lax

from zero_jax.jaxpr.equations import Jaxpr, JaxprEqn, bind_eqn, eqn_of, in_scope_of, producers, shape_of
from zero_jax.jaxpr.primitives import inlined_eqns, own_use
from zero_jax.sharding.gather import ParamUse, use_of_read
from zero_jax.sharding.stored_shape import identity_shape
from zero_jax.transforms.weight_product import WeightProduct, replaced, weight_product


def multiply_padded(jaxpr: Jaxpr) -> Jaxpr:
    """Multiplies with padded weights as they are gathered, where what is beside them is smaller: it is padded, or cut.

    Why: a gathered weight that is cut to its true shape is another copy of it, and so is its gradient, padded after
    the product that makes it. The derivative of a product with the padded weight is padded as it is made.
    Cost without: 2029 instead of 1471 MiB of temporaries (four layers of width 5120 on 7 H100, parameters in host
    memory, 4 x 64 tokens on each).
    Order: after `duplicate_param_reads`, so that every read has one consumer, and `tile_products`, whose tiles are not
    padded; before the passes for checkpoints and loops, which then see a weight that is stored as it is.
    """
    for read in [eqn for eqn in jaxpr.eqns if _is_padded(use_of_read(eqn))]:
        found = weight_product(jaxpr, read)
        if not isinstance(found, str) and (new := _as_gathered(*found, read)) is not None:
            jaxpr = replaced(found[0], read, found[1], new)
    return jaxpr


def _is_padded(use: ParamUse | None) -> bool:
    """Whether a parameter that is read so is stored padded, and may be used so."""
    return use is not None and use.is_factor and use.tiles is None and not use.stored_shape.is_identity


def _as_gathered(jaxpr: Jaxpr, product: WeightProduct, read: JaxprEqn) -> list[JaxprEqn] | None:
    """The equations in the place of the product; None where they would copy more than they save."""
    use: ParamUse = own_use(read)
    dot, side, gather = product.dot, product.side, producers(jaxpr)[read.invars[1]]
    true, other = shape_of(read.outvars[0]), shape_of(dot.invars[1 - side])
    before, after = list(other.shape), list(shape_of(dot.outvars[0]).shape)
    stored = list(before)
    copied = 0
    for dim, (size, padded) in enumerate(zip(true.shape, use.stored_shape.stored, strict=True)):
        if size == padded:
            continue
        of_other, of_out = product.dims_beside(dim)
        if of_other is not None:
            stored[of_other] = padded
        copied += math.prod(before if of_other is not None else after)
    if copied >= math.prod(true.shape) * use.axes.size(*use.axes.batch):
        return None
    as_stored = dataclasses.replace(use, stored_shape=identity_shape(use.stored_shape.stored), is_factor=False)

    def multiply(carrier: jax.Array, shard: jax.Array, beside: jax.Array) -> jax.Array:
        (gathered,) = bind_eqn(gather, [shard], use=as_stored)
        (weight,) = bind_eqn(read, [carrier, gathered], use=as_stored)
        beside = lax.pad(beside, beside.dtype.type(0), [
            (0, new - old, 0) for old, new in zip(before, stored, strict=True)])
        result = product.multiply(weight, beside)
        return lax.slice(result, [0] * result.ndim, after)

    operands = [read.invars[0], gather.invars[0], dot.invars[1 - side]]
    call = in_scope_of(eqn_of(jax.jit(multiply), operands, dot.outvars), dot)
    return [in_scope_of(eqn, call) for eqn in inlined_eqns(call)]
