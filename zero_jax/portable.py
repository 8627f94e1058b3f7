"""A state as a checkpoint holds it, by name and in true shapes, and back to how a step stores it.

Neither depends on the stage, on the mesh or on padding. The working copy of the parameters is not part of it: it is
made anew.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding

from zero_jax.choose import choose_spec
from zero_jax.digest import digest_texts, digests, dtype_name
from zero_jax.layout import Layout
from zero_jax.manifest import Leaf
from zero_jax.matrices import owned_stack
from zero_jax.state import ZeroState
from zero_jax.tree import named_leaves
from zero_jax.working_copy import working_copy


@dataclasses.dataclass(frozen=True)
class _Row:
    """A leaf of the state: as it is stored, its view, and the sharding that it has in its true shape."""

    stored: jax.ShapeDtypeStruct
    view: Any
    sharding: NamedSharding

    @property
    def is_key(self) -> bool:
        return jnp.issubdtype(self.stored.dtype, jax.dtypes.prng_key)

    @property
    def plain(self) -> bool:
        """Whether the stored leaf is the saved one."""
        return self.view.natural and not self.is_key


def portable_of(layout: Layout) -> "Portable":
    """The `Portable` of a layout, which lives as long as that: what it compiles is compiled once."""
    known = vars(layout)
    if "_portable" not in known:
        known["_portable"] = Portable(layout)
    return known["_portable"]


class Portable:
    """The two directions for the states of one layout; each compiles once."""

    def __init__(self, layout: Layout):
        self._layout = layout
        names = [name for name, _ in named_leaves(dataclasses.replace(layout.state, weights=None))]
        parts = zip(names, jax.tree.leaves(dataclasses.replace(layout.state, weights=None)),
                   jax.tree.leaves(dataclasses.replace(layout.views, weights=None)), strict=True)
        self.names = names
        """Of the leaves that are saved, in tree order; they may not be unique, which `manifest.check_names` tells."""
        self._rows = {}
        for name, leaf, view in parts:
            view = owned_stack(name, leaf.shape) or view
            self._rows[name] = _Row(leaf, view, self._true_sharding(leaf, view))
        self._treedef = jax.tree.structure(dataclasses.replace(layout.state, weights=None))
        self._packed: dict[tuple[str, ...], Any] = {}
        self._unpacked: dict[Any, Any] = {}

    def leaves(self, names: Iterable[str]) -> dict[str, Leaf]:
        """The named leaves' true shapes and dtypes."""
        return {name: Leaf(self._rows[name].view.shape, dtype_name(self._rows[name].stored.dtype)) for name in names}

    def pack(self, state: ZeroState, names: Iterable[str]) -> tuple[dict[str, jax.Array], dict[str, str]]:
        """(the named leaves of `state` in true shapes, keys as their data; their digests). Waits for the devices.

        A leaf without elements has a digest and no array.
        """
        chosen = tuple(names)
        flat = dict(zip(self.names, jax.tree.leaves(dataclasses.replace(state, weights=None)), strict=True))
        if chosen not in self._packed:
            self._packed[chosen] = jax.jit(lambda leaves: self._pack(chosen, leaves))
        changed, words = self._packed[chosen]({name: flat[name] for name in chosen})
        arrays = {name: changed.get(name, flat[name]) for name in chosen if math.prod(self._rows[name].view.shape)}
        return arrays, dict(zip(chosen, digest_texts(words), strict=True))

    def abstract(self, held: Mapping[str, Leaf]) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the `held` leaves of a checkpoint, in their dtypes, as they are to be read."""
        return {name: self._array(name, leaf) for name, leaf in held.items() if math.prod(leaf.shape)}

    def unpack(self, arrays: Mapping[str, jax.Array], held: Mapping[str, Leaf]) -> tuple[ZeroState, dict[str, str]]:
        """(the state from the arrays of all its leaves, the digests of what was read). Waits for the devices."""
        stored, words = self._run(arrays, held, store=True)
        weights = stored.pop("weights", None)
        leaves = [stored.get(name, arrays.get(name)) for name in self.names]
        state = jax.tree.unflatten(self._treedef, leaves)
        return dataclasses.replace(state, weights=weights), dict(zip(held, digest_texts(words), strict=True))

    def unpack_some(self, arrays: Mapping[str, jax.Array], held: Mapping[str, Leaf]
                    ) -> tuple[dict[str, jax.Array], dict[str, str]]:
        """(the arrays in true shapes, keys typed, dtypes this layout's; the digests of what was read)."""
        changed, words = self._run(arrays, held, store=False)
        return {name: changed.get(name, arrays.get(name)) for name in held}, dict(
            zip(held, digest_texts(words), strict=True))

    def tree(self, arrays: Mapping[str, jax.Array], kind: str) -> Any:
        """The part of the state that is called `kind`, as "params", from `arrays` by name."""
        part = getattr(self._layout.state, kind)
        return jax.tree.unflatten(
            jax.tree.structure(part), [arrays[f"{kind}/{name}"] for name, _ in named_leaves(part)])

    def _array(self, name: str, leaf: Leaf) -> jax.ShapeDtypeStruct:
        """The array that stands for a leaf in a checkpoint: of a key, its data."""
        row = self._rows[name]
        if row.is_key:
            return jax.eval_shape(jax.random.key_data, row.stored).update(sharding=row.sharding)
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=row.sharding)

    def _true_sharding(self, leaf: Any, view: Any) -> NamedSharding:
        if view.natural:
            return leaf.sharding
        layout = self._layout
        return NamedSharding(layout.mesh, choose_spec(view.shape, {a: layout.mesh.shape[a] for a in layout.axes}))

    def _pack(self, names: tuple[str, ...], leaves: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        true = {name: self._true(name, leaf) for name, leaf in leaves.items()}
        words = digests([true[name] for name in names], [self._rows[name].sharding for name in names])
        saved = {name: jax.random.key_data(leaf) if self._rows[name].is_key else leaf for name, leaf in true.items()}
        return {name: leaf for name, leaf in saved.items() if not self._rows[name].plain}, words

    def _true(self, name: str, leaf: Any) -> Any:
        row = self._rows[name]
        return leaf if row.view.natural else constrain(row.view.load(leaf), row.sharding)

    def _run(self, arrays: Mapping[str, jax.Array], held: Mapping[str, Leaf], *, store: bool) -> Any:
        key = (store, tuple((name, leaf.shape, leaf.dtype) for name, leaf in held.items()))
        if key not in self._unpacked:
            self._unpacked[key] = jax.jit(lambda arrays: self._unpack(arrays, held, store))
        return self._unpacked[key](dict(arrays))

    def _unpack(self, arrays: dict[str, Any], held: Mapping[str, Leaf], store: bool) -> tuple[dict[str, Any], Any]:
        """(what is not as it was read, the digests). Nothing is cast before its digest is taken."""
        true, changed = {}, {}
        for name, leaf in held.items():
            row = self._rows[name]
            empty = self._array(name, leaf)
            found = arrays[name] if name in arrays else jnp.zeros(empty.shape, empty.dtype)
            true[name] = jax.random.wrap_key_data(found, impl=_impl(row.stored)) if row.is_key else found
        words = digests(list(true.values()), [self._rows[name].sharding for name in true])
        for name, leaf in true.items():
            row = self._rows[name]
            leaf = leaf if row.is_key else leaf.astype(row.stored.dtype)
            if store and not row.view.natural:
                leaf = row.view.store(leaf)
            if not row.plain or name not in arrays or held[name].dtype != dtype_name(row.stored.dtype):
                changed[name] = constrain(leaf, row.stored.sharding if store else row.sharding)
            true[name] = leaf
        if store and self._layout.state.weights is not None:
            state = jax.tree.unflatten(self._treedef, [true[name] for name in self.names])
            copy = working_copy(jax.tree.map(constrain, state.params, self._layout.gradients), self._layout)
            changed["weights"] = jax.tree.map(constrain, copy, self._layout.shardings.weights)
        return changed, words


def _impl(key: jax.ShapeDtypeStruct) -> Any:
    """The implementation of an abstract typed key, as `jax.random.wrap_key_data` takes it."""
    found: list[Any] = []

    def look(key: jax.Array) -> jax.Array:
        found.append(jax.random.key_impl(key))
        return key

    jax.eval_shape(look, key)
    return found[0]
