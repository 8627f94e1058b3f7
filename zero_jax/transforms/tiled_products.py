"""A pass on the traced loss: products with large weights in tiles (arXiv 2104.07857, section 5.1.3).

Neither the whole gathered weight nor its whole gradient exists on a device: each tile is gathered, multiplied and
dropped, and in backward its gradient is reduced and scattered at once.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.errors import UsageError
from zero_jax.gather.gather import ParamUse, compute_spec, use_of_read
from zero_jax.jaxpr.equations import (
    Jaxpr,
    JaxprEqn,
    bind_eqn,
    eqn_of,
    in_scope_of,
    primitive_of,
    producers,
    shape_of,
    variables,
)
from zero_jax.jaxpr.named_call import named_call
from zero_jax.jaxpr.primitives import (
    CONVERT,
    CUSTOM_VJP,
    DOT,
    JIT,
    NAME,
    call_jaxpr,
    dot_dims,
    inlined_eqns,
    own_use,
    permutation,
)
from zero_jax.sharding.mesh import constrain
from zero_jax.sharding.param_access import Tiles

_MOVES = (CONVERT, NAME, "transpose", "copy")
"""Primitives of one operand through which a weight is followed to its product."""


@dataclasses.dataclass(frozen=True)
class WeightProduct:
    """moves: what the model does with a weight before the product `dot`, whose operand `side` it is."""

    moves: tuple[JaxprEqn, ...]
    dot: JaxprEqn
    side: int

    def multiply(self, weight: jax.Array, other: jax.Array, **params: Any) -> jax.Array:
        """The product with `weight` as it is read, or a part of it, and `other`; params: of `dot`, changed."""
        for move in self.moves:
            (weight,) = bind_eqn(move, [weight])
        (result,) = bind_eqn(self.dot, [weight, other] if self.side == 0 else [other, weight], **params)
        return result

    @property
    def order(self) -> list[int]:
        """For each dim of the product's operand that of the weight."""
        order = list(range(shape_of(self.dot.invars[self.side]).ndim))
        for move in self.moves:
            if primitive_of(move) == "transpose":
                order = [order[before] for before in permutation(move)]
        return order

    def dims_beside(self, dim: int) -> tuple[int | None, int | None]:
        """The dims of the other operand and of the result that belong to the weight's dim; None: it has none there."""
        side, (contracted, batched) = self.side, dot_dims(self.dot)
        at = self.order.index(dim)
        if at in contracted[side]:
            return contracted[1 - side][contracted[side].index(at)], None
        if at in batched[side]:
            return batched[1 - side][batched[side].index(at)], batched[side].index(at)
        kept = [[own for own in range(shape_of(atom).ndim) if own not in (*summed, *shared)]
                for atom, summed, shared in zip(self.dot.invars, contracted, batched, strict=True)]
        return None, len(batched[0]) + (len(kept[0]) if side else 0) + kept[side].index(at)


def weight_product(jaxpr: Jaxpr, read: JaxprEqn) -> tuple[Jaxpr, WeightProduct] | str:
    """The product of what `read` returns, in `jaxpr` with the calls on the way to it inlined; or why there is none."""
    moves: list[JaxprEqn] = []
    atom = read.outvars[0]
    while True:
        users = [eqn for eqn in jaxpr.eqns if atom in variables(eqn.invars)]
        if len(users) != 1 or atom in variables(jaxpr.outvars):
            return f"{len(users) + (atom in variables(jaxpr.outvars))} operations use it where it is read"
        (user,) = users
        if primitive_of(user) == JIT and not call_jaxpr(user).consts:
            jaxpr = jaxpr.replace(eqns=[inner for eqn in jaxpr.eqns
                                        for inner in (inlined_eqns(eqn) if eqn is user else [eqn])])
        elif primitive_of(user) in _MOVES:
            moves.append(user)
            atom = user.outvars[0]
        elif primitive_of(user) == DOT and sum(operand is atom for operand in user.invars) == 1:
            return jaxpr, WeightProduct(tuple(moves), user, next(
                side for side, operand in enumerate(user.invars) if operand is atom))
        else:
            return f"{primitive_of(user)} uses it, which is no product"


