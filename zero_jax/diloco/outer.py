"""The outer step: slices average how far they moved, and Nesterov's momentum moves all of them to the same place.

Source: arXiv 2311.08105, algorithm 1, lines 12 and 14. Outer parameters and momentum are sharded over the ZeRO axes at
every stage, so that each device sends its part alone, and are copies of each other in the slices.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.diloco.fragments import Fragment, real_dtype
from zero_jax.diloco.options import OuterOptions
from zero_jax.layout.slices import OUTER_SCOPE
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.tree import map_named, named_leaves
from zero_jax.typing import Params, Pytree
from zero_jax.views.spread import on_tensor

Store = Callable[[str, jax.Array], jax.Array]
"""`store(name, value)`: the parameters of all slices, as they are stored in slices, as the outer ones are stored."""


def stored_as(inner: Pytree, outer: Pytree) -> tuple[Store, Store]:
    """Between two ways of storing a parameter, (R, *inner) and (R, *outer): at stage 0 the first has no padding."""
    def between(given: dict[str, Any], wanted: dict[str, Any]) -> Store:
        return lambda name, value: value if given[name] == wanted[name] else (
            jax.vmap(lambda one: wanted[name].store(given[name].load(one)))(value))

    inner, outer = dict(named_leaves(inner)), dict(named_leaves(outer))
    return between(inner, outer), between(outer, inner)


@jax.named_scope(OUTER_SCOPE)
def mean_movement(params: Params, outer: Params, fragment: Fragment, axes: MeshAxes, dtype: Any, store: Store
                  ) -> dict[str, jax.Array]:
    """The outer gradient of a fragment: how far slices moved from the outer parameters, averaged over them.

    params: (slices, *shape) of each parameter. The difference is cast to `dtype`, of complex numbers both parts, summed
    so over the slices, and divided in float32. Returned as the outer parameters are sharded.
    """
    own, start, stacked, specs = _sharded_chunks(params, outer, fragment, axes, store)

    def total(own: Mapping[str, jax.Array], start: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.lax.psum(_moved(own, start, dtype), axes.slices)

    sum_slices = jax.shard_map(total, mesh=axes.mesh, in_specs=(stacked, specs), out_specs=specs, check_vma=False)
    return _means(sum_slices(own, start), start, axes)


@jax.named_scope(OUTER_SCOPE)
def movement_parts(params: Params, outer: Params, fragment: Fragment, axes: MeshAxes, dtype: Any, store: Store,
                   number: int) -> jax.Array:
    """What `mean_movement` sums, in equal parts: (number, devices, elements) in `dtype`, each device's own.

    Zeros fill the last part up.
    """
    own, start, stacked, specs = _sharded_chunks(params, outer, fragment, axes, store)

    def parts(own: Mapping[str, jax.Array], start: Mapping[str, jax.Array]) -> jax.Array:
        moved = _moved(own, start, dtype)
        flat = jnp.concatenate([moved[name].reshape(-1) for name in fragment])  # JAX sorts the names of a dict
        return jnp.pad(flat, (0, -flat.size % number)).reshape(number, 1, -1)

    of_devices = jax.shard_map(parts, mesh=axes.mesh, in_specs=(stacked, specs),
                               out_specs=P(None, axes.mesh.axis_names), check_vma=False)
    return of_devices(own, start)


@jax.named_scope(OUTER_SCOPE)
def sum_part(part: jax.Array, axes: MeshAxes) -> jax.Array:
    """One of `movement_parts`, (devices, elements), summed over the slices; in a `jax.shard_map` a device's rows."""
    if axes.slices in jax.sharding.get_abstract_mesh().manual_axes:
        return on_tensor(lambda own: jax.lax.psum(own, axes.slices), [P(axes.tensor)], P(axes.tensor), axes)(part)
    spec = P(axes.mesh.axis_names)
    return jax.shard_map(lambda own: jax.lax.psum(own, axes.slices), mesh=axes.mesh, in_specs=spec, out_specs=spec,
                         check_vma=False)(part)


@jax.named_scope(OUTER_SCOPE)
def mean_of_parts(summed: jax.Array, outer: Params, fragment: Fragment, axes: MeshAxes) -> dict[str, jax.Array]:
    """As `mean_movement`, of `movement_parts` after `sum_part`."""
    start, specs = _chunks(outer, fragment, 0), {name: chunk.spec for name, chunk in fragment.items()}
    shapes = {name: (*NamedSharding(axes.mesh, specs[name]).shard_shape(start[name].shape),
                     *(2,) * jnp.iscomplexobj(start[name])) for name in fragment}
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])

    def joined(parts: jax.Array) -> dict[str, jax.Array]:
        each = jnp.split(parts.reshape(-1)[:ends[-1]], ends[:-1])
        return {name: value.reshape(shapes[name]) for name, value in zip(shapes, each, strict=True)}

    by_name = jax.shard_map(joined, mesh=axes.mesh, in_specs=P(None, axes.mesh.axis_names), out_specs=specs,
                            check_vma=False)
    return _means(by_name(summed), start, axes)


