"""How parameters and optimizer state are sharded: which stay replicated, which have dims merged or padded."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.sharding.param_access import ParamAccess
from zero_jax.sharding.partition import (
    OWNED,
    SMALL_LEAF,
    SMALL_SHARE,
    Split,
    choose_spec,
    choose_stored_shape,
    parts_of,
)
from zero_jax.sharding.stored_optimizer import StoredPlacement, needs_shape
from zero_jax.sharding.stored_shape import StoredShape, identity_shape
from zero_jax.tree import ending, leaf_bytes, map_named, named_leaves


def partition_state(params: Any, optimizer: Any, sizes: Mapping[str, int],
                    reads: Mapping[str, ParamAccess], *, tiled: bool, splits: Mapping[str, Split]
                    ) -> tuple[Any, Any, Any, Any]:
    """How parameters and optimizer state are sharded: stored shapes and specs of the one, then of the other.

    splits: what tensor parallelism splits, by parameter. Dims are merged only where all that the optimizer does with
    the leaf is elementwise.
    """
    small = _small(params, sizes, reads, tiled, splits)
    state, axes = jax.eval_shape(optimizer.init, params), tuple(sizes)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params)}

    def choose(name: str, leaf: Any) -> tuple[StoredShape, P]:
        read, split = reads.get(name), splits.get(name)
        if name in small:
            return identity_shape(leaf.shape), choose_spec(leaf.shape, sizes, read, tiled=tiled, split=split)
        stored_shape, spec = choose_stored_shape(leaf.shape, sizes, read, tiled=tiled, split=split)
        if stored_shape in unmergeable:
            return choose_stored_shape(leaf.shape, sizes, read, tiled=tiled, merge=False, split=split)
        return stored_shape, spec

    def place(name: str, leaf: Any) -> tuple[StoredShape, P]:
        """A moment as the parameter whose name ends its own, also where many are stacked; others by their own shape."""
        if OWNED in name.split("/"):
            return identity_shape(leaf.shape), P(axes)
        owner = ending(name, shapes)
        if not owner or not jnp.issubdtype(leaf.dtype, jnp.number):
            return identity_shape(leaf.shape), choose_spec(leaf.shape, sizes, tiled=tiled)
        extra = len(leaf.shape) - len(shapes[owner])
        if extra < 0 or leaf.shape[extra:] != shapes[owner]:
            return choose_stored_shape(leaf.shape, sizes, tiled=tiled, merge=False)  # adafactor's factors, say
        (param_shape, spec), stack = chosen_by_name[owner], leaf.shape[:extra]
        return StoredShape((*((size,) for size in stack), *param_shape.dims),
                           (*stack, *param_shape.stored)), P(*[None] * extra, *spec)

    def update(grads: Any, state: Any, params: Any, value: Any) -> Any:
        return optimizer.init(params), optimizer.update(grads, state, params, value=value)

    def pick(tree: Any, index: int) -> Any:
        return jax.tree.map(lambda both: both[index], tree, is_leaf=lambda leaf: isinstance(leaf, tuple)
                            and len(leaf) == 2 and isinstance(leaf[0], StoredShape))

    unmergeable: set[StoredShape] = set()
    while True:
        chosen = map_named(choose, params)
        param_shapes, specs = pick(chosen, 0), pick(chosen, 1)
        chosen_by_name = {name: choose(name, leaf) for name, leaf in named_leaves(params)}
        placed = map_named(place, state)
        state_shapes, state_specs = pick(placed, 0), pick(placed, 1)
        if not any(stored_shape.merges for stored_shape in jax.tree.leaves(param_shapes)):
            return param_shapes, specs, state_shapes, state_specs

        placements, state_placements = (
            jax.tree.map(StoredPlacement, param_shapes), jax.tree.map(StoredPlacement, state_shapes))
        scalar = jax.ShapeDtypeStruct((), jnp.float32)

        def stored(leaf: Any, stored_shape: StoredShape) -> Any:
            return leaf.update(shape=stored_shape.stored)

        like = jax.tree.map(stored, params, param_shapes)
        needing_shape = needs_shape(
            update, (placements, state_placements, placements, StoredPlacement(identity_shape(()))),
            (state_placements, (placements, state_placements)),
            like, jax.tree.map(stored, state, state_shapes), like, scalar)
        if not (merged := {stored_shape for stored_shape in needing_shape if stored_shape.merges}):
            return param_shapes, specs, state_shapes, state_specs
        unmergeable |= merged


def _small(params: Any, sizes: Mapping[str, int], reads: Mapping[str, ParamAccess], tiled: bool,
           splits: Mapping[str, Split]) -> set[str]:
    """Names of the parameters that do not divide and stay replicated: the smallest, all of one size or none."""
    num_shards, leaves = math.prod(sizes.values()), named_leaves(params)
    bytes_left = SMALL_SHARE * sum(leaf_bytes(leaf.shape, leaf.dtype) for _, leaf in leaves) / num_shards
    by_size: dict[int, list[str]] = {}
    for name, leaf in leaves:
        spec = choose_spec(leaf.shape, sizes, reads.get(name), tiled=tiled, split=splits.get(name))
        if parts_of(spec, sizes) < num_shards:
            by_size.setdefault(leaf_bytes(leaf.shape, leaf.dtype), []).append(name)
    small: set[str] = set()
    for size, names in sorted(by_size.items()):
        bytes_left -= size * len(names)
        if size > SMALL_LEAF or bytes_left < 0:
            break
        small.update(names)
    return small
