"""How all parameters and the optimizer's state are divided: which stay whole, which merge or pad their dims."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.choose import OWNED, SMALL_LEAF, SMALL_SHARE, Split, choose_spec, choose_view, parts_of
from zero_jax.elementwise import Home, needs_shape
from zero_jax.reads import Read
from zero_jax.tree import ending, leaf_bytes, map_named, named_leaves
from zero_jax.view import View, natural


def divide(params: Any, optimizer: Any, sizes: Mapping[str, int],
           reads: Mapping[str, Read], *, tiled: bool, splits: Mapping[str, Split]) -> tuple[Any, Any, Any, Any]:
    """How parameters and the optimizer's state are divided: trees of views and of specs for either.

    splits: what tensor parallelism splits, by parameter. No dims are merged of a leaf that the optimizer does more with
    than an elementwise update.
    """
    small = _small(params, sizes, reads, tiled, splits)
    state, axes = jax.eval_shape(optimizer.init, params), tuple(sizes)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params)}

    def choose(name: str, leaf: Any) -> tuple[View, P]:
        read, split = reads.get(name), splits.get(name)
        if name in small:
            return natural(leaf.shape), choose_spec(leaf.shape, sizes, read, tiled=tiled, split=split)
        view, spec = choose_view(leaf.shape, sizes, read, tiled=tiled, split=split)
        if view in spoilt:
            view, spec = choose_view(leaf.shape, sizes, read, tiled=tiled, merge=False, split=split)
        return view, spec

    def place(name: str, leaf: Any) -> tuple[View, P]:
        """As the parameter whose name ends the moment's, also where many are stacked; by its own shape elsewhere."""
        if OWNED in name.split("/"):
            return natural(leaf.shape), P(axes)
        owner = ending(name, shapes)
        if not owner or not jnp.issubdtype(leaf.dtype, jnp.number):
            return natural(leaf.shape), choose_spec(leaf.shape, sizes, tiled=tiled)
        extra = len(leaf.shape) - len(shapes[owner])
        if extra < 0 or leaf.shape[extra:] != shapes[owner]:
            return choose_view(leaf.shape, sizes, tiled=tiled, merge=False)  # adafactor's factors, say
        (view, spec), stack = chosen_by_name[owner], leaf.shape[:extra]
        return View((*((size,) for size in stack), *view.dims), (*stack, *view.stored)), P(*[None] * extra, *spec)

    def update(grads: Any, state: Any, params: Any, value: Any) -> Any:
        return optimizer.init(params), optimizer.update(grads, state, params, value=value)

    def pick(tree: Any, index: int) -> Any:
        return jax.tree.map(lambda both: both[index], tree, is_leaf=lambda leaf: isinstance(leaf, tuple)
                            and len(leaf) == 2 and isinstance(leaf[0], View))

    spoilt: set[View] = set()
    while True:
        chosen = map_named(choose, params)
        views, specs = pick(chosen, 0), pick(chosen, 1)
        chosen_by_name = {name: choose(name, leaf) for name, leaf in named_leaves(params)}
        placed = map_named(place, state)
        state_views, state_specs = pick(placed, 0), pick(placed, 1)
        if not any(view.merges for view in jax.tree.leaves(views)):
            return views, specs, state_views, state_specs

        homes, state_homes, scalar = (
            jax.tree.map(Home, views), jax.tree.map(Home, state_views), jax.ShapeDtypeStruct((), jnp.float32))

        def stored(leaf: Any, view: View) -> Any:
            return leaf.update(shape=view.stored)

        like = jax.tree.map(stored, params, views)
        found = needs_shape(
            update, (homes, state_homes, homes, Home(natural(()))), (state_homes, (homes, state_homes)),
            like, jax.tree.map(stored, state, state_views), like, scalar)
        if not (found := {view for view in found if view.merges}):
            return views, specs, state_views, state_specs
        spoilt |= found


def _small(params: Any, sizes: Mapping[str, int], reads: Mapping[str, Read], tiled: bool,
           splits: Mapping[str, Split]) -> set[str]:
    """Parameters that do not divide and stay whole: too small to matter, the smallest first, equal ones alike."""
    ways, leaves = math.prod(sizes.values()), named_leaves(params)
    left = SMALL_SHARE * sum(leaf_bytes(leaf.shape, leaf.dtype) for _, leaf in leaves) / ways
    alike: dict[int, list[str]] = {}
    for name, leaf in leaves:
        spec = choose_spec(leaf.shape, sizes, reads.get(name), tiled=tiled, split=splits.get(name))
        if parts_of(spec, sizes) < ways:
            alike.setdefault(leaf_bytes(leaf.shape, leaf.dtype), []).append(name)
    found: set[str] = set()
    for size, names in sorted(alike.items()):
        left -= size * len(names)
        if size > SMALL_LEAF or left < 0:
            break
        found.update(names)
    return found
