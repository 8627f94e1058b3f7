"""Mixtures as global batches: their shares, epochs and resumption, the same on any devices; images."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.data.batches import ExampleBatches
from zero_jax.data.documents import Documents
from zero_jax.data.images import LabeledImages, digits, load_images
from zero_jax.data.mixture import Mixture
from zero_jax.data.objectives import masked_language
from zero_jax.data.packing import DocumentRows, Windows

pytest.importorskip("grain")


def documents(number, first=0):
    lengths = np.random.default_rng(number).integers(2, 30, number)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Documents(np.arange(offsets[-1]) + first, offsets)


def make(**options):
    def mask(row, key):
        return {**row, **masked_language(row["inputs"], key, mask_id=3, replacements=np.arange(9),
                                         candidates=row["segment_ids"] > 0)}

    sources = [DocumentRows(documents(n, first), 16, pack=True, causal=False) for n, first in ((90, 0), (200, 10_000))]
    return ExampleBatches(sources, **{"batch_size": 8, "weights": (0.25, 0.75), "seed": 3, "make": mask, **options})


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            np.testing.assert_array_equal(np.asarray(batch[name]), np.asarray(other[name]), name)


def test_the_shares_and_epochs_of_a_mixture():
    mixture = Mixture([150, 70, 200], weights=[0.2, 0.3, 0.5], seed=1)
    places = [mixture[i] for i in range(450)]
    for start in (0, 37, 300):
        shares = np.bincount([source for source, _ in places[start:start + 100]]) / 100
        assert abs(shares - [0.2, 0.3, 0.5]).max() <= 0.01
    assert mixture.places == 233
    for source, size in enumerate((150, 70, 200)):
        own = [example for which, example in places if which == source]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size:(epoch + 1) * size]) == [*range(size)]
        assert own[:size] != sorted(own[:size]) and own[:size] != own[size:2 * size]
    other = Mixture([150, 70, 200], weights=[0.2, 0.3, 0.5], seed=2)
    assert [other[i] for i in range(20)] != places[:20]
    one = Mixture([40], seed=1)
    assert {one[i] for i in range(40)} == {(0, i) for i in range(40)}


@pytest.mark.parametrize("weights", [
    (0.501, 0.499), (0.6667, 0.3333), (0.004, 0.004, 0.992), (0.3339, 0.3338, 0.3323), (0.1, 0.2, 0.3, 0.25, 0.15)])
def test_the_shares_of_a_mixture_are_exact(weights):
    mixture = Mixture([20_000] * len(weights), weights=weights, seed=0)
    taken = np.array([mixture[i][0] for i in range(20_000)])
    counts = np.cumsum(taken[:, None] == np.arange(len(weights)), axis=0)
    over = counts - np.arange(1, 20_001)[:, None] * weights
    assert over.max() < 1 and over.min() > 1 - len(weights) - 1e-6, (over.max(), over.min())


@pytest.mark.parametrize("sizes, weights", [
    ((307, 1011), None), ((1000, 1004), None), ((200, 333, 70), None), ((1000, 1000, 1000), (0.333, 0.333, 0.333))])
def test_an_epoch_of_a_mixture_has_no_example_twice(sizes, weights):
    mixture = Mixture(sizes, weights=weights, seed=0)
    assert len({mixture[i] for i in range(mixture.places)}) == mixture.places == sum(sizes)
    assert len({mixture[i] for i in range(mixture.places + 1)}) == mixture.places  # the control


@pytest.mark.parametrize("weights, message", [
    ((0.5, -0.5), "each is positive"), ((0.5, 0.0), "each is positive"), ((0.5, float("nan")), "each is positive"),
    ((0.5, 0.4), "their sum is 0.9 and not 1"), ((1.0,), "1 weights for 2 sources")])
def test_weights_that_are_none(weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture([5, 5], weights=weights)


def test_a_batch_is_a_function_of_its_number():
    batches = make()
    first = [next(batches) for _ in range(6)]
    assert {name: array.shape for name, array in first[0].items()} == dict.fromkeys(
        ("inputs", "segment_ids", "positions", "targets", "weights"), (8, 16))
    assert_equal([make()[5], make()[2]], [first[5], first[2]])
    with pytest.raises(AssertionError):  # the control
        assert_equal([make(seed=4)[5]], [first[5]])


@pytest.mark.parametrize("spec, devices", [(P("data"), 2), (P("data", "context"), 8)])
def test_the_batches_of_any_devices_are_the_same_and_resume(spec, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices // 2, 2), ("data", "context"))
    expected = [make()[k] for k in range(4)]
    plain = make()
    next(plain), next(plain)
    sharded = make(sharding=NamedSharding(mesh, spec))
    sharded.restore(json.loads(json.dumps(plain.state())))
    found = [next(sharded), next(sharded)]
    assert_equal(found, expected[2:])
    for array in found[0].values():
        assert array.sharding == NamedSharding(mesh, spec)


def test_each_row_is_made_once_and_only_where_it_is_asked_for():
    """Of all arrays, and of the devices that store the same rows; the first is made for the shapes of all, too."""
    made = []
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "context"))
    make(make=lambda row, key: made.append(key[1]) or row, sharding=NamedSharding(mesh, P("data")))[3]
    assert made[0] == 0 and sorted(made[1:]) == [*range(24, 32)]


@pytest.mark.parametrize("options, message", [
    ({"seed": 4}, "seed=3 saved but seed=4 now"), ({"batch_size": 4}, "batch_size=8 saved but batch_size=4"),
    ({"weights": (0.5, 0.5)}, "order="), ({"name": "other"}, "objective=")])
def test_other_batches_do_not_resume(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options).restore(make().state())


def test_what_makes_no_batch():
    with pytest.raises(ValueError, match=r"Sources \[0\] have no example of this length"):
        ExampleBatches([Windows(documents(2), 999, causal=True)], batch_size=1)
    with pytest.raises(ValueError, match="fewer than a batch of batch_size=999 takes"):
        make(batch_size=999)
    with pytest.raises(ValueError, match="ids 0..15, but 0..9 are allowed .*tokenizer and model disagree"):
        batches = ExampleBatches([Windows(Documents(np.arange(16), np.array([0, 16])), 16, causal=False)], batch_size=1,
                                 vocab_size=10)
        batches[0]
    with pytest.raises(ValueError, match="What hide makes of example 0 of source 0 has ids .*16, but 0..15 are"):
        ExampleBatches([Windows(Documents(np.arange(16), np.array([0, 16])), 16, causal=False)], batch_size=1,
                       vocab_size=16, name="hide", make=lambda row, key: {"inputs": np.full_like(row["inputs"], 16)})
    mesh = Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(ValueError, match=r"shape \(6, 16\) does not divide over"):
        make(batch_size=6, sharding=NamedSharding(mesh, P("data")))


@pytest.mark.parametrize("other", [
    {"others": np.arange(4)}, {"inputs": np.arange(5)}, {"inputs": np.arange(4.0)},
    {"inputs": np.arange(4), "more": np.arange(4)}])
def test_sources_of_other_arrays_are_refused(other):
    class Same:
        num_examples, fingerprint = 8, 1

        def __init__(self, row):
            self._row = row

        def row(self, number):
            return self._row

    batches = ExampleBatches([Same({"inputs": np.arange(4)}), Same(other)], batch_size=8)
    with pytest.raises(ValueError, match="the same names, shapes and dtypes"):
        for number in range(2):
            batches[number]


@pytest.mark.slow
def test_digits():
    pytest.importorskip("sklearn")
    images = digits()
    train, held_out = images.split(0.1)
    assert (images.num_examples, train.num_examples, held_out.num_examples, images.num_classes) == (1797, 1617, 180, 10)
    assert images.row(0)["inputs"].shape == (8, 8, 1) and images.row(0)["inputs"].max() <= 1


def test_images_in_batches(tmp_path):
    images = LabeledImages(np.arange(200 * 16, dtype=np.float32).reshape(200, 4, 4), np.arange(200) % 7)
    train, held_out = images.split(0.1)
    first = [{int(part.row(i)["inputs"][0, 0, 0]) for i in range(part.num_examples)} for part in (train, held_out)]
    assert len(first[0]) == 180 and len(first[1]) == 20 and not first[0] & first[1] and images.num_classes == 7
    mesh = Mesh(np.array(jax.devices()), ("data",))
    batch = ExampleBatches([train], batch_size=16, sharding=NamedSharding(mesh, P("data")))[0]
    assert batch["inputs"].shape == (16, 4, 4, 1) and batch["targets"].shape == (16,)
    labels = np.asarray(batch["inputs"])[:, 0, 0, 0] // 16 % 7
    assert (labels == np.asarray(batch["targets"])).all()
    pixels = (np.arange(5 * 4 * 4 * 3) % 256).reshape(5, 4, 4, 3).astype(np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(5))
    np.save(tmp_path / "images.npy", pixels), np.save(tmp_path / "labels.npy", np.arange(5))
    for path in (tmp_path / "a.npz", tmp_path):
        row = load_images(path).row(3)
        np.testing.assert_allclose(row["inputs"], pixels[3] / 255, rtol=1e-6)
        assert row["targets"] == 3


def test_images_that_are_none(tmp_path):
    for images, labels, message in (
            (np.zeros((3, 4)), np.arange(3), "images: float64 .3, 4. is no"),
            (np.zeros((3, 4, 4), np.int8), np.arange(3), "int8 has no pixels above 127: give uint8"),
            (np.zeros((3, 4, 4)), np.arange(4), "labels: int64 .4,. is not a class"),
            (np.zeros((3, 4, 4)), np.zeros(3), "labels: float64"),
            (np.full((3, 4, 4), np.nan), np.arange(3), "not finite")):
        with pytest.raises(ValueError, match=message):
            LabeledImages(images, labels)
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 4, 4)))
    (tmp_path / "b.npz").write_bytes(b"nothing")
    for name, message in (("a.npz", "lacks labels"), ("b.npz", "cannot be read"), ("c.npz", "no such file")):
        with pytest.raises(ValueError, match=message):
            load_images(tmp_path / name)
    with pytest.raises(ValueError, match="one part would be empty"):
        LabeledImages(np.zeros((3, 4, 4)), np.arange(3)).split(0.0)


@pytest.mark.parametrize("sizes", [(3, 8), (5, 16), (1, 1)])
@pytest.mark.parametrize("weights", [None, (0.75, 0.25)])
def test_a_complete_epoch_has_every_example_once(sizes, weights):
    """Of two sources with weights the mean is by these: each of its own mean."""
    sources = [Windows(Documents(np.arange(4 * size) + 100 * k, np.array([0, 4 * size])), 4, causal=False)
               for k, size in enumerate(sizes)]
    make = lambda row, _: {**row, "targets": row["inputs"]}  # noqa: E731
    held_out = ExampleBatches(sources, batch_size=4, weights=weights, make=make, complete=True)
    targets, found = (np.concatenate([batch[name] for batch in held_out.once()]) for name in ("targets", "weights"))
    assert held_out.batches_per_epoch == -(-sum(sizes) // 4)
    assert sorted(targets[found > 0]) == sorted(np.concatenate([source.row(k)["inputs"] for source in sources
                                                                for k in range(source.num_examples)]))
    shares = weights or np.array(sizes) / sum(sizes)
    expected = sum(share * (np.arange(4 * size) + 100 * k).mean()
                   for k, (size, share) in enumerate(zip(sizes, shares, strict=True)))
    assert np.isclose((targets * found).sum() / found.sum(), expected)
    # Negative control: epochs of training leave out what fills no batch.
    if sum(sizes) % 4 and sum(sizes) > 4:
        assert ExampleBatches(sources, batch_size=4, make=make).batches_per_epoch < held_out.batches_per_epoch
