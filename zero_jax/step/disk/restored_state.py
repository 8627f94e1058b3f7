"""A state that is read from a checkpoint in pieces: what stays in memory, and what is read where it is written."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from zero_jax.step.disk.committed_state import leaves_together, stacked_leaves
from zero_jax.step.disk.leaf import chunks, layer_of
from zero_jax.step.disk.states import DiskStates
from zero_jax.tree import map_named, named_leaves, split_named
from zero_jax.typing import Params


class PiecesToRead(Protocol):
    """The leaves of a checkpoint as a step stores them."""

    def expect(self, together: Sequence[set[str]]) -> None:
        """Tells which stacks will be read layer by layer, and whose layers of one number in turn."""
        ...

    def leaves(self, names: Sequence[str]) -> dict[str, Any]:
        """The leaves `names`, together."""
        ...

    def leaf(self, name: str) -> jax.Array:
        """A leaf that is in files."""
        ...

    def layer(self, name: str, index: int) -> jax.Array:
        """Layer `index` of such a leaf."""
        ...

    def check(self) -> None:
        """Raises where what was read, all leaves by now, is not as it was saved."""
        ...


class RestoredState:
    """The leaves of a state by name, as `DiskStates.write_all` asks for them.

    Attributes:
        resident: those that stay in memory, and the copies that the model reads of such parameters.
    """

    def __init__(self, states: DiskStates, source: PiecesToRead, copy: Callable[[Params], dict[str, jax.Array]]):
        """copy: of some parameters what the model reads."""
        self._layout, self._source, self._stacks = states.layout, source, stacked_leaves(states)
        self._likes = dict(named_leaves(states.layout.state))
        self._layers: dict[str, jax.Array] = {}
        self._index = -1
        self._casts: dict[Any, Callable[[Any], Any]] = {}
        source.expect([{name for name in names if not name.startswith("weights/")}
                       for names in leaves_together(states)])
        here = [name for name in self._likes if name not in self._layout.disk and name != "disk"]
        self.resident = source.leaves([name for name in here if not name.startswith("weights/")])
        for names in chunks((name for name in here if name.startswith("weights/")), self._likes):
            params = {name: self.whole(name) for name in (f"params/{name.partition('/')[2]}" for name in names)}
            self.resident |= copy(self._tree(params))

    def whole(self, name: str) -> Any:
        """A leaf as it is stored."""
        if name in self.resident:
            return self.resident[name]
        if not name.startswith("weights/"):
            return self._source.leaf(name)
        return self._as(self._likes[name], self.whole(f"params/{name.partition('/')[2]}"))

    def layer(self, name: str, index: int) -> Any:
        """Layer `index` of a stack as it is stored; None where it is to be taken of the whole."""
        if name in self.resident or name not in self._stacks:
            return None
        if index != self._index:
            self._layers, self._index = {}, index
        if not name.startswith("weights/"):
            layer = self._source.layer(name, index) if name not in self._layers else self._layers[name]
            if name.startswith("params/"):  # of which the copy follows
                self._layers[name] = layer
            return layer
        param = f"params/{name.partition('/')[2]}"
        if param not in self._layers and param in self.resident:
            return None
        return self._as(layer_of(self._likes[name]), self.layer(param, index))

    def _as(self, like: jax.ShapeDtypeStruct, value: Any) -> Any:
        """What the model reads of a parameter or a layer of it."""
        key = like.dtype, like.sharding
        if key not in self._casts:
            self._casts[key] = jax.jit(lambda value: value.astype(like.dtype), out_shardings=like.sharding)
        return self._casts[key](value)

    def _tree(self, leaves: dict[str, Any]) -> Params:
        """Some of the parameters, by their names in the state, as a tree."""
        tree = split_named(self._layout.state.params, lambda name, _: f"params/{name}" in leaves)[0]
        return map_named(lambda name, _: leaves[f"params/{name}"], tree)