def replaced(jaxpr: Jaxpr, read: JaxprEqn, product: WeightProduct, eqns: list[JaxprEqn]) -> Jaxpr:
    """`jaxpr` with `eqns` in the place of the product, and without the read and what follows it."""
    gone = {id(eqn) for eqn in (read, *product.moves)}
    return jaxpr.replace(eqns=[new for eqn in jaxpr.eqns if id(eqn) not in gone
                               for new in (eqns if eqn is product.dot else [eqn])])


TILED_PRODUCT = "zero_tiled_product"
"""The name of the primitive that is such a product in forward; its parameter `use` is a `TiledProduct`."""

def tile_products(jaxpr: Jaxpr, *, strict: bool = True) -> Jaxpr:
    """Replaces each product with a weight whose `ParamUse` has tiles by a loop over these.

    Why: a weight whose gathered copy does not fit can be trained, chosen from outside of the model.
    Cost without: the gathered weight and its gradient, whole: see `scripts/tables/tiling.py`.
    Order: after `mark_last_reads`, by which every read of such a weight has one consumer; before the passes for loops,
    which leave what this makes as it is: a `jax.custom_vjp` that keeps its operands alone, and a primitive of our own
    in forward, since a checkpoint policy that saves products would save those of all tiles.

    strict: raises ValueError where such a weight is used in another way; else it is gathered whole.
    """
    for read in jaxpr.eqns:
        use = use_of_read(read)
        if use is None or use.tiles is None:
            continue
        found = _product(jaxpr, read)
        if isinstance(found, Jaxpr):
            jaxpr = found
        elif strict:
            raise UsageError(f"tiling: {use.tiles.name} cannot be computed in tiles: {found}: leave it out.")
    return jaxpr


def _product(jaxpr: Jaxpr, read: JaxprEqn) -> Jaxpr | str:
    """`jaxpr` with the product of what `read` returns in tiles, or why that cannot be."""
    found = weight_product(jaxpr, read)
    if isinstance(found, str):
        return found
    jaxpr, product = found
    gather = producers(jaxpr)[read.invars[1]]
    operands = [read.invars[0], gather.invars[0], product.dot.invars[1 - product.side]]
    tiled = eqn_of(TiledProduct(own_use(read), product), operands, product.dot.outvars)
    jaxpr = replaced(jaxpr, read, product, [in_scope_of(tiled, product.dot)])
    used = {atom for eqn in jaxpr.eqns for atom in variables(eqn.invars)}
    return jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if eqn is not gather or used.intersection(eqn.outvars)])


