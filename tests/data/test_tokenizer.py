"""Tokenizers of others and of ours: what they encode they decode, their special ids, and files that are none."""

import io
import json

import numpy as np
import pytest

from zero_jax.data import extras
from zero_jax.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    train_bpe,
)

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["def f(x):\n    return x + 1\n", "The quick brown fox; naïve café, 東京 \U0001f600", " two  spaces\t"] * 20


@pytest.fixture(scope="module")
def trained():
    return train_bpe(TEXTS, vocab_size=320, sentinels=4)


def test_a_trained_bpe_decodes_to_any_text(trained):
    for text in [*TEXTS[:3], "unseen: Ωmega ¿qué?", "\0\x7f"]:
        assert trained.decode(trained.encode([text])[0]) == text
    assert trained.vocab_size <= 320 and len(trained.encode([TEXTS[0]])[0]) < len(TEXTS[0]) / 2
    assert max(map(max, trained.encode(TEXTS))) < trained.vocab_size
    specials = trained.specials
    assert (specials.eos, specials.pad, specials.mask, specials.sentinels) == (0, 1, 2, (3, 4, 5, 6))
    assert specials.ids == (0, 1, 2, 3, 4, 5, 6)


def test_training_is_deterministic_and_depends_on_the_text(trained):
    assert train_bpe(TEXTS, vocab_size=320, sentinels=4).fingerprint == trained.fingerprint
    other = train_bpe([*TEXTS, *["zzzz zzzz"] * 99], vocab_size=320, sentinels=4)
    assert other.fingerprint != trained.fingerprint


def test_training_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="vocab_size=100: 256 bytes and 3 special tokens take 259"):
        train_bpe(TEXTS, vocab_size=100)
    with pytest.raises(ValueError, match="no text to train a tokenizer on"):
        train_bpe([], vocab_size=300)


def test_a_file_of_others_and_its_special_tokens(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "<stop>": 7}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(1)  # saved with a file, it would cut every document
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(["a b b", "c"]) == [[0, 1, 1], [2]] and loaded.vocab_size == 8
    assert loaded.specials.eos == 7 and loaded.specials.mask is None and loaded.specials.ids == (7,)
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint == loaded.fingerprint
    (tmp_path / "tokenizer_config.json").write_text("not JSON")
    assert load_tokenizer(tmp_path).specials.eos is None  # the control


def test_a_model_of_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps", "over the lazy dog"] * 50), vocab_size=34, pad_id=3,
        model_prefix=str(tmp_path / "spiece"), user_defined_symbols=["<extra_id_0>", "<mask>"], minloglevel=2)
    loaded = load_tokenizer(tmp_path)
    assert loaded.vocab_size == 34 and loaded.decode(loaded.encode(["the lazy fox"])[0]) == "the lazy fox"
    eos, pad = loaded.specials.eos, loaded.specials.pad
    assert (eos, pad) == (2, 3) and len(loaded.specials.sentinels) == 1 and loaded.specials.mask is not None
    assert {0, 1, 2, 3, loaded.specials.mask} <= {*loaded.specials.ids}


WORDS = ["the", " ", "fox", "  ", "\n", "Par", "is", "a", "", "dog "]


def assert_parts_are_the_text(tokenizer, number=200):
    """Of random parts; returns for how many of them each part alone would be another text, the negative control."""
    draw, alone = np.random.default_rng(0), 0
    for _ in range(number):
        parts = ["".join(draw.choice(WORDS, draw.integers(4))) for _ in range(draw.integers(1, 5))]
        try:
            (found,) = tokenizer.encode_parts([parts])
        except ValueError as error:
            assert "splits at spaces" in str(error)
            continue
        (whole,) = tokenizer.encode(["".join(parts)])
        assert tokenizer.decode([i for part in found for i in part]) == tokenizer.decode(whole), parts
        alone += tokenizer.decode([i for part in tokenizer.encode(parts) for i in part]) != tokenizer.decode(whole)
    return alone


