"""The outer step: slices average how far they moved, and Nesterov's momentum moves all of them to the same place.

Source: arXiv 2311.08105, algorithm 1, lines 12 and 14. Outer parameters and momentum are sharded over the ZeRO axes at
every stage, so that each device sends its part alone, and are copies of each other in the slices.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.diloco.fragments import Fragment
from zero_jax.diloco.options import OuterOptions
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.slices import OUTER_SCOPE
from zero_jax.tree import map_named, named_leaves
from zero_jax.typing import Params, Pytree

Store = Callable[[str, jax.Array], jax.Array]
"""`store(name, value)`: the parameters of all slices, as they are stored in slices, as the outer ones are stored."""


def outer_dtype(dtype: Any) -> Any:
    """That of the outer parameters and momentum: float32, or what is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def stored_as(inner: Pytree, outer: Pytree) -> tuple[Store, Store]:
    """Between two ways of storing a parameter, (R, *inner) and (R, *outer): at stage 0 the first has no padding."""
    shapes = {name: (shape, other) for (name, shape), (_, other) in zip(
        named_leaves(inner), named_leaves(outer), strict=True)}

    def convert(name: str, value: jax.Array, *, back: bool) -> jax.Array:
        given, wanted = shapes[name][::-1] if back else shapes[name]
        if given == wanted:
            return value
        each: Callable[[Any], Any] = lambda one: wanted.store(given.load(one))  # noqa: E731
        return jax.vmap(each)(value)

    return (lambda name, value: convert(name, value, back=False)), (lambda name, value: convert(name, value, back=True))


@jax.named_scope(OUTER_SCOPE)
def mean_movement(params: Params, outer: Params, fragment: Fragment, axes: MeshAxes, dtype: Any, store: Store
                  ) -> dict[str, jax.Array]:
    """The outer gradient of a fragment: how far slices moved from the outer parameters, averaged over them.

    params: (slices, *shape) of each parameter. The difference is cast to `dtype`, summed so over the slices, and
    divided in float32. Returned as the outer parameters are sharded.
    """
    own, start = _pieces(params, fragment, 1, store), _pieces(outer, fragment, 0)
    num_slices, specs = axes.size(axes.slices), {name: piece.spec for name, piece in fragment.items()}
    stacked = {name: P(axes.slices, *spec) for name, spec in specs.items()}
    own = {name: constrain(value, NamedSharding(axes.mesh, stacked[name])) for name, value in own.items()}

    def total(own: Mapping[str, jax.Array], start: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        moved = {name: (start[name] - own[name][0].astype(start[name].dtype)).astype(dtype) for name in start}
        return jax.lax.psum(moved, axes.slices)

    sum_slices = jax.shard_map(total, mesh=axes.mesh, in_specs=(stacked, specs), out_specs=specs, check_vma=False)
    summed = sum_slices(own, start)
    return {name: value.astype(start[name].dtype) / num_slices for name, value in summed.items()}


@jax.named_scope(OUTER_SCOPE)
def apply_movement(params: Params, outer: Mapping[str, Params], movement: Mapping[str, jax.Array], fragment: Fragment,
                   axes: MeshAxes, options: OuterOptions, stores: tuple[Store, Store]
                   ) -> tuple[Params, dict[str, Params]]:
    """(The slices' parameters, the outer state {"params", "momentum"}) after the outer optimizer took `movement`.

    Each slice keeps `options.kept` of its own parameters, and takes the rest from the outer ones.
    """
    store, restore = stores
    start, momentum = _pieces(outer["params"], fragment, 0), _pieces(outer["momentum"], fragment, 0)
    new_momentum, new_outer, new_params = {}, {}, {}
    for name, gradient in movement.items():
        new_momentum[name] = velocity = options.momentum * momentum[name] + gradient
        update = gradient + options.momentum * velocity if options.nesterov else velocity
        new_outer[name] = start[name] - options.learning_rate * update
    for name, own in _pieces(params, fragment, 1, store).items():
        target = jnp.broadcast_to(new_outer[name][None], own.shape)
        kept: Any = options.kept
        mixed = kept * own.astype(target.dtype) + (1 - kept) * target if kept else target
        new_params[name] = constrain(mixed.astype(own.dtype), NamedSharding(
            axes.mesh, P(axes.slices, *fragment[name].spec)))
    return (_with_pieces(params, new_params, fragment, 1, stores),
            {"params": _with_pieces(outer["params"], new_outer, fragment, 0),
             "momentum": _with_pieces(outer["momentum"], new_momentum, fragment, 0)})


def _pieces(tree: Params, fragment: Fragment, offset: int, store: Store | None = None) -> dict[str, jax.Array]:
    leaves = dict(named_leaves(tree))
    return {name: piece.of(leaves[name] if store is None else store(name, leaves[name]), offset)
            for name, piece in fragment.items()}


def _with_pieces(tree: Params, pieces: Mapping[str, jax.Array], fragment: Fragment, offset: int,
                 stores: tuple[Store, Store] | None = None) -> Params:
    def put(name: str, leaf: jax.Array) -> jax.Array:
        if name not in pieces:
            return leaf
        if stores is None:
            return fragment[name].put(leaf, pieces[name], offset)
        store, restore = stores
        return restore(name, fragment[name].put(store(name, leaf), pieces[name], offset))

    return map_named(put, tree)
