"""Values that a user has for a model, put where they are stored leaf by leaf, and of stacks layer by layer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.sharding.layout import Layout
from zero_jax.sharding.shard_reader import UnreadLeaf
from zero_jax.step.disk.leaf import layer_of
from zero_jax.step.start import place
from zero_jax.tree import named_leaves


class GivenLeaves:
    """As `InitialValues`, of values in true shapes that are somewhere already: arrays, or in a file."""

    def __init__(self, layout: Layout, given: Mapping[str, Any]):
        """given: what `checked_values` returns: a value for each parameter, and for some of the variables, by name."""
        state = {field: getattr(layout.state, field) for field in ("params", "frozen", "variables")}
        leaves = {name: leaf for name, leaf in named_leaves(state) if name.partition("/")[2] in given
                  and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)}
        self._likes, self._shapes = leaves, dict(named_leaves(layout.stored_shapes))
        self._given = {name: given[name.partition("/")[2]] for name in leaves}
        self.names = list(leaves)

    def __call__(self, names: Sequence[str]) -> dict[str, jax.Array]:
        """The leaves `names`."""
        return {name: place(self._given[name], self._shapes[name], self._likes[name]) for name in names}

    def layer(self, name: str, index: int) -> jax.Array | str:
        """Layer `index` of a stack as it is stored."""
        value, shape = self._given[name], self._shapes[name]
        value = layer_to_read(value, index) if isinstance(value, UnreadLeaf) else value[index]
        return place(value, shape.drop_dim(0), layer_of(self._likes[name]))

    def why_whole(self, name: str) -> str:
        """Empty: every stack has layers."""
        return ""


def layer_to_read(leaf: UnreadLeaf, index: int) -> UnreadLeaf:
    """Layer `index` of a stack that is read part by part."""
    def opened() -> Any:
        read = leaf.open()
        return lambda at: read((slice(index, index + 1), *at))[0]

    return dataclasses.replace(leaf, shape=leaf.shape[1:], open=opened)
