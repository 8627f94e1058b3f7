"""Quantised messages and the reductions made of them: the values that a quantiser in NumPy has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.rounding import rounded

import zero_jax
from zero_jax import Communication
from zero_jax.gather.quantized.messages import GRADIENT_NAMES, BlockFormat, as_words, from_words, num_words
from zero_jax.gather.quantized.reduce import reduce_quantized
from zero_jax.sharding.mesh_axes import MeshAxes

VALUES = np.random.default_rng(0).normal(size=(3, 700)).astype(np.float32) * np.float32(10.0) ** np.arange(-3, 4, 3)[
    :, None].astype(np.float32)


@pytest.mark.parametrize("block", [16, 256])
@pytest.mark.parametrize("name", GRADIENT_NAMES)
def test_a_message_is_what_numpy_makes_of_it(name, block):
    """And negative control: blocks of another size have other values."""
    codes = BlockFormat(name, block)
    message = jax.jit(codes.encode)(VALUES)
    assert message.dtype == jnp.uint8 and message.shape == (3, codes.message_bytes(700))
    received = np.asarray(jax.jit(lambda message: codes.decode(message, 700, jnp.float32))(message))
    expected = np.stack([rounded(row, name, block) for row in VALUES])
    np.testing.assert_array_equal(received, expected)
    assert np.max(np.abs(received - VALUES) / np.abs(VALUES).max(1, keepdims=True)) <= codes.relative_error
    assert not np.array_equal(expected, np.stack([rounded(row, name, 128) for row in VALUES]))


@pytest.mark.parametrize("num_bytes", [2, 511, 512, 513, 1920])
def test_words_hold_the_bytes_in_rows(num_bytes):
    """As NumPy packs them; and negative control: neighbours are not in one word."""
    message = np.random.default_rng(2).integers(0, 256, (3, num_bytes), np.uint8)
    words = jax.jit(as_words)(message)
    assert words.dtype == jnp.uint32 and words.shape == (3, num_words(num_bytes)) and not words.shape[1] % 128
    assert 0 <= 4 * words.shape[1] - num_bytes < 512
    np.testing.assert_array_equal(jax.jit(from_words, static_argnums=1)(words, num_bytes), message)
    padded = np.pad(message, ((0, 0), (0, -num_bytes % 512)))
    quarters = padded.reshape(3, 4, -1).transpose(0, 2, 1)
    np.testing.assert_array_equal(words, np.ascontiguousarray(quarters).view("<u4")[..., 0])
    assert not np.array_equal(words, padded.view("<u4"))


def test_fp4_keeps_small_values_to_a_third():
    """Down to the half between its two smallest codes; and negative control: int4 has zeros of most of them."""
    values = np.concatenate([[1], np.geomspace(1.01 * 0.75 / 64, 1, 255) * np.resize([1, -1], 255)]).astype(np.float32)
    messages = {name: jax.jit(BlockFormat(name, 256).encode)(values) for name in ("fp4", "int4")}
    received = {name: np.asarray(jax.jit(lambda message, name=name: BlockFormat(name, 256).decode(
        message, 256, jnp.float32))(message)) for name, message in messages.items()}
    assert np.max(np.abs(received["fp4"] / values - 1)) < 0.34
    assert (received["int4"] == 0).mean() > 0.4
    assert messages["fp4"].shape == messages["int4"].shape == (256 / 2 + 2,)


@pytest.mark.parametrize("name", GRADIENT_NAMES)
def test_zeros_stay_and_what_is_not_finite_is_found(name):
    codes = BlockFormat(name, 16)
    rows = np.zeros((4, 32), np.float32)
    rows[1, 3], rows[2, 20], rows[3] = np.nan, -np.inf, 1e-40  # subnormal: a compiler may flush it
    received = np.asarray(jax.jit(lambda rows: codes.decode(codes.encode(rows), 32, jnp.float32))(rows))
    assert not received[0].any() and not received[3].any()
    assert not np.isfinite(received[1, 3]) and not np.isfinite(received[2, 20])
    assert not received[1, 16:].any() and not received[2, :16].any()  # the other blocks


def bytes_of(codes, values):
    return codes.message_bytes(values) / values


def test_messages_are_within_two_percent_of_the_codes():
    assert bytes_of(BlockFormat("int8", 256), 768 * 96) < 1.01
    assert bytes_of(BlockFormat("int4", 256), 768 * 96) < 0.508
    assert bytes_of(BlockFormat("int4", 256), 300) < 0.52  # two blocks of 150, and not of 256


REDUCTIONS = {
    "one hop": ((5,), 1, "int8", P(None, "data"), ()),
    "two hops": ((2, 4), 1, ("fp4", "int8"), P("data_1", "data_0"), ()),
    "int4 in both": ((2, 4), 1, "int4", P("data_1", "data_0"), ()),
    "odd": ((3, 2), 1, ("int8", "fp8"), P(None, ("data_0", "data_1")), ()),
    "inside is major": ((2, 3), 1, ("int8", "int4"), P(("data_0", "data_1")), ("data_0",)),
    "replicas": ((4,), 2, ("int8", "fp4"), P("data"), ()),
    "replicas, words": ((4,), 2, ("int8", "fp4"), P("data"), ()),  # as TPUs gather them
}


def varied(place, dims, sizes):
    """Every place that differs from `place` in `dims` alone, in the order of the mesh."""
    for at in np.ndindex(*(sizes[dim] for dim in dims)):
        new = dict(zip(dims, at, strict=True))
        yield tuple(new.get(dim, own) for dim, own in enumerate(place))


def summed(parts, mesh, spec, hops):
    """In NumPy, by the places of the mesh: the shard of the sum that each device has after all hops."""
    sizes, names = mesh.devices.shape, mesh.axis_names
    indices = jax.sharding.NamedSharding(mesh, spec).devices_indices_map(parts.shape[len(sizes):])
    scattered = [[names.index(name) for name in hop] for hop, _ in hops if "replica" not in hop]
    later = scattered[1] if len(scattered) > 1 else []

    def shard(value, place):
        return value[indices[mesh.devices[place]]].ravel()

    def send(values, hop):
        return rounded(values, hops[hop][1].name, hops[hop][1].block)

    held = {place: sum(send(np.concatenate([shard(parts[sender], owner) for owner in varied(place, later, sizes)]), 0)
                       for sender in varied(place, scattered[0], sizes)) for place in np.ndindex(sizes)}
    if later:
        own = {place: [*varied(place, later, sizes)].index(place) for place in held}
        held = {place: sum(send(np.split(held[sender], len(held) // len({tuple(np.delete(p, later)) for p in held}))[
            own[place]], 1) for sender in varied(place, later, sizes)) for place in held}
    if "replica" in names:
        copies = {place: [*varied(place, [names.index("replica")], sizes)] for place in held}
        held = {place: np.concatenate([
            send(sum(send(np.array_split(held[sender], len(of))[chunk], len(hops) - 1) for sender in of), len(hops) - 1)
            for chunk in range(len(of))]) for place, of in copies.items()}
    return held


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_reduction_is_what_numpy_makes_of_it(kind, monkeypatch):
    """And negative control: in other blocks it is another sum."""
    monkeypatch.setattr(MeshAxes, "is_tpu", kind.endswith("words"))
    data, replica, gradients, spec, hpz = REDUCTIONS[kind]
    mesh = zero_jax.make_mesh(data if len(data) > 1 else data[0], replica=replica)
    axes, every = MeshAxes.of(mesh), tuple(mesh.axis_names)
    hops = Communication(gradients=gradients, block=16).hops(axes, hpz)
    parts = np.random.default_rng(1).normal(size=(*mesh.devices.shape, 24, 120)).astype(np.float32)
    run = jax.jit(jax.shard_map(
        lambda own: reduce_quantized(own.reshape(24, 120), axes, spec, hops), mesh=mesh, in_specs=P(*every),
        out_specs=spec, check_vma=False))
    shards = {shard.device: np.asarray(shard.data).ravel() for shard in run(parts).addressable_shards}
    expected = summed(parts, mesh, spec, hops)
    off = np.concatenate([np.abs(shards[device] - expected[place]) for place, device in np.ndenumerate(mesh.devices)])
    # Sums of a hop are rounded in another order: a value halfway between two codes of the next hop may take the other.
    largest = max(np.abs(shard).max() for shard in expected.values())
    assert (off > 2e-6).mean() < 0.01 and off.max() <= 2 * hops[-1][1].relative_error * largest
    exact = parts.sum(tuple(range(len(every))))
    other = summed(parts, mesh, spec, [(hop, BlockFormat("int8", 48)) for hop, _ in hops])
    whole = np.concatenate([expected[place] for place in expected])
    assert (np.abs(whole - np.concatenate([other[place] for place in other])) > 2e-6).mean() > 0.5
    assert 1e-3 < np.abs(run(parts) - exact).max() < np.abs(exact).max()
