"""The microbatches of a batch: examples are split, and each microbatch gets all of what is no example."""

from typing import Any

import jax
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.sharding.batch_layout import BatchLayout
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.tree import named_leaves
from zero_jax.typing import Batch, PRNGKey


class Microbatches:
    """The leaves of a batch, of tracers, by what microbatches make of them.

    Examples are cut so that each microbatch takes rows of every device. A typed key is folded with the microbatch's
    number. Everything else is the same for all.
    """

    def __init__(self, number: int, axes: MeshAxes, layout: BatchLayout, batch: Batch):
        self.number, self._axes = number, axes
        self._structure = jax.tree.structure(batch)
        self._leaves = [leaf for _, leaf in named_leaves(batch)]
        self._split = [layout.is_example(name, leaf) for name, leaf in named_leaves(batch)]

    def examples(self) -> list[Any]:
        """The examples, as (microbatches, rows, ...)."""
        return [self._cut(leaf) for leaf, split in zip(self._leaves, self._split, strict=True) if split]

    def _cut(self, leaf: jax.Array) -> jax.Array:
        by_device = leaf.reshape(self._axes.batch_shards, self.number, -1, *leaf.shape[1:]).swapaxes(0, 1)
        parts = by_device.reshape(self.number, -1, *leaf.shape[1:])
        return constrain(parts, NamedSharding(self._axes.mesh, P(None, self._axes.batch)))

    def one(self, examples: list[Any], index: Any) -> Batch:
        """The microbatch `index` of these `examples`."""
        parts = iter(examples)
        return self._structure.unflatten([
            next(parts) if split else _key_of(leaf, index) if is_key(leaf) else leaf
            for leaf, split in zip(self._leaves, self._split, strict=True)])


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is of typed keys."""
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_of(keys: PRNGKey, index: Any) -> PRNGKey:
    return jax.vmap(lambda key: jax.random.fold_in(key, index))(keys.reshape(-1)).reshape(keys.shape)