@pytest.mark.parametrize("options", [
    {}, {"model_type": "bpe"}, {"add_dummy_prefix": False}, {"remove_extra_whitespaces": False},
    {"treat_whitespace_as_suffix": True},
    {"model_type": "bpe", "byte_fallback": True, "vocab_size": 300, "normalization_rule_name": "identity"}])
def test_parts_of_a_text_by_sentencepiece(options):
    sentencepiece, model = pytest.importorskip("sentencepiece"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps in Paris", "over the lazy dog isn't a"] * 50),
        model_writer=model, minloglevel=2, hard_vocab_limit=False, **({"vocab_size": 36} | options))
    tokenizer = SentencePieceTokenizer(model.getvalue())
    assert assert_parts_are_the_text(tokenizer) > 10
    (parts,) = tokenizer.encode_parts([["Par", "is", "</s>the"]])
    assert tokenizer.decode([*parts[0], *parts[1]]) == "Paris" and parts[2][0] == tokenizer.specials.eos


@pytest.mark.parametrize("name", ["Prepend", "Metaspace", "Metaspace first", "ByteLevel with a space", "ByteLevel",
                                  "WhitespaceSplit", "BertPreTokenizer"])
def test_parts_of_a_text_by_tokenizers(name):
    steps, normalizers, decoders = tokenizers.pre_tokenizers, tokenizers.normalizers, tokenizers.decoders
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    if name == "Prepend":  # as the files of LLaMA 2
        space = "\u2581"
        trained.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        trained.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        trained.pre_tokenizer, trained.decoder = {
            "Metaspace": (steps.Metaspace(), decoders.Metaspace()),
            "Metaspace first": (steps.Metaspace(prepend_scheme="first"), decoders.Metaspace()),
            "ByteLevel with a space": (steps.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
            "ByteLevel": (steps.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
            "WhitespaceSplit": (steps.Sequence([steps.WhitespaceSplit(), steps.Metaspace()]), decoders.Metaspace()),
            "BertPreTokenizer": (steps.BertPreTokenizer(), None)}[name]
    trained.train_from_iterator(["the fox is in Paris", "a dog\nis not"] * 50, tokenizers.trainers.BpeTrainer(
        vocab_size=90, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=steps.ByteLevel.alphabet()))
    found = assert_parts_are_the_text(HuggingFaceTokenizer(trained.to_str().encode()))
    assert (found > 10) == (name in ("Prepend", "Metaspace", "Metaspace first", "ByteLevel with a space"))


def test_bytes():
    assert ByteTokenizer().encode(["ab"])[0].tolist() == [97, 98] and ByteTokenizer().decode([97, 98]) == "ab"


@pytest.mark.parametrize("name, content, message", [
    ("tokenizer.json", b"{}", "is no tokenizer file of Hugging Face"),
    ("tokenizer.json", b"\xff\x00", "is no tokenizer file of Hugging Face"),
    ("tokenizer.json", b'{"model": 5', "is no tokenizer file of Hugging Face"),
    ("a.model", b"nothing", "is no model of SentencePiece"),
    ("vocab.txt", b"a", "give a tokenizer.json of Hugging Face or a .model"),
])
def test_files_that_are_none(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_missing_files_and_packages(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="has no tokenizer.json and no tokenizer.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="cannot be read .No such file"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package tokenizers: pip install 'zero-jax\[data\]'"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_transformers_reads_the_folder(tmp_path, trained):
    transformers = pytest.importorskip("transformers")
    from zero_jax.data.documents import write_tokenized

    write_tokenized(tmp_path / "data", TEXTS, trained)
    for text in TEXTS[:3]:
        read = transformers.AutoTokenizer.from_pretrained(tmp_path / "data")
        assert read(text)["input_ids"] == trained.encode([text])[0] and read.decode(read(text)["input_ids"]) == text
        assert (read.eos_token_id, read.pad_token_id, read.mask_token_id) == (0, 1, 2)


def test_a_tokenizer_without_a_vocabulary():
    empty = tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode()
    with pytest.raises(ValueError, match="has an empty vocabulary"):
        HuggingFaceTokenizer(empty)
