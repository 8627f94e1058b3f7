"""Low-rank adapters (LoRA, arXiv 2106.09685) of a traced model: `x (W + s A B)` as `x W + s (x A) B`.

A frontend hands the model `adapted(...)` where it reads W. That is right wherever W goes, and dear: a matrix of W's
size, and in backward its gradient. `split_low_rank_products` replaces it in the products that use it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zero_jax.errors import UsageError
from zero_jax.jaxpr.equations import Jaxpr, JaxprEqn, eqn_of, is_literal, primitive_of, variables
from zero_jax.jaxpr.primitives import CONSTRAINT, CONVERT, DOT, NAME, dot_dims, inlined_eqns, jit_name
from zero_jax.transforms.tiled_products import WeightProduct
from zero_jax.typing import Shape

ADAPTED = "zero_adapted_"
"""With a number, the name of the jitted call that makes an adapted weight."""

_FOLLOWED = (CONVERT, CONSTRAINT, NAME, "transpose", "copy")
"""Primitives of one operand through which a weight is followed to its products."""


class Dims(NamedTuple):
    """Which dims of an array are which: `stacked` ones that loops run over, those a product sums over, the others."""

    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LowRank:
    """An adapter of one parameter W: A B times `scale`, both with as many dims as W, of which they keep the place.

    shape: of W. stacked: its dims that loops run over. rows: those that products sum over. A has `rank` in the place of
    W's first column and 1 in that of the others; B likewise of its rows. dropout: share of what A multiplies that is
    set to zero in training.
    """

    shape: Shape
    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    rank: int
    scale: float
    dropout: float = 0.0

    @property
    def columns(self) -> tuple[int, ...]:
        """The dims of W that products keep."""
        return tuple(dim for dim in range(len(self.shape)) if dim not in (*self.stacked, *self.rows))

    @property
    def a_shape(self) -> Shape:
        """The shape of A."""
        return self._thin(self.columns)

    @property
    def b_shape(self) -> Shape:
        """The shape of B."""
        return self._thin(self.rows)

    @property
    def fan_in(self) -> int:
        """Over how many elements a product sums."""
        return math.prod(self.shape[dim] for dim in self.rows)

    @property
    def key_shape(self) -> Shape:
        """One key for each index of the stacked dims, with dims in the place of W's."""
        return tuple(size if dim in self.stacked else 1 for dim, size in enumerate(self.shape))

    def dims(self, ndim: int) -> Dims:
        """Of W as it is stored, or inside the loops over its stacked dims, where it has that many dims less."""
        if ndim == len(self.shape):
            return Dims(self.stacked, self.rows, self.columns)
        left = [dim for dim in range(len(self.shape)) if dim not in self.stacked]
        assert ndim == len(left), f"an array of {ndim} dims is no slice of {self.shape} over {self.stacked}"
        return Dims((), tuple(map(left.index, self.rows)), tuple(map(left.index, self.columns)))

    def matrices(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A as (stacked..., rows..., rank) and B as (stacked..., rank, columns...)."""
        dims = self.dims(a.ndim)
        a = jnp.transpose(a, (*dims.stacked, *dims.rows, *dims.columns))
        b = jnp.transpose(b, (*dims.stacked, *dims.rows, *dims.columns))
        outer, rows = len(dims.stacked), len(dims.rows)
        return (a.reshape(*a.shape[:outer + rows], self.rank),
                b.reshape(*b.shape[:outer], self.rank, *b.shape[outer + rows:]))

    def delta(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A B times the scale, with the dims of W, in the dtype of A and B."""
        dims = self.dims(a.ndim)
        left, right = self.matrices(a, b)
        outer = tuple(range(len(dims.stacked)))
        product = jax.lax.dot_general(left, right, (((left.ndim - 1,), (len(outer),)), (outer, outer)),
                                      preferred_element_type=jnp.promote_types(left.dtype, jnp.float32))
        order = (*dims.stacked, *dims.rows, *dims.columns)
        back = sorted(range(len(order)), key=lambda i: order[i])
        return jnp.transpose(self.scale * product, back)

    def _thin(self, replaced: Sequence[int]) -> Shape:
        return tuple(self.rank if dim == replaced[0] else 1 if dim in replaced else size
                     for dim, size in enumerate(self.shape))


def adapted(number: int, spec: LowRank, weight: jax.Array, a: jax.Array, b: jax.Array, *key: jax.Array) -> jax.Array:
    """W + s A B in the dtype of W, as a call that `split_low_rank_products` knows by its number.

    key: of the adapter's dropout, which needs that pass; none: without dropout.
    """
    def call(weight: jax.Array, a: jax.Array, b: jax.Array, *key: jax.Array) -> jax.Array:
        delta = spec.delta(a, b)
        return (weight.astype(delta.dtype) + delta).astype(weight.dtype)

    call.__name__ = f"{ADAPTED}{number}"
    return jax.jit(call)(weight, a, b, *key)


def split_low_rank_products(jaxpr: Jaxpr, *, specs: Mapping[str, LowRank]) -> Jaxpr:
    """Replaces `x (W + s A B)` by `x W + s (x A) B`, with dropout of the x that A multiplies.

    Why: A B is of the size of W and in bfloat16 rounds away beside it, and backward would make W's whole gradient to
    get those of A and B from it.
    Order: before all others, in the program of the model alone.

    specs: by the name of the parameter, in the order of the calls' numbers. A product whose dims are not those of the
    adapter keeps the weight that was added up, and so does whatever else uses it.

    Raises ValueError where a weight that was added up remains in use and its adapter has dropout, which would be lost.
    """
    weights: dict[Any, tuple[JaxprEqn, tuple[JaxprEqn, ...]]] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        name = jit_name(eqn) or ""
        if name.startswith(ADAPTED) and eqn.outvars:  # of what nothing uses, JAX leaves a call without results
            weights[eqn.outvars[0]] = eqn, ()
        elif primitive_of(eqn) in _FOLLOWED and len(eqn.invars) == 1 and _known(eqn.invars[0], weights):
            call, moves = weights[eqn.invars[0]]
            weights[eqn.outvars[0]] = call, (*moves, eqn)
        elif primitive_of(eqn) == DOT:
            side = next((side for side in (1, 0) if _known(eqn.invars[side], weights)), None)
            if side is not None:
                call, moves = weights[eqn.invars[side]]
                eqns += _split(WeightProduct(moves, eqn, side), call, specs[_name(call, specs)]) or [eqn]
                continue
        eqns.append(eqn)
    eqns = _without_unused(eqns, weights, jaxpr.outvars)
    for eqn in eqns:
        if eqn.outvars and eqn.outvars[0] in weights and not weights[eqn.outvars[0]][1] and len(eqn.invars) > 3:
            raise UsageError(
                f"lora(dropout=...): {_name(eqn, specs)} is used elsewhere than in a product of its own (in a jitted "
                "function or under a vmap of the model's), which the adapter's dropout does not reach: leave dropout "
                "out, or this target.")
    return jaxpr.replace(eqns=eqns)


def _name(call: JaxprEqn, specs: Mapping[str, LowRank]) -> str:
    """The parameter whose adapted weight `call` makes."""
    return [*specs][int((jit_name(call) or "").removeprefix(ADAPTED))]


def _split(of_weight: WeightProduct, call: JaxprEqn, spec: LowRank) -> list[JaxprEqn] | None:
    """The equations in the place of a product with the adapted weight that `call` makes."""
    dot, side, order = of_weight.dot, of_weight.side, of_weight.order
    numbers = dot_dims(dot)
    contracted, batched = numbers.contracted[side], numbers.batched[side]
    if len(order) not in (len(spec.shape), len(spec.shape) - len(spec.stacked)):
        return None  # batched by a vmap of the model's
    dims = spec.dims(len(order))
    if {order[dim] for dim in contracted} != set(dims.rows) or {order[dim] for dim in batched} != set(dims.stacked):
        return None
    others_contracted, others_batched = numbers.contracted[1 - side], numbers.batched[1 - side]
    # The dims of the other operand in the order of the weight's own.
    summed = [other for _, other in sorted(zip([order[dim] for dim in contracted], others_contracted, strict=True),
                                           key=lambda pair: dims.rows.index(pair[0]))]
    outer = [other for _, other in sorted(zip([order[dim] for dim in batched], others_batched, strict=True),
                                          key=lambda pair: dims.stacked.index(pair[0]))]

    def product(other: jax.Array, weight: jax.Array, a: jax.Array, b: jax.Array, *key: jax.Array) -> Sequence[Any]:
        result = of_weight.multiply(weight, other)
        left, right = (thin.astype(other.dtype) for thin in spec.matrices(a, b))
        kept = _dropped(other, spec.dropout, key[0]) if key else other
        stacked = tuple(range(len(outer)))
        general = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.promote_types(
            other.dtype, jnp.float32))
        hidden = general(kept, left, ((tuple(summed), tuple(range(len(stacked), left.ndim - 1))),
                                      (tuple(outer), stacked))).astype(other.dtype)
        # (stacked, free dims of the other operand, rank) times (stacked, rank, columns)
        added = general(hidden, right, (((hidden.ndim - 1,), (len(stacked),)), (stacked, stacked)))
        added = jnp.transpose(added, _permutation(added.ndim, len(dims.columns), batched, others_batched))
        return [(result + spec.scale * added).astype(result.dtype)]

    def _permutation(ndim: int, columns: int, batched: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
        """From (stacked dims, the other's, columns in the weight's order) to the order of the product's result."""
        num_outer = len(batched)
        at_outer = [dims.stacked.index(order[dim]) for dim in batched]
        free = [dim for dim in range(len(order)) if dim not in (*contracted, *batched)]
        at_columns = [ndim - columns + dims.columns.index(order[dim]) for dim in free]
        at_others = list(range(num_outer, ndim - columns))
        return (*at_outer, *(at_others + at_columns if side == 1 else at_columns + at_others))

    invars = [dot.invars[1 - side], *call.invars]
    return list(inlined_eqns(eqn_of(jax.jit(product), invars, dot.outvars)))


def _dropped(value: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """`value` with a share of `rate` of its elements set to zero, and the others scaled up to keep the mean."""
    data = key.reshape(-1, key.shape[-1])[0]
    kept = jax.random.bernoulli(jax.random.wrap_key_data(data), 1 - rate, value.shape)
    return jnp.where(kept, value / (1 - rate), jnp.zeros((), value.dtype)).astype(value.dtype)


def _known(atom: Any, known: Any) -> bool:
    return not is_literal(atom) and atom in known


def _without_unused(eqns: list[JaxprEqn], weights: Any, outvars: Sequence[Any]) -> list[JaxprEqn]:
    """`eqns` without those that make adapted weights which nothing uses any more."""
    used, kept = set(variables(outvars)), []
    for eqn in reversed(eqns):
        if not eqn.outvars or not all(var in weights and var not in used for var in eqn.outvars):
            used.update(variables(eqn.invars))
            kept.append(eqn)
    return kept[::-1]
