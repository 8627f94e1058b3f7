"""A pass on the backward program: gradients that need no loop over layers are computed before it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.lax import optimization_barrier

from zero_jax.jaxpr.equations import (
    Jaxpr,
    JaxprEqn,
    all_eqns,
    eqn_of,
    inner_jaxprs,
    is_literal,
    primitive_of,
    producers,
    shape_of,
    trace,
    variable_like,
    variables,
)
from zero_jax.jaxpr.primitives import DOT, SCAN, Scan
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.transforms.explicit_scatter import PartialGradient
from zero_jax.transforms.scatter_calls import is_quantized, is_scatter


class _Product(NamedTuple):
    """A product of a gradient, as two equations: every device's part, and their sum."""

    eqn: JaxprEqn
    each: JaxprEqn
    total: JaxprEqn


def multiply_before_loops(jaxpr: Jaxpr, *, batch_size: int, axes: MeshAxes) -> Jaxpr:
    """A loop over layers waits for the products that the program has before it, and that make gradients.

    Why: nothing in the loop takes the gradient of the head, so that XLA:TPU may make it behind the loop. What it is
    made of, as large as the logits, is then alive beside all that backward needs.
    Cost without: 5.28 instead of 5.01 GB of temporaries, in a step of the same time (1.5B at stage 3 on `v5p:2x2x2`,
    4 x 1024 tokens on each device).
    Order: before `scatter_partial_gradients`, which reduces and scatters what the devices have made here.

    Only products that leave less on a device than they take. Not where a model's own axes split them, which are the
    partitioner's to sum, nor gradients that are sent as codes.

    Args: as `explicit_scatter.scatter_partial_gradients`.
    """
    loops = [eqn for eqn in jaxpr.eqns if _is_over_layers(eqn)]
    if not loops or axes.batch != axes.step_names:
        return jaxpr
    products = _products(jaxpr, loops[-1], batch_size, axes)
    eqns: list[JaxprEqn] = []
    waiting: list[_Product] = []
    behind: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        later = {var for other in (*(each.total for each in waiting), *behind) for var in other.outvars}
        product = next((each for each in products if each.eqn is eqn), None)
        if product is not None:
            waiting.append(product)
            eqns.append(product.each)
        elif later & {*variables(eqn.invars)}:
            behind.append(eqn)
        elif waiting and any(eqn is loop for loop in loops):
            eqns += [*_waited(eqn, waiting), *behind]
            waiting, behind = [], []
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=[*eqns, *(each.total for each in waiting), *behind])


def _is_over_layers(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a loop that scatters gradients, and whose carry can wait."""
    if primitive_of(eqn) != SCAN:
        return False
    return bool(_carry(eqn)) and any(is_scatter(inner) for body in inner_jaxprs(eqn) for inner in all_eqns(body))


def _carry(loop: JaxprEqn) -> list[Any]:
    scan = Scan.of(loop)
    return list(dict.fromkeys(variables(loop.invars[scan.num_consts:scan.num_consts + scan.num_carry])))


def _products(jaxpr: Jaxpr, last: JaxprEqn, batch_size: int, axes: MeshAxes) -> list[_Product]:
    """The products before the loop `last` that gradients are sums of."""
    makers, found = producers(jaxpr), []
    before = jaxpr.eqns[:next(number for number, eqn in enumerate(jaxpr.eqns) if eqn is last)]
    for scatter in jaxpr.eqns:
        whole = PartialGradient(makers, batch_size, axes)
        if is_scatter(scatter) and not is_quantized(scatter) and whole.add(scatter.invars[0], None):
            found += [eqn for eqn in whole.eqns if primitive_of(eqn) == DOT and any(eqn is each for each in before)]
    return [_split(eqn, makers, batch_size, axes) for eqn in found if _shrinks(eqn, axes)]


def _shrinks(product: JaxprEqn, axes: MeshAxes) -> bool:
    """Whether it leaves a device with less than the larger of its operands, which devices split."""
    taken = max(_bytes(atom) for atom in product.invars) // axes.size(*axes.batch)
    return _bytes(product.outvars[0]) < taken


def _bytes(atom: Any) -> int:
    shape = shape_of(atom)
    return shape.size * shape.dtype.itemsize


def _split(product: JaxprEqn, makers: dict[Any, JaxprEqn], batch_size: int, axes: MeshAxes) -> _Product:
    part = PartialGradient(makers, batch_size, axes)
    part.add_product(product)
    inputs = list(part.splits)

    def each(*values: jax.Array) -> jax.Array:
        return part.each(dict(zip(inputs, values, strict=True)))

    (made,) = trace(each, *map(shape_of, inputs)).jaxpr.eqns
    return _Product(product, made.replace(invars=inputs), eqn_of(
        lambda values: jax.lax.reduce_sum(values, (0,)), made.outvars, product.outvars))


def _waited(loop: JaxprEqn, products: Sequence[_Product]) -> list[JaxprEqn]:
    """`loop`, behind `products`, and behind it the sums of these."""
    parts, carry = [each.each.outvars[0] for each in products], _carry(loop)
    new = {atom: variable_like(atom) for atom in (*parts, *carry)}
    barrier = eqn_of(lambda *values: optimization_barrier(values), list(new), list(new.values()))
    scan = Scan.of(loop)
    invars = [new[atom] if 0 <= number - scan.num_consts < scan.num_carry and not is_literal(atom) else atom
              for number, atom in enumerate(loop.invars)]
    return [barrier, loop.replace(invars=invars),
            *(each.total.replace(invars=[new[each.each.outvars[0]]]) for each in products)]
