"""Documents: split without overlap, packed so that no token is lost, and written to a folder and back."""

import json

import numpy as np
import pytest

from zero_jax.data.documents import (
    MANIFEST,
    Documents,
    documents_at,
    encode_documents,
    is_tokenized,
    open_tokenized,
    tokenize,
    write_tokenized,
)
from zero_jax.data.packing import DocumentRows, Windows, plan_rows
from zero_jax.data.tokenizer import ByteTokenizer, Specials

RANDOM = np.random.default_rng(0)


def documents(lengths):
    """Documents in which every token is another number."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Documents(np.arange(1, offsets[-1] + 1), offsets)


def chunks(source, causal):
    """(inputs, targets) of each chunk of each row, of which the padding is checked."""
    for number in range(source.num_examples):
        row = source.row(number)
        segments = row["segment_ids"]
        used = segments > 0
        assert not row["inputs"][~used].any() and not row["positions"][~used].any()
        assert (np.diff(segments[used]) >= 0).all() and used[:used.sum()].all()
        for segment in range(1, segments.max() + 1):
            place = segments == segment
            assert row["positions"][place].tolist() == [*range(place.sum())]
            yield row["inputs"][place].tolist(), row["targets"][place].tolist() if causal else None


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_no_token_is_lost_and_none_comes_twice(pack, causal):
    given = documents(RANDOM.integers(1, 40, 200))
    rows = DocumentRows(given, 16, pack=pack, causal=causal)
    seen = []
    starts = {*(given.offsets[:-1] + 1)}
    for inputs, targets in chunks(rows, causal):
        assert inputs == [*range(inputs[0], inputs[0] + len(inputs))]
        if causal:
            assert targets == [token + 1 for token in inputs]
            assert not starts & {*targets}  # what begins a document is not predicted from the one before
        seen += targets if causal else inputs
    expected = {*given.tokens.tolist()} - (starts if causal else set())
    assert sorted(seen) == sorted(expected)
    assert (rows.used_fraction > 0.97) == pack
    if pack:  # the control: with the documents in their order, rows would have padding
        assert rows.num_examples < DocumentRows(given, 16, pack=False, causal=causal).num_examples / 1.2


def test_packing_is_best_fit():
    plan = plan_rows(np.cumsum([0, 5, 3, 6, 2, 8, 4]), 8, pack=True, shift=0)
    rows = [sorted(plan.slots[slice(*plan.first[r:r + 2])].tolist()) for r in range(plan.num_rows)]
    assert sorted(rows) == [[2, 6], [3, 5], [4], [8]]


def test_documents_of_one_token_have_nothing_to_predict():
    with pytest.raises(ValueError, match="Masks leave no token"):
        DocumentRows(documents([1, 1, 1]), 8, pack=True, causal=True)
    assert DocumentRows(documents([1, 1, 1]), 8, pack=True, causal=False).num_examples == 1


def test_windows_run_across_documents():
    given = documents([5, 6, 7])
    causal, plain = Windows(given, 4, causal=True), Windows(given, 4, causal=False)
    assert (causal.num_examples, plain.num_examples) == (4, 4)
    assert Windows(documents([8]), 4, causal=True).num_examples == 1
    assert causal.row(1)["inputs"].tolist() == [5, 6, 7, 8] and causal.row(1)["targets"].tolist() == [6, 7, 8, 9]
    assert plain.row(3)["inputs"].tolist() == [13, 14, 15, 16]


@pytest.mark.parametrize("lengths, fraction, least, begins", [
    ([10] * 20, 0.1, 0, 180), ([10] * 20, 0.12, 0, 180), ([10] * 20, 0.12, 24, 176), ([100, 100], 0.1, 0, 180),
    ([190, 10], 0.05, 0, 190), ([200], 0.05, 0, 190), ([10] * 20, 1e-6, 0, 199)])
def test_what_is_held_out_is_not_trained_on(lengths, fraction, least, begins):
    given = documents(lengths)
    train, held_out = given.split(fraction, least=least)
    assert len(train.tokens) == begins
    assert np.concatenate([train.tokens, held_out.tokens]).tolist() == given.tokens.tolist()
    inner = {*(train.offsets + 0), *(held_out.offsets + begins)}
    assert inner == {*given.offsets} | {begins}


def test_what_cannot_be_split_or_is_no_document():
    for fraction, least, message in ((0, 0, "eval_fraction=0"), (1, 0, "eval_fraction=1"), (0.1, 10, "too few to")):
        with pytest.raises(ValueError, match=message):
            documents([4, 6]).split(fraction, least=least)
    for offsets, message in (([0, 3, 3, 9], "do not increase"), ([0, 4], "do not cover 9"), ([1, 9], "do not cover")):
        with pytest.raises(ValueError, match=message):
            Documents(np.arange(9), np.array(offsets))


class Letters(ByteTokenizer):
    """Bytes with an end of text."""

    vocab_size, fingerprint, specials = 257, "letters", Specials(eos=256, ids=(256,), bos=256)


def test_ids_are_integers_that_int32_holds():
    """Others would be cut or become other ids, of which no vocabulary would tell."""
    offsets = np.array([0, 5, 9])
    for tokens, told in ((np.arange(9) + 0.5, "float64"), ([*range(9)], "list"), (np.ones((9, 1), int), "9, 1")):
        with pytest.raises(ValueError, match=f"tokens: .*{told}.* is not a 1-D NumPy array of integers"):
            Documents(tokens, offsets)
    with pytest.raises(ValueError, match="offsets: list is not a 1-D NumPy array"):
        Documents(np.arange(9), [0, 5, 9])
    for dtype, large in ((np.int64, 2**32 + 7), (np.uint32, 2**31)):
        documents = Documents(np.array([*range(8), large], dtype), offsets)
        for source in (Windows(documents, 8, causal=True), DocumentRows(documents, 8, pack=True, causal=True)):
            with pytest.raises(ValueError, match=f"hold ids .*{large}, and int32 ends at 2147483647"):
                source.row(0)
    assert Windows(Documents(np.arange(9, dtype=np.uint32), offsets), 8, causal=True).row(0)["targets"][-1] == 8


def test_tokenizing_ends_each_document():
    found = tokenize(["ab", "", "c"], Letters())
    assert found.tokens.tolist() == [97, 98, 256, 99, 256] and found.offsets.tolist() == [0, 3, 5]
    assert found.tokens.dtype == np.uint16
    assert tokenize(["ab", "c"], ByteTokenizer()).offsets.tolist() == [0, 2, 3]
    many = [f"text {k}" for k in range(2000)]
    assert len([*encode_documents(many, Letters())]) > 1
    assert len(tokenize(many, Letters()).offsets) == 2001
    with pytest.raises(ValueError, match="have no text"):
        tokenize(["", ""], Letters())
    assert documents_at(found.tokens, 256).offsets.tolist() == [0, 3, 5]
    assert documents_at(np.array([1, 256, 2]), 256).offsets.tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match="has no end of text .id 256"):
        documents_at(np.array([1, 2]), 256)


def test_a_folder_of_tokens_and_back(tmp_path):
    out = tmp_path / "data"
    written = write_tokenized(out, ["ab", "c"] * 600, Letters(), sources=["x.txt"])
    assert is_tokenized(out) and not is_tokenized(tmp_path)
    read = open_tokenized(out)
    assert read == written and read.sources == ("x.txt",) and read.specials.eos == 256
    found = read.documents()
    assert isinstance(found.tokens, np.memmap) and (found.tokens == tokenize(["ab", "c"] * 600, Letters()).tokens).all()
    with pytest.raises(ValueError, match="is not empty: give a new folder"):
        write_tokenized(out, ["ab"], Letters())
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine").touch()
    with pytest.raises(ValueError, match="is not empty: give a new folder"):
        write_tokenized(tmp_path / "other", ["ab"], Letters())
    with pytest.raises(ValueError, match="have no text"):
        write_tokenized(tmp_path / "none", [""], Letters())


def test_a_folder_that_is_damaged_is_told(tmp_path):
    def fails(damage, message):
        out = tmp_path / message.split()[-1]
        write_tokenized(out, ["ab", "c"], Letters())
        damage(out)
        with pytest.raises(ValueError, match=message):
            open_tokenized(out).documents()
        return out

    left = fails(lambda out: (out / MANIFEST).unlink(), "tokenizing it was interrupted")
    write_tokenized(left, ["ab"], Letters())  # which may be done again
    open_tokenized(left).documents()  # the control
    fails(lambda out: (out / MANIFEST).write_text("{"), "is damaged")
    fails(lambda out: (out / MANIFEST).write_text("{}"), "is damaged .KeyError")
    fails(lambda out: change(out, format=2), "has format 2, this")
    fails(lambda out: change(out, num_tokens=9), "says 9 and")
    fails(lambda out: change(out, vocab_size=99), "vocab_size=99 allows")
    fails(lambda out: (out / "documents.npy").write_bytes(b"x"), "documents.npy cannot")
    fails(lambda out: (out / "tokens.uint16.bin").write_bytes(bytes(6)), "has 3 tokens")


def change(folder, **values):
    (folder / MANIFEST).write_text(json.dumps({**json.loads((folder / MANIFEST).read_text()), **values}))
