"""Corpus: what text is read and in which order, token files, what is held out, what a bigram model reaches."""

import re
from pathlib import Path

import numpy as np
import pytest

from zero_jax.data import corpus, text_sources
from zero_jax.data.batches import Batches

LENGTH = 8

# Text and bytes


def test_encode_and_decode_are_inverse_and_replace_what_is_no_text():
    text = "z\u00e9ro \u2192 one\n"
    assert corpus.encode(text).dtype == np.uint8
    assert corpus.decode(corpus.encode(text)) == text
    assert corpus.decode(corpus.encode(text).astype(np.int32)) == text
    assert corpus.decode([0x61, 0xFF, 0x62]) == "a\ufffdb"
    assert corpus.decode([]) == corpus.decode(corpus.encode("")) == ""
    with pytest.raises(ValueError, match=r"tokens span 97\.\.50256 but a byte is 0\.\.255"):
        corpus.decode([97, 50256])


def test_python_source_is_real_text_in_a_fixed_order_that_is_not_alphabetical():
    tokens = corpus.python_source()
    assert tokens.dtype == np.uint8 and tokens.ndim == 1
    assert len(tokens) > 5_000_000
    text = tokens.tobytes().decode("utf-8")  # all of it is valid UTF-8
    assert "class OrderedDict" in text
    assert 'The "assert" statement' in text  # Python's own documentation: pydoc_data/topics.py
    assert "import pytest" not in text  # neither site-packages nor tests
    modules = [
        "\nclass ArgumentParser(",
        "\nclass HTTPServer(",
        "\nclass Random(",
        "\nclass ZipFile",
    ]
    starts = [text.index(x) for x in modules]
    assert starts != sorted(starts)
    part = corpus.python_source(100_000)
    np.testing.assert_array_equal(part, tokens[:100_000])
    np.testing.assert_array_equal(corpus.load("python", max_bytes=1000), tokens[:1000])


def test_read_text_takes_files_directories_and_globs(tmp_path):
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / ".hidden").mkdir()
    for name, text in {
        "a.txt": b"alpha",
        "docs/b.md": b"beta",
        "docs/deep/c.md": b"gam\xffma",
        "docs/empty.md": b"",
        "docs/image.png": b"\x89PNG\0\0",
        "docs/.hidden/d.md": b"delta",
    }.items():
        (tmp_path / name).write_bytes(text)

    def parts(*names, **options):
        return sorted(corpus.read_text(list(names), **options).tobytes().split(b"\n"))

    named, folder = tmp_path / "a.txt", tmp_path / "docs"
    assert corpus.decode(corpus.read_text(named)) == "alpha"
    assert parts(folder) == [b"beta", b"gam\xffma"]
    assert parts(folder, named) == [b"alpha", b"beta", b"gam\xffma"]
    assert parts(f"{folder}/**/*.md") == [b"beta", b"gam\xffma"]
    assert parts(folder / "image.png") == [b"\x89PNG\0\0"]  # named: taken as it is
    # Once, however often it is found: a second copy could lie in the held-out part.
    assert parts(named, named, tmp_path / "docs" / ".." / "a.txt", f"{tmp_path}/*.txt") == [
        b"alpha"
    ]
    assert len(corpus.read_text(folder, max_bytes=7)) == 7
    assert len(corpus.load([folder, named])) == len("beta gamXma alpha")


def test_order_of_files_is_shuffled_and_does_not_depend_on_where_they_lie(tmp_path):
    names = [f"{i:02d}.txt" for i in range(20)]
    texts = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name in names if folder == "one" else reversed(names):
            (tmp_path / folder / name).write_text(name)
        texts.append(corpus.read_text(tmp_path / folder).tobytes())
    assert texts[0] == texts[1]
    order = texts[0].decode().split("\n")
    assert sorted(order) == names != order
    # The order itself is part of the contract: a saved position means the same next year.
    assert order[:4] == ["18.txt", "06.txt", "08.txt", "05.txt"]


