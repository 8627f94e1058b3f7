"""Fragments: which part of the parameters the slices average after which step (streaming DiLoCo, section 2.1)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.layout.layout import Layout
from zero_jax.tree import named_leaves


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Part of a parameter as it is stored: the layers from `start` to `stop` along `dim`, or, without dim, all of it.

    elements: of the chunk on each device, sharded as gradients are at stage 1 or above; a complex number is two.
    spec: how it is sharded so.
    """

    elements: int
    spec: P
    dim: int | None = None
    start: int = 0
    stop: int = 0

    def of(self, value: jax.Array, offset: int = 0) -> jax.Array:
        """The chunk of a parameter, or of an array with `offset` dims before those of one; traceable."""
        return value if self.dim is None else jax.lax.slice_in_dim(value, self.start, self.stop, axis=self.dim + offset)

    def put(self, value: jax.Array, chunk: jax.Array, offset: int = 0) -> jax.Array:
        """`value` with `chunk` in the place of the chunk; traceable."""
        if self.dim is None:
            return chunk
        return jax.lax.dynamic_update_slice_in_dim(value, chunk, self.start, self.dim + offset)


MIN_PART = 1024
"""Elements that a device sends of a fragment in each iteration of a loop, at least: the last part is filled up with
fewer than 1 / MIN_PART of all, and less is sent sooner than an iteration's products begin."""

Fragment = Mapping[str, Chunk]
"""By the name of a parameter, the part of it that is averaged with this fragment."""


def fragments_of(layout: Layout, number: int) -> tuple[Fragment, ...]:
    """The parameters of a layout of stage 1 or above in `number` fragments.

    Of parameters that a loop of the model's stacks by layer each fragment gets as many layers; the others go, the
    largest first, to the fragment that is smallest yet. Raises ValueError where some fragment would be empty.
    """
    fragments: list[dict[str, Chunk]] = [{} for _ in range(number)]
    rest: list[tuple[str, Chunk]] = []
    for (name, leaf), sharding, shape in zip(
            named_leaves(layout.state.params), jax.tree.leaves(layout.gradients),
            jax.tree.leaves(layout.stored_shapes.params), strict=True):
        numbers = 2 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else 1
        elements, spec = numbers * math.prod(sharding.shard_shape(leaf.shape)), sharding.spec
        dim = shape.identity_dim(layout.reads[name].stacked)
        if dim is None or dim < len(spec) and spec[dim] is not None:
            rest.append((name, Chunk(elements, spec)))
            continue
        layers = leaf.shape[dim]
        for index, fragment in enumerate(fragments):
            start, stop = layers * index // number, layers * (index + 1) // number
            if start < stop:
                fragment[name] = Chunk(elements // layers * (stop - start), spec, dim, start, stop)
    for name, chunk in sorted(rest, key=lambda each: -each[1].elements):
        min(fragments, key=_elements)[name] = chunk
    if number > 1 and not all(fragments):
        most = sum(map(bool, fragments))
        raise UsageError(f"fragments={number}: the {len(named_leaves(layout.state.params))} parameters of the model, "
                         f"cut by layer where a loop stacks them, make {most}: give at most {most}.")
    return tuple(fragments)


def real_dtype(dtype: Any) -> Any:
    """That of the two numbers of a complex one; of others `dtype`."""
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def _elements(fragment: Fragment) -> int:
    return sum(chunk.elements for chunk in fragment.values())


def num_parts(iterations: int, fragment: Fragment) -> int:
    """In how many parts a fragment is sent beside a step with so many iterations of loops over layers: one in each.

    1 where there are none, or where parts would have fewer elements than `MIN_PART`.
    """
    return iterations if iterations and _elements(fragment) >= iterations * MIN_PART else 1


def due(number: int, *, every: int, fragments: int) -> int | None:
    """The fragment that is averaged once `number` steps are taken; None: none is.

    Each is averaged once in `every` steps, the last of them after a multiple of `every`, the others evenly before it.
    """
    offsets = {every * (index + 1) // fragments % every: index for index in range(fragments)}
    return offsets.get(number % every) if number else None
