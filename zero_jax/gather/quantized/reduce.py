"""Quantised reduction of gradients (qgZ of ZeRO++, arXiv 2306.10209, section 3.3): all-to-alls of codes, float32 sums.

A ring that adds in every hop would quantise as often as it has devices. Instead each device sends each other one the
codes of its part, and adds what it gets in float32: one rounding for each hop, inside a node, then across nodes.
"""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zero_jax.gather.quantized.messages import BlockFormat, as_words, from_words
from zero_jax.gather.quantized.policy import Hop
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.partition import axes_by_dim
from zero_jax.typing import AxisNames


def reduce_quantized(value: jax.Array, axes: MeshAxes, spec: P, hops: Sequence[Hop]) -> jax.Array:
    """As `reduce_scatter.reduce_parts`: the sum of the devices' `value`s, of which each returns its shard by `spec`.

    hops: as `Codes.hops` gives them; together they are all axes of `spec` but for `axes.tensor`.
    """
    size = axes.mesh.shape
    entries = [tuple(axis for axis in names if axis != axes.tensor) for names in axes_by_dim(spec, value.ndim)]
    local = [dim // math.prod(size[axis] for axis in entry) for dim, entry in zip(value.shape, entries, strict=True)]

    # First, the parts of all devices: (the axes of each hop, the first hop's before the next's, values of a shard).
    order = [axis for hop_axes, _ in hops for axis in hop_axes if any(axis in entry for entry in entries)]
    shape: list[int] = []
    places: dict[str | int, int] = {}
    for dim, (entry, part) in enumerate(zip(entries, local, strict=True)):
        for name, length in (*((axis, size[axis]) for axis in entry), (dim, part)):
            places[name] = len(shape)
            shape.append(length)
    permutation = [places[name] for name in (*order, *range(value.ndim))]
    parts = jnp.transpose(value.reshape(shape), permutation).reshape(-1, math.prod(local))

    # Second, one hop after another.
    for hop_axes, codes in hops:
        if hop_axes[0] in order:
            parts = _scatter(parts.reshape(math.prod(size[axis] for axis in hop_axes), -1), hop_axes, codes)
            parts = parts.reshape(-1, math.prod(local))
        else:
            parts = _all_reduce(
                parts[0], hop_axes, math.prod(size[axis] for axis in hop_axes), codes, words=axes.is_tpu)[None]
    return parts.reshape(local).astype(value.dtype)


def sent_bytes(num_values: int, axes: MeshAxes, hops: Sequence[Hop]) -> Iterator[tuple[AxisNames, int]]:
    """For each hop its axes, and the bytes that a device sends for a gradient of which it keeps `num_values`."""
    remaining = axes.zero_size
    for hop_axes, codes in hops:
        devices = axes.size(*hop_axes)
        if axes.replica in hop_axes and axes.replica not in axes.zero:
            yield hop_axes, 2 * (devices - 1) * codes.message_bytes(math.ceil(num_values / devices))
        else:
            remaining //= devices
            yield hop_axes, (devices - 1) * codes.message_bytes(remaining * num_values)


def _scatter(parts: jax.Array, hop_axes: AxisNames, codes: BlockFormat) -> jax.Array:
    """The sum over the devices of this device's row of `parts`, (devices of the hop, values), in float32."""
    messages = jax.lax.all_to_all(codes.encode(parts), hop_axes, 0, 0, tiled=True)
    return jnp.sum(codes.decode(messages, parts.shape[1], jnp.float32), axis=0)


def _all_reduce(values: jax.Array, hop_axes: AxisNames, num_devices: int, codes: BlockFormat, *, words: bool
                ) -> jax.Array:
    """The sum of the devices' `values`: scattered, and gathered from messages, so that all decode the same."""
    padded = jnp.pad(values, (0, -values.size % num_devices)).reshape(num_devices, -1)
    message = codes.encode(_scatter(padded, hop_axes, codes))
    messages = jax.lax.all_gather(message if not words else as_words(message), hop_axes)
    messages = messages if not words else from_words(messages, message.shape[-1])
    return codes.decode(messages, padded.shape[1], jnp.float32).reshape(-1)[:values.size]
