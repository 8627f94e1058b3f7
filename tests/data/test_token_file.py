"""Token files: mapped and not read, checked where it is cheap, refused by name."""

import re
from pathlib import Path

import numpy as np
import pytest

from zero_jax.data import corpus, token_file
from zero_jax.data.batches import Batches

LENGTH = 8


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("how", ["argument", "name", "npy"])
def test_token_files_are_memory_mapped(tmp_path, dtype, how):
    tokens = np.random.default_rng(0).integers(1, 50_000, 1000).astype(dtype)
    path = tmp_path / {"argument": "a.bin", "name": f"a.{dtype}.bin", "npy": "a.npy"}[how]
    if how == "npy":
        np.save(path, tokens)
    else:
        tokens.astype(tokens.dtype.newbyteorder("<")).tofile(path)
    read = corpus.load(path, dtype=dtype if how == "argument" else None, vocab_size=50_000)
    assert isinstance(read, np.memmap) and read.dtype == dtype
    np.testing.assert_array_equal(read, tokens)
    train, held_out = corpus.split(read, length=LENGTH)
    assert isinstance(train, np.memmap) and np.shares_memory(held_out, read)
    assert isinstance(Batches(train, batch_size=2, length=LENGTH).tokens, np.memmap)


def mapped_bytes():
    """Bytes of files that lie in this process's memory by now."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux says how much of a mapped file was read")
    return 1024 * int(re.search(r"RssFile:\s*(\d+) kB", status.read_text())[1])


def test_a_token_file_is_never_read_whole(tmp_path):
    path = tmp_path / "large.uint16.bin"
    num_tokens = 2**33  # 16 GiB, sparse
    with path.open("wb") as file:
        file.truncate(2 * num_tokens)
    before = mapped_bytes()
    tokens = corpus.load(path, vocab_size=50_257)
    train, held_out = corpus.split(tokens, length=2**16)
    assert len(train) + len(held_out) == num_tokens
    batches = Batches(train, batch_size=2, length=2**16, vocab_size=50_257)
    assert next(batches)["inputs"].shape == (2, 2**16)
    batches.restore(batches.state())
    assert mapped_bytes() - before < 2**26
    assert tokens[: 2**26].max() == 0  # 128 MiB: the measure can fail
    assert mapped_bytes() - before > 2**26


def test_token_file_errors(tmp_path):
    def npy(array, name="a.npy"):
        np.save(tmp_path / name, array)
        return tmp_path / name

    def raw(content, name="a.bin"):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    def fails(path, match, **options):
        with pytest.raises(ValueError, match=match) as caught:
            corpus.open_tokens(path, **options)
        assert str(path) in str(caught.value)

    good = np.arange(100, dtype=np.uint16)
    fails(tmp_path / "absent.bin", "no such file")
    fails(raw(b""), "the file is empty")
    fails(raw(b"", "b.npy"), "the file is empty")
    fails(raw(b"text", "a.txt"), r"a token file ends in \.bin \(raw\) or \.npy")
    fails(raw(b"123"), "3 bytes are not a whole number of uint16 tokens of 2 bytes")
    fails(raw(b"123456"), "6 bytes are not a whole number of uint32", dtype="uint32")
    fails(raw(good.tobytes()), "dtype='int64', but a .bin file holds uint16 or", dtype="int64")
    fails(raw(good.astype("<u4").tobytes()), "looks like uint32; open it with dtype='uint32'")
    fails(raw(b"not a numpy file", "b.npy"), r"not a \.npy array")
    fails(npy(good.reshape(10, 10)), r"uint16 of shape \(10, 10\), not a 1-D array of integer")
    fails(npy(good.astype(np.float32)), "holds float32 of shape")
    fails(npy(np.array([None])), r"not a \.npy array")
    fails(npy(good), "holds uint16, not uint32; leave dtype out", dtype="uint32")
    fails(npy(good[:0]), "holds 0 tokens|not a .npy array")
    fails(npy(good), r"reach 0\.\.99 but vocab_size=99 allows 0\.\.98", vocab_size=99)
    fails(npy(good.astype(np.int64) - 1), r"reach -1\.\.98 but vocab_size=99", vocab_size=99)
    assert len(corpus.open_tokens(npy(good), vocab_size=100)) == 100


def test_the_check_of_a_large_file_sees_its_ends_and_batches_see_the_rest(tmp_path):
    tokens = np.zeros(6_000_000, np.uint16)
    assert len(token_file.sample(tokens)) < len(tokens)
    for place in (0, len(tokens) - 1):
        bad = tokens.copy()
        bad[place] = 999
        assert token_file.sample(bad).max() == 999
    between = 65_536 + 3_000  # in no block, so the file opens
    tokens[between] = 999
    np.save(tmp_path / "a.npy", tokens)
    read = corpus.open_tokens(tmp_path / "a.npy", vocab_size=256)
    batches = Batches(read, batch_size=1, length=6_000, vocab_size=256)
    position = [w[0] for w in (batches._windows(k) for k in range(900))].index(between // 6_000)
    batches[position + 1]
    with pytest.raises(ValueError, match=r"tokens \[66000\]\.\.\. hold ids 0\.\.999, but 0\.\.255"):
        batches[position]
