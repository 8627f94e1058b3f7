"""A checksum of an array that does not depend on its sharding, computed on the devices that store it.

Each element's bits and its index in the array are mixed into 32 bits, in two lanes, and summed modulo 2^32. Integer
sums do not depend on the order, so each device sums its own shard and sends only two words per array. For a given index
the mixing is one to one: a change of a single element is always detected, any other with probability 1 - 2^-64. It
detects accidents and is no signature: whoever can write the files can compute it.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.sharding.partition import names_of

_LANES = ((0x85EBCA6B, 0xC2B2AE35), (0x7FEB352D, 0x846CA68B))
"""Multipliers of the two lanes: MurmurHash3's finaliser, and Wellons's `lowbias32`; odd, so that each is one to one."""


def digests(leaves: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> jax.Array:
    """The digest of each array as two words: uint32 (len(leaves), 2), replicated; traceable.

    Leaves are real, complex or boolean arrays, or typed PRNG keys, with the given `shardings`, all on one mesh. Shape
    and dtype are part of the digest.
    """
    if not leaves:
        return jnp.zeros((0, 2), jnp.uint32)
    mesh, specs = shardings[0].mesh, [sharding.spec for sharding in shardings]
    plain = [jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in leaves]
    seeds = [seed_of(leaf.shape, leaf.dtype) for leaf in leaves]
    spread = [tuple(names_of(spec)) for spec in specs]

    def each(*parts: jax.Array) -> jax.Array:
        words = [part_words(part, seed, leaf.shape, spec)
                 for part, seed, leaf, spec in zip(parts, seeds, plain, specs, strict=True)]
        for axes in sorted(set(spread)):  # one all-reduce for all leaves that are sharded over the same axes
            chosen = [i for i, other in enumerate(spread) if other == axes]
            summed = jax.lax.psum(jnp.stack([words[i] for i in chosen]), axes) if axes else [words[i] for i in chosen]
            for i, total in zip(chosen, summed, strict=True):
                words[i] = total
        return jnp.stack(words)

    words = jax.shard_map(each, mesh=mesh, in_specs=tuple(specs), out_specs=P(), check_vma=False)(*plain)
    return words + jnp.array([[seed, seed ^ 0xFFFFFFFF] for seed in seeds], jnp.uint32)


def digest_texts(words: Any) -> list[str]:
    """`digests` as 16 hexadecimal digits for each leaf; waits for the devices."""
    return [f"{int(first):08x}{int(second):08x}" for first, second in np.asarray(words)]


def dtype_name(dtype: Any) -> str:
    """A dtype as checkpoints name it: `bfloat16`; `key<fry>` for a typed PRNG key."""
    return str(dtype)


def seed_of(shape: tuple[int, ...], dtype: Any) -> int:
    """The contribution of shape and dtype to a digest, 32 bits."""
    return zlib.crc32(f"{dtype_name(dtype)}{list(shape)}".encode())


def part_words(part: jax.Array, seed: int, shape: tuple[int, ...], spec: P) -> jax.Array:
    """The sums over a device's `part` of an array of `shape`: uint32 (2,)."""
    starts = []
    for dim, size in enumerate(part.shape):
        entry = spec[dim] if dim < len(spec) else None
        number = jnp.zeros((), jnp.uint32) if entry is None else jax.lax.axis_index(entry).astype(jnp.uint32)
        starts.append(number * jnp.uint32(size))
    place, total = _place(part.shape, starts, shape), jnp.zeros(2, jnp.uint32)
    for number, bits in enumerate(_bits(part)):
        where = _mix(place + jnp.uint32((seed + number * 0x9E3779B9) % 2**32), *_LANES[1])
        lanes = _mix(bits ^ where, *_LANES[0]), _mix(bits + where, *_LANES[1])
        # Both lanes in one reduce: XLA:CPU rewrites a sum of one array into a tree, which is ten times slower.
        zero = jnp.zeros((), jnp.uint32)
        total += jnp.stack(jax.lax.reduce(
            lanes, (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(range(part.ndim))))
    return total


def _bits(leaf: jax.Array) -> list[jax.Array]:
    """The bits of each element as one or more uint32 arrays of the leaf's shape."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return [*_bits(leaf.real), *_bits(leaf.imag)]
    if leaf.dtype == jnp.bool_:
        return [leaf.astype(jnp.uint32)]
    if jnp.issubdtype(leaf.dtype, jnp.integer) and jnp.iinfo(leaf.dtype).bits < 8:
        return [leaf.astype(jnp.int8).astype(jnp.uint32)]
    if leaf.dtype.itemsize == 8:
        halves = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        return [halves[..., 0], halves[..., 1]]
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    return [jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)]


def _place(part: tuple[int, ...], starts: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """For each element of a part that begins at `starts` a word for its index in an array of `shape`.

    It is the row-major index; where that takes more than 32 bits, the lower part is mixed before the rest is added.
    """
    place, inner = jnp.zeros(part, jnp.uint32), 1
    for dim in range(len(shape) - 1, -1, -1):
        if inner * shape[dim] > 2**32:
            place, inner = _mix(place, *_LANES[0]), 1
        place += (jax.lax.broadcasted_iota(jnp.uint32, part, dim) + starts[dim]) * jnp.uint32(inner)
        inner *= shape[dim]
    return place


def _mix(word: jax.Array, first: int, second: int) -> jax.Array:
    """One to one on 32 bits, each bit of the result a function of all bits of `word`."""
    word = (word ^ (word >> 16)) * jnp.uint32(first)
    word = (word ^ (word >> 13)) * jnp.uint32(second)
    return word ^ (word >> 16)