@dataclasses.dataclass(frozen=True)
class TiledProduct:
    """`other` times a weight, or the weight times `other`, tile by tile: a function of (carrier, stored, other).

    carrier: of the weight's gradient, as `ParamUse.gather` returns it; stored: the array as it is stored, or with hpZ
    the copy of it over the secondary axes, which backward takes from forward.

    use: of the weight. product: with it, whole.
    """

    use: ParamUse
    product: WeightProduct

    def __call__(self, carrier: jax.Array, stored: jax.Array, other: jax.Array) -> jax.Array:
        """The product, of the dtype that `dot` has."""
        def forward(carrier: jax.Array, stored: jax.Array, other: jax.Array) -> jax.Array:
            return _FORWARD.bind(stored, other, use=self, names=())

        call = jax.custom_vjp(forward)
        call.defvjp(lambda carrier, stored, other: (forward(carrier, stored, other), (stored, other)), self._backward)
        return call(carrier, stored, other)

    @property
    def sums_split_dim(self) -> bool | None:
        """Whether it sums over the dim of the weight that tensor parallelism splits; None where that splits none."""
        spec = compute_spec(self.use.stored, self.use.axes)
        split = next((dim for dim, entry in enumerate(spec) if entry is not None), None)
        return None if split is None else (
            self.product.order.index(self._true_dim(split)) in dot_dims(self.product.dot).contracted[self.product.side])

    @property
    def flops(self) -> float:
        """Of the forward product."""
        operand, (contracted, _) = self.product.dot.invars[0], dot_dims(self.product.dot)
        sizes = shape_of(operand).shape
        out = shape_of(self.product.dot.outvars[0]).shape
        return 2.0 * math.prod(out) * math.prod(sizes[dim] for dim in contracted[0])

    def forward(self, stored: jax.Array, other: jax.Array) -> jax.Array:
        """The product, in a loop over the tiles."""
        out, (of_other, of_out) = shape_of(self.product.dot.outvars[0]), self._dims
        # The sum of the tiles' products is in float32, as the product's own would be.
        dtype = jnp.promote_types(out.dtype, jnp.float32) if of_out is None else out.dtype
        stored = self._at_hand(stored)
        # XLA:CPU does not sum every product of bfloat16 in float32 (jax 0.10).
        wide = {} if self.use.axes.platform == "cpu" else {"preferred_element_type": dtype}

        def one_tile(index: Any, result: jax.Array) -> jax.Array:
            _, gathered = self._tile_use.gather(self._tile(stored, self._tiles.dim, index), is_copy=True)
            other_tile = self._tile(other, of_other, index)
            if of_out is None:
                return result + self.product.multiply(gathered, other_tile, **wide).astype(dtype)
            return self._put(result, self.product.multiply(gathered, other_tile), of_out, index)

        return jax.lax.fori_loop(0, self._tiles.count, one_tile, jnp.zeros(out.shape, dtype)).astype(out.dtype)

    def _backward(self, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[Any, None, jax.Array]:
        (of_other, of_out), stored, other = self._dims, self._at_hand(saved[0]), saved[1]
        use, reduced = self._tile_use, self.use.reduced  # None of a weight that is not trained
        dtype = jnp.promote_types(other.dtype, jnp.float32) if of_other is None else other.dtype

        def one_tile(index: Any, sums: Any) -> Any:
            of_weight, of_operand = sums
            carrier, gathered = use.gather(self._tile(stored, self._tiles.dim, index), is_copy=True)

            def product(carrier: jax.Array, other: jax.Array) -> jax.Array:
                return self.product.multiply(use.read(carrier, gathered), other)

            _, pullback = jax.vjp(product, carrier, self._tile(other, of_other, index))
            tile, part = pullback(self._tile(cotangent, of_out, index))
            of_weight = self._put(of_weight, tile, self._tiles.dim, index) if reduced is not None else None
            return of_weight, (of_operand + part.astype(dtype) if of_other is None
                               else self._put(of_operand, part, of_other, index))

        gradient = None if reduced is None else constrain(jnp.zeros(stored.shape, use.reduce), use.mesh, reduced)
        gradient, result = jax.lax.fori_loop(0, self._tiles.count, one_tile, (gradient, jnp.zeros(other.shape, dtype)))
        return gradient, None, result.astype(other.dtype)

    def _at_hand(self, stored: jax.Array) -> jax.Array:
        """`stored` as tiles are taken from it: of a layer in host memory a device's shard of it comes up first.

        XLA would take a slice of a slice of an array in host memory there, by the processor.
        """
        return self.use.on_device(stored) if self._tiles.of_slice else stored

    def _tile(self, value: jax.Array, dim: int | None, index: Any) -> jax.Array:
        """The part of `value` that belongs to a tile; all of it where `dim` is None."""
        if dim is None:
            return value
        size = value.shape[dim] // self._tiles.count
        return jax.lax.dynamic_slice_in_dim(value, index * size, size, dim)

    def _put(self, value: jax.Array, part: jax.Array, dim: int, index: Any) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(value, part.astype(value.dtype), index * part.shape[dim], dim)

    @property
    def _tiles(self) -> Tiles:
        assert self.use.tiles is not None
        return self.use.tiles

    @property
    def _tile_use(self) -> ParamUse:
        """How a tile is read: as the whole would be, since the dim that is cut is neither sharded nor padded."""
        codes = self.use.codes and self.use.codes.tile(self._tiles.dim, self._tiles.count)
        return dataclasses.replace(self.use, tiles=None, codes=codes)

    @property
    def _dims(self) -> tuple[int | None, int | None]:
        """The dims of the other operand and of the result along which tiles lie; None: each tile needs all of it."""
        return self.product.dims_beside(self._true_dim(self._tiles.dim))

    def _true_dim(self, stored_dim: int) -> int:
        return sum(len(group) for group in self.use.stored_shape.dims[:stored_dim])


def tiled_product(eqn: JaxprEqn) -> TiledProduct | None:
    """The product in tiles that `eqn` computes; its last operand is the one beside the weight."""
    eqns = call_jaxpr(eqn).eqns if primitive_of(eqn) == CUSTOM_VJP else [eqn]
    return next((own_use(each) for each in eqns if primitive_of(each) == TILED_PRODUCT), None)


_FORWARD = named_call(TILED_PRODUCT, lambda stored, other, use: use.forward(stored, other))
