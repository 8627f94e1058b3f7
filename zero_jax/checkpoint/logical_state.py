"""The logical state: leaves by name in their logical shapes, as a checkpoint stores them, from and to a step's layout.

It depends neither on the stage nor on the mesh nor on padding. The gathered compute parameters of stages 1 and 2 are
not part of it: `to_step` gathers them again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding

from zero_jax.checkpoint.manifest import Leaf
from zero_jax.layout.compute_params import gather_compute_params
from zero_jax.layout.layout import Layout
from zero_jax.sharding.checksum import digest_texts, digests, dtype_name
from zero_jax.sharding.host_arrays import HOST, copied_on_host, fetch, on_device, on_host, put_on_host
from zero_jax.sharding.partition import OWNED
from zero_jax.state import ZeroState
from zero_jax.tree import as_numbers, is_key, key_impl, map_named, named_leaves


@dataclasses.dataclass(frozen=True)
class Row:
    """A leaf of the state: as the step stores it, the mapping to its logical shape, and the sharding of the latter."""

    stored: jax.ShapeDtypeStruct
    shape: Any
    sharding: NamedSharding

    @property
    def plain(self) -> bool:
        """Whether the stored array is saved as it is."""
        return self.shape.is_identity and not is_key(self.stored)

    def saved(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        """The array that a checkpoint stores for it, as the manifest's `leaf` says: of a PRNG key, its data."""
        if is_key(self.stored):
            return jax.eval_shape(jax.random.key_data, self.stored).update(sharding=self.sharding)
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=self.sharding)

    def load(self, leaf: Any) -> Any:
        """The stored `leaf`, in device memory, in its logical shape; traceable."""
        return leaf if self.shape.is_identity else on_bits(
            lambda bits: constrain(self.shape.load(bits), on_device(self.sharding)), leaf)

    def store(self, leaf: Any) -> Any:
        """The inverse of `load`."""
        return leaf if self.shape.is_identity else on_bits(
            lambda bits: constrain(self.shape.store(bits), on_device(self.stored.sharding)), leaf)


def logical_state_of(layout: Layout) -> "LogicalState":
    """The `LogicalState` of a layout, cached on the layout: its conversions are compiled once."""
    attributes = vars(layout)
    if "_logical_state" not in attributes:
        attributes["_logical_state"] = LogicalState(layout)
    return attributes["_logical_state"]


