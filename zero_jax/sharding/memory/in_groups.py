"""A pytree that is computed by several programs, so that no device holds all of what goes to host memory at once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.tree import leaf_bytes
from zero_jax.typing import Pytree

GROUP_BYTES = 2**28
"""Bytes on a device of the leaves that one program makes; a larger leaf has a program of its own."""


def in_groups(make: Callable[..., Pytree], like: Pytree, *, in_shardings: Any = None) -> Callable[..., Pytree]:
    """`make`, compiled as one program for each group of its leaves; `like`: them as `jax.ShapeDtypeStruct`s, sharded.

    Each program computes what its leaves need and no other: what several leaves share is computed for each of them.
    """
    leaves, treedef = jax.tree.flatten(like)
    groups = _groups([leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves])

    def compiled(group: Sequence[int]) -> Any:
        def some(*args: Any) -> list[Any]:
            made = jax.tree.leaves(make(*args))
            return [made[i] for i in group]

        options = {} if in_shardings is None else {"in_shardings": in_shardings}
        return jax.jit(some, out_shardings=[leaves[i].sharding for i in group], **options)

    def run(*args: Any) -> Pytree:
        made: list[Any] = [None] * len(leaves)
        for group in groups:
            for i, leaf in zip(group, jax.block_until_ready(compiled(group)(*args)), strict=True):
                made[i] = leaf
        return jax.tree.unflatten(treedef, made)

    return run


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of `sizes` in order, in groups of at most `GROUP_BYTES` unless one alone is more."""
    groups: list[list[int]] = []
    total = 0
    for i, size in enumerate(sizes):
        if not groups or total + size > GROUP_BYTES:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += size
    return groups
