"""The logical state: leaves by name in their logical shapes, as a checkpoint stores them, from and to a step's layout.

It depends neither on the stage nor on the mesh nor on padding. The gathered compute parameters of stages 1 and 2 are
not part of it: `to_step` gathers them again.
"""

import dataclasses
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
from zero_jax.tree import key_impl, map_named, named_leaves


@dataclasses.dataclass(frozen=True)
class Row:
    """A leaf of the state: as the step stores it, the mapping to its logical shape, and the sharding of the latter."""

    stored: jax.ShapeDtypeStruct
    shape: Any
    sharding: NamedSharding

    @property
    def is_key(self) -> bool:
        """Whether it is a typed PRNG key."""
        return jnp.issubdtype(self.stored.dtype, jax.dtypes.prng_key)

    @property
    def plain(self) -> bool:
        """Whether the stored array is saved as it is."""
        return self.shape.is_identity and not self.is_key


def logical_state_of(layout: Layout) -> "LogicalState":
    """The `LogicalState` of a layout, cached on the layout: its conversions are compiled once."""
    attributes = vars(layout)
    if "_logical_state" not in attributes:
        attributes["_logical_state"] = LogicalState(layout)
    return attributes["_logical_state"]


class LogicalState:
    """Conversions between the states of one layout and logical arrays; each direction is compiled once."""

    def __init__(self, layout: Layout):
        self._layout = layout
        names = [name for name, _ in named_leaves(dataclasses.replace(layout.state, weights=None))]
        parts = zip(names, jax.tree.leaves(dataclasses.replace(layout.state, weights=None)),
                   jax.tree.leaves(dataclasses.replace(layout.stored_shapes, weights=None)), strict=True)
        self.names = names
        """Of the leaves that are saved, in tree order. They may not be unique: `manifest.check_names` refuses that."""
        self._rows = {}
        for name, leaf, shape in parts:
            shape = owned_stack(name, leaf.shape) or shape
            self._rows[name] = Row(leaf, shape, self._logical_sharding(leaf, shape))
        self._treedef = jax.tree.structure(dataclasses.replace(layout.state, weights=None))
        self._from_leaves_compiled: dict[tuple[str, ...], Any] = {}
        self._to_step_compiled: dict[Any, Any] = {}

    def leaves(self, names: Iterable[str]) -> dict[str, Leaf]:
        """The named leaves' logical shapes and dtypes."""
        return {name: Leaf(self._rows[name].shape.shape, dtype_name(self._rows[name].stored.dtype)) for name in names}

    def from_leaves(self, flat: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, str]]:
        """(leaves of a state by name in logical shapes, PRNG keys as data; their digests). Blocks on the devices.

        A leaf without elements has a digest and no array. The arrays share no host memory with `flat`, which may be
        donated while they are written.
        """
        chosen = tuple(flat)
        if chosen not in self._from_leaves_compiled:
            self._from_leaves_compiled[chosen] = jax.jit(lambda leaves: self._convert_from_leaves(chosen, leaves))
        changed, words = self._from_leaves_compiled[chosen](dict(flat))
        arrays = {name: changed[name] if name in changed else _own(flat[name])
                  for name in chosen if math.prod(self._rows[name].shape.shape)}
        return arrays, dict(zip(chosen, digest_texts(words), strict=True))

    def abstract(self, saved: Mapping[str, Leaf]) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the `saved` leaves of a checkpoint, in their dtypes, with the shardings to read them in."""
        return {name: self._array(name, leaf) for name, leaf in saved.items() if math.prod(leaf.shape)}

    def to_step(self, arrays: Mapping[str, jax.Array], saved: Mapping[str, Leaf]) -> tuple[ZeroState, dict[str, str]]:
        """(the state from the arrays of all its leaves, the digests of what was read). Blocks on the devices."""
        stored, words = self._run(arrays, saved, store=True, weights=self._layout.state.weights is not None)
        weights = stored.pop("weights", None)
        leaves = [stored.get(name, arrays.get(name)) for name in self.names]
        state = jax.tree.unflatten(self._treedef, leaves)
        return dataclasses.replace(state, weights=weights), dict(zip(saved, digest_texts(words), strict=True))

    def to_leaves(self, arrays: Mapping[str, jax.Array], saved: Mapping[str, Leaf]
                  ) -> tuple[dict[str, jax.Array], dict[str, str]]:
        """As `to_step`, of some leaves by name; without the gathered parameters."""
        stored, words = self._run(arrays, saved, store=True)
        return {name: stored.get(name, arrays.get(name)) for name in saved}, dict(
            zip(saved, digest_texts(words), strict=True))

    def to_arrays(self, arrays: Mapping[str, jax.Array], saved: Mapping[str, Leaf]
                  ) -> tuple[dict[str, jax.Array], dict[str, str]]:
        """(the arrays in logical shapes, PRNG keys typed, dtypes of this layout; the digests of what was read)."""
        changed, words = self._run(arrays, saved, store=False)
        return {name: changed.get(name, arrays.get(name)) for name in saved}, dict(
            zip(saved, digest_texts(words), strict=True))

    def row(self, name: str) -> Row:
        """How the leaf `name` is stored, and in which logical shape and sharding it is saved."""
        return self._rows[name]

    def tree(self, arrays: Mapping[str, jax.Array], kind: str) -> Any:
        """The part of the state that is called `kind`, as "params", from `arrays` by name."""
        part = getattr(self._layout.state, kind)
        return jax.tree.unflatten(
            jax.tree.structure(part), [arrays[f"{kind}/{name}"] for name, _ in named_leaves(part)])

    def _logical_sharding(self, leaf: Any, shape: Any) -> NamedSharding:
        """Of what is stored as `leaf`, in the stored shape `shape`, in its logical shape."""
        if shape.is_identity:
            return leaf.sharding
        sharding = self._layout.true_sharding(shape, leaf)
        return on_host(sharding) if leaf.sharding.memory_kind == HOST else sharding

    def _array(self, name: str, leaf: Leaf) -> jax.ShapeDtypeStruct:
        """The array that a checkpoint stores for a leaf: of a PRNG key, its data."""
        row = self._rows[name]
        if row.is_key:
            return jax.eval_shape(jax.random.key_data, row.stored).update(sharding=row.sharding)
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=row.sharding)

    def _convert_from_leaves(self, names: tuple[str, ...], leaves: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        logical = {name: self._logical(name, fetch(leaf)) for name, leaf in leaves.items()}
        words = digests([logical[name] for name in names], [self._rows[name].sharding for name in names])
        saved = {name: jax.random.key_data(leaf) if self._rows[name].is_key else leaf for name, leaf in logical.items()}
        return {name: self._placed(name, leaf) for name, leaf in saved.items() if not self._rows[name].plain}, words

    def _placed(self, name: str, leaf: Any) -> Any:
        """`leaf` in host memory, where the layout stores it there."""
        return put_on_host(leaf) if name in self._layout.host else leaf

    def _logical(self, name: str, leaf: Any) -> Any:
        row = self._rows[name]
        return leaf if row.shape.is_identity else on_bits(
            lambda bits: constrain(row.shape.load(bits), on_device(row.sharding)), leaf)

    def _run(self, arrays: Mapping[str, jax.Array], saved: Mapping[str, Leaf], *, store: bool, weights: bool = False
             ) -> Any:
        key = (store, weights, tuple((name, leaf.shape, leaf.dtype) for name, leaf in saved.items()))
        if key not in self._to_step_compiled:
            self._to_step_compiled[key] = jax.jit(lambda arrays: self._convert_to_step(arrays, saved, store, weights))
        return self._to_step_compiled[key](dict(arrays))

    def _convert_to_step(self, arrays: dict[str, Any], saved: Mapping[str, Leaf], store: bool, weights: bool
                         ) -> tuple[dict[str, Any], Any]:
        """(the arrays that differ from what was read, the digests). Digests are computed before any cast."""
        logical, changed = {}, {}
        for name, leaf in saved.items():
            row = self._rows[name]
            empty = self._array(name, leaf)
            array = fetch(arrays[name]) if name in arrays else jnp.zeros(empty.shape, empty.dtype)
            logical[name] = jax.random.wrap_key_data(array, impl=key_impl(row.stored)) if row.is_key else array
        words = digests(list(logical.values()), [self._rows[name].sharding for name in logical])
        for name, leaf in logical.items():
            row = self._rows[name]
            leaf = leaf if row.is_key else leaf.astype(row.stored.dtype)
            if store and not row.shape.is_identity:
                leaf = on_bits(
                    lambda bits, row=row: constrain(row.shape.store(bits), on_device(row.stored.sharding)), leaf)
            if not row.plain or name not in arrays or saved[name].dtype != dtype_name(row.stored.dtype):
                changed[name] = self._placed(
                    name, constrain(leaf, on_device(row.stored.sharding if store else row.sharding)))
            logical[name] = leaf
        if weights:
            state = jax.tree.unflatten(self._treedef, [logical[name] for name in self.names])
            copy = gather_compute_params(jax.tree.map(constrain, state.params, self._layout.gradients), self._layout)
            changed["weights"] = map_named(lambda name, leaf, sharding: self._placed(
                f"weights/{name}", constrain(leaf, on_device(sharding))), copy, self._layout.shardings.weights)
        return changed, words


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
