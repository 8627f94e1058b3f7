"""Digests: against a twin in numpy, the same for every sharding, and no change of bits goes unseen."""

import math
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.sharding.checksum import digest_texts, digests

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "int16", "int8", "uint8", "bool",
          "complex64")
LANES = ((0x85EBCA6B, 0xC2B2AE35), (0x7FEB352D, 0x846CA68B))


def mesh_of(*sizes):
    names = ("data_0", "data_1")[:len(sizes)] if len(sizes) > 1 else ("data",)
    return Mesh(np.array(jax.devices()[:int(np.prod(sizes))]).reshape(sizes), names)


FLAT, TORUS, ONE, WHOLE = mesh_of(8), mesh_of(4, 2), mesh_of(1), P()


def digest(value, mesh=ONE, spec=WHOLE):
    sharding = NamedSharding(mesh, spec)
    return digest_texts(jax.jit(lambda leaf: digests([leaf], [sharding]))(jax.device_put(value, sharding)))[0]


def many(values, mesh=ONE, spec=WHOLE):
    """Digests of arrays alike, in one compiled call each of all."""
    sharding = NamedSharding(mesh, spec)
    compiled = jax.jit(lambda leaf: digests([leaf], [sharding]))
    return [digest_texts(compiled(jax.device_put(value, sharding)))[0] for value in values]


def mix(word, first, second):
    word = ((word ^ (word >> 16)) * first) % 2**32
    word = ((word ^ (word >> 13)) * second) % 2**32
    return word ^ (word >> 16)


def twin(value, dtype=None):
    """The digest by Python's integers, element by element."""
    dtype = dtype or str(value.dtype)
    shape = value.shape if not dtype.startswith("key") else value.shape[:-1]
    seed = zlib.crc32(f"{dtype}{list(shape)}".encode())
    if value.dtype.kind == "c":
        parts = [value.real.view("u4"), value.imag.view("u4")]
    elif value.dtype.itemsize == 8:
        words = value.reshape(*value.shape, 1).view("<u4")
        parts = [words[..., 0], words[..., 1]]
    else:
        parts = [value.view(f"u{value.dtype.itemsize}")]
    totals = [seed, seed ^ 0xFFFFFFFF]
    for number, part in enumerate(parts):
        for place, bits in enumerate(part.ravel().tolist()):
            where = mix((place + seed + number * 0x9E3779B9) % 2**32, *LANES[1])
            totals[0] += mix(bits ^ where, *LANES[0])
            totals[1] += mix((bits + where) % 2**32, *LANES[1])
    return "".join(f"{total % 2**32:08x}" for total in totals)


def value_of(dtype, shape, seed=0):
    """Random bits as an array of numpy, or of ml_dtypes."""
    dtype, rng = jnp.dtype(dtype), np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_twins_and_the_same_for_every_sharding(dtype):
    value = value_of(dtype, (8, 16))
    expected = twin(value)
    for mesh, spec in ((ONE, P()), (FLAT, P("data")), (TORUS, P("data_1", "data_0"))):
        assert digest(value, mesh, spec) == expected, spec
    assert digest(np.roll(value, 1), FLAT, P("data")) != expected


@pytest.mark.parametrize("mesh, spec", [
    (FLAT, P()), (FLAT, P(None, "data")), (TORUS, P(("data_0", "data_1"))), (TORUS, P(("data_1", "data_0"), None)),
    (TORUS, P("data_0", "data_1")), (TORUS, P(None, "data_1")), (mesh_of(2), P("data"))])
def test_shardings(mesh, spec):
    value = value_of("float32", (8, 16))
    assert digest(value, mesh, spec) == twin(value)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (0, 3), (3, 5, 7), (2, 1, 2, 1, 3)])
def test_shapes(shape):
    assert digest(value_of("float32", shape)) == twin(value_of("float32", shape))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 3)
    assert digest(keys, FLAT) == twin(np.asarray(jax.random.key_data(keys)), str(keys.dtype))


def test_64_bits():
    with jax.enable_x64():
        for dtype in ("float64", "int64"):
            value = value_of(dtype, (8, 3))
            assert digest(value) == digest(value, FLAT, P("data")) == twin(value)
            flipped = value.copy()
            flipped.view(np.uint8).flat[13] ^= 4
            assert digest(flipped) != digest(value)