class LogicalState:
    """Conversions between the states of one layout and logical arrays; alike leaves share a compiled program."""

    def __init__(self, layout: Layout):
        state, shapes = (dataclasses.replace(tree, weights=None) for tree in (layout.state, layout.stored_shapes))
        self._layout, self._treedef = layout, jax.tree.structure(state)
        self.names = [name for name, _ in named_leaves(state)]
        """Of the leaves that are saved, in tree order. They may not be unique: `manifest.check_names` refuses that."""
        self._rows = {}
        for name, leaf, shape in zip(self.names, jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
            shape = owned_stack(name, leaf.shape) or shape
            self._rows[name] = Row(leaf, shape, self._logical_sharding(leaf, shape))
        self._programs: dict[Any, Any] = {}

    def leaves(self, names: Iterable[str]) -> dict[str, Leaf]:
        """The named leaves' logical shapes and dtypes."""
        return {name: Leaf(self._rows[name].shape.shape, dtype_name(self._rows[name].stored.dtype)) for name in names}

    def from_leaves(self, flat: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, str]]:
        """(leaves of a state by name in logical shapes, PRNG keys as data; their digests). Blocks on the devices.

        A leaf without elements has a digest and no array. The arrays share no host memory with `flat`, which may be
        donated while they are written.
        """
        rows = tuple(self._rows[name] for name in flat)
        changed, words = self._program(("from", rows), functools.partial(_from_stored, rows))(list(flat.values()))
        arrays = {name: _own(leaf) if new is None else new
                  for (name, leaf), row, new in zip(flat.items(), rows, changed, strict=True)
                  if math.prod(row.shape.shape)}
        return arrays, dict(zip(flat, digest_texts(words), strict=True))

    def abstract(self, saved: Mapping[str, Leaf]) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the `saved` leaves of a checkpoint, in their dtypes, with the shardings to read them in."""
        return {name: self._rows[name].saved(leaf) for name, leaf in saved.items() if math.prod(leaf.shape)}

    def to_step(self, arrays: Mapping[str, jax.Array], saved: Mapping[str, Leaf]) -> tuple[ZeroState, dict[str, str]]:
        """(the state from the arrays of all its leaves, the digests of what was read). Blocks on the devices."""
        leaves, weights, digests = self._run(arrays, saved, weights=self._layout.state.weights is not None)
        state = jax.tree.unflatten(self._treedef, [leaves[name] for name in self.names])
        return dataclasses.replace(state, weights=weights), digests

    def to_leaves(self, arrays: Mapping[str, jax.Array], saved: Mapping[str, Leaf], *, store: bool = True
                  ) -> tuple[dict[str, jax.Array], dict[str, str]]:
        """As `to_step`, of some leaves by name, without the gathered parameters; store: False: in logical shapes."""
        leaves, _, digests = self._run(arrays, saved, store=store)
        return leaves, digests

    def tree(self, arrays: Mapping[str, jax.Array], kind: str) -> Any:
        """The part of the state that is called `kind`, as "params", from `arrays` by name."""
        return map_named(lambda name, _: arrays[f"{kind}/{name}"], getattr(self._layout.state, kind))

    def _logical_sharding(self, leaf: Any, shape: Any) -> NamedSharding:
        """Of what is stored as `leaf`, in the stored shape `shape`, in its logical shape."""
        if shape.is_identity:
            return leaf.sharding
        sharding = self._layout.true_sharding(shape, leaf)
        return on_host(sharding) if leaf.sharding.memory_kind == HOST else sharding

    def _program(self, key: Any, convert: Callable[..., Any]) -> Any:
        if key not in self._programs:
            self._programs[key] = jax.jit(convert)
        return self._programs[key]

    def _run(self, arrays: Mapping[str, jax.Array], saved: Mapping[str, Leaf], *, store: bool = True,
             weights: bool = False) -> tuple[dict[str, jax.Array], Any, dict[str, str]]:
        """(the leaves by name, stored or in logical shapes; the gathered parameters; the digests of what was read)."""
        rows = tuple(self._rows[name] for name in saved)
        likes = tuple(row.saved(leaf) for row, leaf in zip(rows, saved.values(), strict=True))
        key = store, tuple(saved) if weights else None, rows, likes
        read = [arrays.get(name) for name in saved]
        changed, copy, words = self._program(key, lambda read: self._convert(read, rows, likes, store, key[1]))(read)
        leaves: dict[str, Any] = {name: old if new is None else new
                                  for name, old, new in zip(saved, read, changed, strict=True)}
        return leaves, copy, dict(zip(saved, digest_texts(words), strict=True))

    def _convert(self, read: list[Any], rows: tuple[Row, ...], likes: tuple[jax.ShapeDtypeStruct, ...], store: bool,
                 names: tuple[str, ...] | None) -> tuple[list[Any], Any, Any]:
        """(what differs from what was read, else None; the copy of parameters; the digests).

        names: of all leaves of a state, of which the copy is made; None: without. Digests are computed before any cast.
        """
        logical, changed = [], []
        for row, like, array in zip(rows, likes, read, strict=True):
            array = jnp.zeros(like.shape, like.dtype) if array is None else fetch(array)
            logical.append(jax.random.wrap_key_data(array, impl=key_impl(row.stored)) if is_key(row.stored) else array)
        words = digests(logical, [row.sharding for row in rows])
        for number, (row, like) in enumerate(zip(rows, likes, strict=True)):
            leaf = logical[number] if is_key(row.stored) else logical[number].astype(row.stored.dtype)
            logical[number] = leaf = row.store(leaf) if store else leaf
            is_read = row.plain and read[number] is not None and like.dtype == row.stored.dtype
            sharding = row.stored.sharding if store else row.sharding
            changed.append(None if is_read else _placed(constrain(leaf, on_device(sharding)), row.stored))
        if names is None:
            return changed, None, words
        leaves = dict(zip(names, logical, strict=True))
        state = jax.tree.unflatten(self._treedef, [leaves[name] for name in self.names])
        copy = gather_compute_params(jax.tree.map(constrain, state.params, self._layout.gradients), self._layout)
        return changed, jax.tree.map(lambda leaf, like: _placed(constrain(leaf, on_device(like.sharding)), like),
                                     copy, self._layout.state.weights), words


def _from_stored(rows: tuple[Row, ...], leaves: list[Any]) -> tuple[list[Any], Any]:
    """(what is saved where it is not the stored array, else None; the digests)."""
    logical = [row.load(fetch(leaf)) for row, leaf in zip(rows, leaves, strict=True)]
    words = digests(logical, [row.sharding for row in rows])
    return [None if row.plain else _placed(as_numbers(leaf), row.stored)
            for row, leaf in zip(rows, logical, strict=True)], words


def _placed(leaf: Any, like: jax.ShapeDtypeStruct) -> Any:
    """`leaf` in host memory, where the layout stores `like` there."""
    sharding: Any = like.sharding
    return put_on_host(leaf) if sharding.memory_kind == HOST else leaf


def on_bits(move: Callable[[jax.Array], jax.Array], leaf: jax.Array) -> jax.Array:
    """`move(leaf)`, which only moves elements, on integers of the same bits.

    The partitioner moves elements between devices by sums with zeros, too: of floats -0.0 would become 0.0, subnormal
    numbers 0, and signalling NaNs quiet ones. Complex leaves, and those that are no floats, are moved as they are.
    """
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}.get(leaf.dtype.itemsize)
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or unsigned is None or (
            jnp.finfo(leaf.dtype).bits != 8 * leaf.dtype.itemsize):
        return move(leaf)
    return jax.lax.bitcast_convert_type(move(jax.lax.bitcast_convert_type(leaf, unsigned)), leaf.dtype)


def _own(leaf: jax.Array) -> jax.Array:
    return copied_on_host(leaf) if leaf.sharding.memory_kind == HOST else leaf


@dataclasses.dataclass(frozen=True)
class OwnedStack:
    """The state of `number` matrices, stored as a stack padded to shape `stored`: what `StoredShape` is for parameters.

    The padding depends on the number of devices and no update reads it: on restore it repeats the last matrix's state.
    """

    number: int
    stored: tuple[int, ...]
    is_identity = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the padding."""
        return (self.number, *self.stored[1:])

    def load(self, value: Any) -> Any:
        """The state of the matrices, of `shape`, from the stored stack; traceable."""
        return value[: self.number]

    def store(self, value: jax.Array) -> jax.Array:
        """The stack, of shape `stored`, from the state of the matrices; traceable."""
        last = jnp.broadcast_to(value[-1:], (self.stored[0] - self.number, *value.shape[1:]))
        return jnp.concatenate([value, last])


def owned_stack(name: str, stored: tuple[int, ...]) -> OwnedStack | None:
    """The `OwnedStack` of the state's leaf `name` of shape `stored`; None where the leaf is not a padded stack."""
    _, owned, rest = name.partition(f"/{OWNED}/")
    number = int(rest.split("x")[0]) if owned else 0
    return OwnedStack(number, stored) if owned and number < stored[0] else None
