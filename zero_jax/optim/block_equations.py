"""Equations of an elementwise update on one block of a device's shard, inside of a `shard_map`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import JaxprEqn, bind_in_scope, primitive_of, scope_of, shape_of
from zero_jax.jaxpr.primitives import BROADCAST, IOTA, iota_dim


def bind_on_block(eqn: JaxprEqn, values: Sequence[Any], *, spec: P, shape: tuple[int, ...], start: Sequence[Any],
                  sizes: tuple[int, ...]) -> Sequence[Any]:
    """The results of `eqn` for the block of `sizes` at `start` of a shard.

    spec: how the whole array is sharded. shape: of a device's shard.
    """
    primitive = primitive_of(eqn)
    if primitive not in (BROADCAST, IOTA):
        return bind_in_scope(eqn, values)
    with jax.named_scope(scope_of(eqn)):
        if primitive == BROADCAST:
            return [jnp.broadcast_to(values[0], sizes)]
        dim, dtype = iota_dim(eqn), shape_of(eqn.outvars[0]).dtype
        entry = spec[dim] if dim < len(spec) else None
        first = 0 if entry is None else jax.lax.axis_index(entry) * shape[dim]
        return [jax.lax.broadcasted_iota(dtype, sizes, dim) + jnp.asarray(first + start[dim], dtype)]