def test_text_errors(tmp_path, monkeypatch):
    empty, text = tmp_path / "empty.txt", tmp_path / "text.txt"
    empty.touch()
    text.write_text("x")
    (tmp_path / "void").mkdir()
    for name in (tmp_path / "absent.txt", f"{tmp_path}/*.rst"):
        with pytest.raises(ValueError, match=r"(absent.txt|rst): no such file, directory or glob"):
            corpus.read_text(name)
    with pytest.raises(ValueError, match=r"empty\.txt: the file is empty"):
        corpus.read_text([text, empty])
    with pytest.raises(ValueError, match="no text files in .*void"):
        corpus.read_text(tmp_path / "void")
    with pytest.raises(ValueError, match="no text files in"):
        corpus.read_text([])
    with pytest.raises(ValueError, match="max_bytes=0: at least 1"):
        corpus.read_text(text, max_bytes=0)
    with pytest.raises(ValueError, match="tokens.bin is a token file and comes with 1 other"):
        corpus.load([text, "tokens.bin"])
    text.write_text("Bonjour", encoding="utf-16")
    with pytest.raises(ValueError, match=r"text\.txt is text in UTF-16.*iconv"):
        corpus.read_text([text])
    text.write_bytes("\ufeffBonjour".encode())  # UTF-8 with its mark
    assert corpus.read_text([text]).size == 10
    monkeypatch.setattr(text_sources.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "void")})
    with pytest.raises(ValueError, match="no Python source in .*void"):
        corpus.python_source()

    def refuse(*args, **named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # chmod does not stop root, who runs CI
    with pytest.raises(ValueError, match=r"text\.txt: cannot be read as bytes \(Permission denied"):
        corpus.read_text(text)
    monkeypatch.setattr(text_sources, "open_regular", refuse)
    for read in (corpus.read_text, text_sources.files_of):
        with pytest.raises(ValueError, match=r"text\.txt cannot be read \(Permission denied\): change its permissions"):
            read(str(tmp_path))


# The held-out part


@pytest.mark.parametrize("num_tokens", [18, 19, 100, 1000, 12_345])
@pytest.mark.parametrize("holdout", [0.01, 0.05, 0.4])
def test_held_out_part_is_disjoint_contiguous_and_whole_sequences(num_tokens, holdout):
    tokens = np.arange(num_tokens)
    train, held_out = corpus.split(tokens, length=LENGTH, holdout=holdout)
    np.testing.assert_array_equal(np.concatenate([train, held_out]), tokens)  # each token once
    assert len(held_out) % LENGTH == 1 and len(train) > LENGTH
    assert (
        max(LENGTH, int(holdout * num_tokens)) < len(held_out) < holdout * num_tokens + LENGTH + 2
    )
    used = [
        {int(i) for batch in Batches(part, batch_size=1, length=LENGTH).once() for a in
         batch.values() for i in a.ravel()}
        for part in (train, held_out)
    ]  # fmt: skip
    assert not used[0] & used[1]
    assert len(used[1]) == len(held_out)  # all of it counts in the validation loss


def test_split_errors():
    tokens = np.arange(17)
    with pytest.raises(ValueError, match="17 tokens are too short: 9 held out .* leave 8 to train"):
        corpus.split(tokens, length=LENGTH)
    for share in (0, 1, -0.1):
        with pytest.raises(ValueError, match="it is a fraction, between 0 and 1"):
            corpus.split(tokens, length=LENGTH, holdout=share)
    with pytest.raises(ValueError, match="length=0: a sequence has at least 1"):
        corpus.split(tokens, length=0)


# The bigram model


def test_bigram_loss_by_hand():
    train, held_out = np.array([0, 1, 0, 1, 1]), np.array([1, 0, 1])
    # counts: 0->1 twice, 1->0 once, 1->1 once; add one over 2 ids.
    expected = -(np.log((1 + 1) / (2 + 2)) + np.log((2 + 1) / (2 + 2))) / 2
    assert corpus.bigram_loss(train, held_out, vocab_size=2) == pytest.approx(expected, rel=1e-12)


def test_bigram_loss_lies_between_knowing_nothing_and_everything():
    train, held_out = corpus.split(corpus.python_source(2_000_000), length=128)
    text = corpus.bigram_loss(train, held_out)
    assert 1.5 < text < 3.2
    noise = np.random.default_rng(0).integers(0, 256, (2, 1_000_000))
    assert corpus.bigram_loss(*noise) == pytest.approx(np.log(256), abs=0.05)
    assert corpus.bigram_loss(train, noise[0]) > np.log(256)
    alternate = np.arange(1_000_000) % 2
    assert corpus.bigram_loss(alternate, alternate) < 0.001


def test_bigram_loss_costs_the_same_for_any_size_and_still_sees_all_of_it():
    tokens = np.zeros(50_000_000, np.uint8)
    tokens[len(tokens) // 2 :] = np.arange(len(tokens) // 2) % 2
    assert len(corpus.sample(tokens)) == 2**22
    # Half of all pairs are 0 0, a quarter 0 1, a quarter 1 0: a third of the steps from 0 go to 1.
    expected = -(np.log(2 / 3) / 2 + np.log(1 / 3) / 4)
    assert corpus.bigram_loss(tokens, tokens, vocab_size=2) == pytest.approx(expected, rel=0.05)


def test_bigram_loss_errors():
    tokens = np.arange(300)
    with pytest.raises(ValueError, match="vocab_size=50257, but its table"):
        corpus.bigram_loss(tokens, tokens, vocab_size=50257)
    with pytest.raises(ValueError, match=r"train_tokens needs .* within 0\.\.255"):
        corpus.bigram_loss(tokens, tokens[:2])
    with pytest.raises(ValueError, match="eval_tokens needs at least 2"):
        corpus.bigram_loss(tokens[:9], tokens[:1])


# Token files


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
    assert len(corpus.sample(tokens)) < len(tokens)
    for place in (0, len(tokens) - 1):
        bad = tokens.copy()
        bad[place] = 999
        assert corpus.sample(bad).max() == 999
    between = 65_536 + 3_000  # in no block, so the file opens
    tokens[between] = 999
    np.save(tmp_path / "a.npy", tokens)
    read = corpus.open_tokens(tmp_path / "a.npy", vocab_size=256)
    batches = Batches(read, batch_size=1, length=6_000, vocab_size=256)
    position = [w[0] for w in (batches._windows(k) for k in range(900))].index(between // 6_000)
    batches[position + 1]
    with pytest.raises(ValueError, match=r"tokens \[66000\]\.\.\. hold ids 0\.\.999, but 0\.\.255"):
        batches[position]