def test_shape_and_dtype_are_part_of_it():
    zeros = [jnp.zeros(shape, dtype) for dtype in ("float32", "int32", "bfloat16") for shape in (
        (4,), (2, 2), (1, 4), (0,), (0, 2), (), (5,))]
    assert len({digest(value) for value in zeros}) == len(zeros)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_every_flip_of_one_bit_is_seen(dtype):
    value = value_of(dtype, (4, 8), seed=1)
    flipped = []
    for byte in range(value.nbytes):
        for bit in range(8):
            other = value.copy()
            other.view(np.uint8).flat[byte] ^= 1 << bit
            flipped.append(other)
    found = many([value, *flipped], mesh_of(4), P("data"))
    # Pairs of them, too: none is another's.
    assert len(set(found)) == len(found) == value.nbytes * 8 + 1


def weak_sum(values):
    """What a plain sum of the words would tell: the check above must catch it."""
    return [int(value.view(np.uint32).astype(np.uint64).sum() % 2**32) for value in values]


def test_a_sum_without_places_would_be_found_out():
    value = value_of("float32", (4, 8), seed=1)
    pair = value.copy()
    pair.view(np.uint32).flat[[3, 4]] ^= 1 << 31  # two signs
    swapped = value.copy()
    swapped.flat[[0, 1]] = swapped.flat[[1, 0]]
    assert len(set(weak_sum([value, pair, swapped]))) == 1
    assert len(set(many([value, pair, swapped]))) == 3


def test_random_damage_of_a_large_array_is_seen():
    rng, value = np.random.default_rng(0), value_of("float32", (512, 256))
    damaged = [value]
    for kind in range(48):
        other = value.copy()
        raw = other.view(np.uint8).reshape(-1)
        if kind % 4 == 0:
            raw[rng.integers(raw.size)] ^= 1 << rng.integers(8)
        elif kind % 4 == 1:
            start = rng.integers(raw.size - 4096)
            raw[start : start + 4096] = 0
        elif kind % 4 == 2:
            a, b = rng.integers(0, 512, 2)
            other[[a, b]] = other[[b, (a + 1) % 512 if a == b else a]]
        else:
            other.view(np.uint32)[rng.integers(0, 512, 2), rng.integers(0, 256, 2)] ^= 1 << 31
        damaged.append(other)
    found = many(damaged, FLAT, P("data"))
    assert found.count(found[0]) == 1


def test_signs_of_zero_and_payloads_of_nan_are_seen():
    words = np.array([[0], [0x80000000], [0x7FC00000], [0x7FC00001], [0xFFC00000], [0x7F800001]], np.uint32)
    assert len(set(many(list(words.view(np.float32))))) == len(words)


def collectives(text):
    """(operation, elements of its largest result) of each collective in compiled text."""
    found = []
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-\\w+"
    for result, kind in re.findall(rf"= (.*?) ({kinds})\S*\(", text):
        sizes = [math.prod(int(size) for size in dims.split(",") if size)
                 for dims in re.findall(r"\[([\d,]*)\]", result)]
        found.append((kind, max(sizes)))
    return found


def test_nothing_but_sums_of_words_crosses_the_wire():
    shardings = [NamedSharding(FLAT, spec) for spec in (P("data"), P(None, "data"), P())]
    leaves = [jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=sharding) for sharding in shardings]
    text = jax.jit(lambda *leaves: digests(leaves, shardings)).lower(*leaves).compile().as_text()
    assert {kind for kind, _ in collectives(text)} == {"all-reduce"}
    assert max(size for _, size in collectives(text)) <= 2 * len(leaves)
    # The control: a sum over a whole copy is seen as a gather of the leaf.
    text = jax.jit(lambda leaf: jax.lax.with_sharding_constraint(leaf, NamedSharding(FLAT, P())) + 1).lower(
        leaves[0]).compile().as_text()
    assert ("all-gather", 64 * 128) in collectives(text)


def test_no_leaves():
    assert digest_texts(digests([], [])) == []
