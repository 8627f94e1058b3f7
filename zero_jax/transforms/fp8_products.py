"""A pass on the traced loss: products with weights in float8 (arXiv 2209.05433), forward and backward.

Operands are rounded to float8 and multiplied as what that stands for; XLA:GPU makes products of the codes of it.
"""

import dataclasses
import functools
from typing import Any

import jax

from zero_jax.errors import UsageError
from zero_jax.gather.gather import use_of_read
from zero_jax.gather.quantized.products import E4M3, E5M2, rounded
from zero_jax.jaxpr.equations import Jaxpr, JaxprEqn, bind_eqn, eqn_of, in_scope_of, primitive_of
from zero_jax.jaxpr.named_call import named_call
from zero_jax.jaxpr.primitives import CUSTOM_VJP, DOT, call_jaxpr
from zero_jax.transforms.tiled_products import weight_product

ROUNDED = "zero_float8"
"""The name of the primitive that rounds an operand: each device rounds what it has, by the scale of that.

The largest value of all devices would take an all-reduce before each product, which waits for the gather of the next
layer. As scales are powers of two, another one changes just what is close to nothing beside the largest value.
"""


def fp8_products(jaxpr: Jaxpr, *, strict: bool = True) -> Jaxpr:
    """Replaces each product with a weight whose `ParamUse` asks for it by one of float8 operands.

    Why: such products run at twice the rate of bfloat16, and their weights are gathered in half of the bytes.
    Cost without: 0.810 instead of 0.665 s for a step of LLaMA 3 8B on 8 H100, as predicted (docs/guide/precision.md).
    Order: as `tile_products`. What is left are a rounding of the operands before the model's own product, forward and
    backward, so that the passes after it see nothing new.

    strict: raises UsageError where such a weight is used in another way; else it is multiplied as it is.
    """
    for read in jaxpr.eqns:
        use = use_of_read(read)
        if use is None or use.fp8 is None:
            continue
        found = weight_product(jaxpr, read)
        if not isinstance(found, str):
            jaxpr, product = found
            multiply = Fp8Product(product.dot, product.side, use.fp8.encoded)
            eqn = in_scope_of(eqn_of(multiply, product.dot.invars, product.dot.outvars), product.dot)
            jaxpr = jaxpr.replace(eqns=[eqn if each is product.dot else each for each in jaxpr.eqns])
        elif strict:
            raise UsageError(f"precision: fp8: the product with {use.fp8.name} is not found: {found}: give patterns "
                             "without it, as Precision(fp8=(\"mlp\",)).")
    return jaxpr


@dataclasses.dataclass(frozen=True)
class Fp8Product:
    """The product `dot` of two operands that are rounded to e4m3; its cotangent is rounded to e5m2.

    side: which operand is the weight; encoded: whether that is rounded already. Backward multiplies the rounded
    operands by the rounded cotangent, and is the gradient of the operands as they are (straight through).
    """

    dot: JaxprEqn
    side: int
    encoded: bool

    def __call__(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """The product, of the dtype that `dot` has."""
        def forward(left: jax.Array, right: jax.Array) -> jax.Array:
            return self._product(*self._rounded((left, right)))

        call = jax.custom_vjp(forward)
        call.defvjp(lambda *operands: (forward(*operands), operands), self._backward)
        return call(left, right)

    def _rounded(self, operands: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        return [each if self.encoded and side == self.side else _ROUNDED.bind(each, use=E4M3, names=())
                for side, each in enumerate(operands)]

    def _product(self, left: jax.Array, right: jax.Array, **params: Any) -> jax.Array:
        (result,) = bind_eqn(self.dot, [left, right], **params)
        return result

    def _backward(self, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> Any:
        # It rounds operands again: what it keeps of forward is what `dot` alone would keep.
        # By its default precision cuBLAS sums float8 in fewer bits than float32, which gradients need (as in Flax).
        precise = functools.partial(self._product, precision=(jax.lax.Precision.HIGHEST,) * 2)
        _, pullback = jax.vjp(precise, *self._rounded(operands))
        return pullback(_ROUNDED.bind(cotangent, use=E5M2, names=()))


def rounded_product(eqn: JaxprEqn) -> JaxprEqn | None:
    """The `dot` of the `Fp8Product` that `eqn` computes, of the same operands; None of any other equation."""
    eqns = call_jaxpr(eqn).eqns if primitive_of(eqn) == CUSTOM_VJP else []
    if not any(primitive_of(each) == ROUNDED for each in eqns):
        return None
    return next((each for each in eqns if primitive_of(each) == DOT), None)


_ROUNDED = named_call(ROUNDED, rounded)