def _sharded_chunks(params: Params, outer: Params, fragment: Fragment, axes: MeshAxes, store: Store
                    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, P], dict[str, P]]:
    """The chunks of a fragment, of the slices and of the outer parameters, and the specs of both."""
    specs = {name: chunk.spec for name, chunk in fragment.items()}
    stacked = {name: P(axes.slices, *spec) for name, spec in specs.items()}
    own = {name: constrain(value, NamedSharding(axes.mesh, stacked[name]))
           for name, value in _chunks(params, fragment, 1, store).items()}
    return own, _chunks(outer, fragment, 0), stacked, specs


def _moved(own: Mapping[str, jax.Array], start: Mapping[str, jax.Array], dtype: Any) -> dict[str, jax.Array]:
    """How far the slice of this device moved from the outer parameters; own: with a leading dim of 1.

    Complex numbers are two real ones along a last dim.
    """
    def parts(moved: jax.Array) -> jax.Array:
        return jnp.stack([moved.real, moved.imag], -1) if jnp.iscomplexobj(moved) else moved

    return {name: parts(start[name] - own[name][0].astype(start[name].dtype)).astype(dtype) for name in start}


def _means(summed: Mapping[str, jax.Array], start: Mapping[str, jax.Array], axes: MeshAxes) -> dict[str, jax.Array]:
    def mean(value: jax.Array, like: jax.Array) -> jax.Array:
        value = value.astype(real_dtype(like.dtype)) / axes.size(axes.slices)
        return jax.lax.complex(value[..., 0], value[..., 1]) if jnp.iscomplexobj(like) else value

    return {name: mean(value, start[name]) for name, value in summed.items()}


@jax.named_scope(OUTER_SCOPE)
def apply_movement(params: Params, outer: Mapping[str, Params], movement: Mapping[str, jax.Array], fragment: Fragment,
                   axes: MeshAxes, options: OuterOptions, stores: tuple[Store, Store]
                   ) -> tuple[Params, dict[str, Params]]:
    """(The slices' parameters, the outer state {"params", "momentum"}) after the outer optimizer took `movement`.

    Each slice keeps `options.kept` of its own parameters, and takes the rest from the outer ones.
    """
    start, momentum = _chunks(outer["params"], fragment, 0), _chunks(outer["momentum"], fragment, 0)
    new_momentum, new_outer, new_params = {}, {}, {}
    for name, gradient in movement.items():
        new_momentum[name] = velocity = options.momentum * momentum[name] + gradient
        update = gradient + options.momentum * velocity if options.nesterov else velocity
        new_outer[name] = start[name] - options.learning_rate * update
    for name, own in _chunks(params, fragment, 1, stores[0]).items():
        target = jnp.broadcast_to(new_outer[name][None], own.shape)
        kept: Any = options.kept
        mixed = kept * own.astype(target.dtype) + (1 - kept) * target if kept else target
        new_params[name] = constrain(mixed.astype(own.dtype), NamedSharding(
            axes.mesh, P(axes.slices, *fragment[name].spec)))
    return (_with_chunks(params, new_params, fragment, 1, stores),
            {"params": _with_chunks(outer["params"], new_outer, fragment, 0),
             "momentum": _with_chunks(outer["momentum"], new_momentum, fragment, 0)})


def _chunks(tree: Params, fragment: Fragment, offset: int, store: Store | None = None) -> dict[str, jax.Array]:
    leaves = dict(named_leaves(tree))
    return {name: chunk.of(leaves[name] if store is None else store(name, leaves[name]), offset)
            for name, chunk in fragment.items()}


def _with_chunks(tree: Params, chunks: Mapping[str, jax.Array], fragment: Fragment, offset: int,
                 stores: tuple[Store, Store] | None = None) -> Params:
    def put(name: str, leaf: jax.Array) -> jax.Array:
        if name not in chunks:
            return leaf
        if stores is None:
            return fragment[name].put(leaf, chunks[name], offset)
        store, restore = stores
        return restore(name, fragment[name].put(store(name, leaf), chunks[name], offset))

    return map_named(put, tree)
