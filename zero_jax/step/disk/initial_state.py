"""The first state of a run whose parameters are in files: what stays in memory, and what is made to be written."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import optax

from zero_jax.errors import UsageError, few
from zero_jax.jaxpr.one_layer import NotByLayer
from zero_jax.sharding.layout import Layout
from zero_jax.step.disk.init import InitialOptimizerState
from zero_jax.step.disk.leaf import chunks, layer_of, shard_bytes
from zero_jax.tree import map_named, named_leaves, split_named
from zero_jax.typing import Params


class ValuesByLeaf(Protocol):
    """Parameters, frozen ones and the like by name, as they are stored."""

    names: list[str]

    def __call__(self, names: Sequence[str]) -> dict[str, jax.Array]:
        """The leaves `names`, together."""
        ...

    def layer(self, name: str, index: int) -> jax.Array | str:
        """Layer `index` of a stack, or why it is not made so."""
        ...

    def why_whole(self, name: str) -> str:
        """Why `layer` does not make the layers of a stack; empty where it does."""
        ...


class InitialState:
    """The leaves of a state by name.

    Attributes:
        resident: those that stay in memory.
        whole_stacks: of parameters in files that are made whole, since they cannot be made layer by layer: why.
    """

    def __init__(self, layout: Layout, values: ValuesByLeaf, optimizer: optax.GradientTransformationExtraArgs,
                 copy: Callable[[Params], dict[str, jax.Array]], others: Mapping[str, Any], memory_bytes: int | None):
        """copy: of some parameters what the model reads. others: leaves that `values` may not have, by name.

        memory_bytes: of each device; None where that is not known. Raises ValueError where a stack that can only be
        made whole takes more.
        """
        self._layout, self._values = layout, values
        self._likes = dict(named_leaves(layout.state))
        self._leaf: tuple[str, Any] = "", None
        self._row: tuple[tuple[str, int], Any] = ("", 0), None
        self._casts: dict[Any, Callable[[Any], Any]] = {}
        self._moments = InitialOptimizerState(layout, optimizer, lambda name: self.whole(f"params/{name}"))
        self.whole_stacks = self._find_whole_stacks()
        self._check_fits(memory_bytes)
        self.resident: dict[str, Any] = dict(others)
        here = [name for name in self._likes if name not in layout.disk]
        for names in chunks((name for name in here if name in values.names), self._likes):
            self.resident |= values(names)
        for names in chunks((name for name in here if name.startswith("weights/")), self._likes):
            params = [f"params/{name.partition('/')[2]}" for name in names]
            absent = [name for name in params if name not in self.resident]
            made = {**self.resident, **(values(absent) if absent else {})}
            self.resident |= copy(self._tree({name: made[name] for name in params}))
        if small := [name for name in self._moments.names if name not in layout.disk]:
            self.resident |= self._moments(small)

    def _find_whole_stacks(self) -> dict[str, str]:
        layout = self._layout
        params = {f"params/{name}" for name in layout.disk_gradients} | {
            name if name.startswith("frozen/") else f"params/{name.partition('/')[2]}" for name in layout.disk_layers}
        stacks = [name for name in layout.disk if name in params or name.partition("/")[0] == "opt_state" and (
            any(name.endswith(each.removeprefix("params")) for each in params))]
        why = {name: self._why_whole(name) for name in sorted(stacks)}
        return {name: reason for name, reason in why.items() if reason}

    def _why_whole(self, name: str) -> str:
        if not name.startswith("opt_state/"):
            return self._values.why_whole(name)
        program = self._moments.layer_program(name)
        return program if isinstance(program, str) else ""

    def _check_fits(self, memory_bytes: int | None) -> None:
        for name, why in self.whole_stacks.items():
            if memory_bytes is not None and self._bytes(name) > memory_bytes:
                raise UsageError(
                    f"init with Offload(parameters=\"disk\"): all layers of {name} would be made at once, "
                    f"{self._bytes(name):,} bytes on each device, which has {memory_bytes:,}, since it {why}: make "
                    "each layer from a key of its own (nn.scan with split_rngs, nnx.vmap), or give init(params=...).")

    @property
    def warning(self) -> str:
        """Of the stacks that are made whole."""
        sizes = {name: self._bytes(name) for name in self.whole_stacks}
        largest = max(sizes, key=sizes.__getitem__)
        return (f"init makes all layers of {few(sizes, 3)} at once, of up to {sizes[largest]:,} bytes on each device "
                f"({largest}), since it {self.whole_stacks[largest]}.")

    def whole(self, name: str) -> Any:
        """A leaf as it is stored."""
        if name in self.resident:
            return self.resident[name]
        field, _, param = name.partition("/")
        if field == "opt_state":
            return self._moments([name])[name]
        source = name if field in ("frozen", "variables") else f"params/{param}"
        if self._leaf[0] != source:
            self._leaf = "", None  # before the next is made
            self._leaf = source, self.resident[source] if source in self.resident else self._values([source])[source]
        return self._leaf[1] if source == name else self._as(name, self._likes[name], self._leaf[1])

    def layer(self, name: str, index: int) -> Any:
        """Layer `index` of a stack as it is stored; None where it is to be taken of the whole."""
        field, _, param = name.partition("/")
        if name in self.resident:
            return None
        try:
            if field == "opt_state":
                found = self._moments.layer(name, index, lambda name: self._param_layer(f"params/{name}", index))
                return None if isinstance(found, str) else found
            source = name if field == "frozen" else f"params/{param}"
            row = self._param_layer(source, index)
        except NotByLayer:
            return None
        return row if source == name else self._as(name, layer_of(self._likes[name]), row)

    def _param_layer(self, name: str, index: int) -> Any:
        if self._row[0] != (name, index):
            row = self._values.layer(name, index)
            if isinstance(row, str):
                raise NotByLayer(row)
            self._row = (name, index), row
        return self._row[1]

    def _as(self, name: str, like: jax.ShapeDtypeStruct, value: Any) -> Any:
        """The average, or what the model reads, of a parameter or a layer of it."""
        key = like.dtype, like.sharding
        if key not in self._casts:
            self._casts[key] = jax.jit(lambda value: value.astype(like.dtype), out_shardings=like.sharding)
        return self._casts[key](value)

    def _tree(self, leaves: Mapping[str, Any]) -> Params:
        """Some of the parameters, by their names in the state, as a tree."""
        tree = split_named(self._layout.state.params, lambda name, _: f"params/{name}" in leaves)[0]
        return map_named(lambda name, _: leaves[f"params/{name}"], tree)

    def _bytes(self, name: str) -> int:
        return shard_bytes(self._likes[name])
