"""Tokenizers: bytes, `tokenizer.json` files of Hugging Face, SentencePiece, and small ones trained here. No JAX."""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zero_jax.arguments import whole
from zero_jax.data import corpus, extras
from zero_jax.errors import UsageError, named, printable
from zero_jax.files import read_regular

EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
PAD = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>")
MASK = ("<|mask|>", "<mask>", "[MASK]")
"""The usual names of the tokens, where no tokenizer_config.json beside the file says them."""

MAX_FILE_BYTES = 1 << 28

_SPLITS = {"WhitespaceSplit", "Whitespace", "BertPreTokenizer", "Strip"}
"""Steps of a tokenizer.json after which nothing tells whether a text began with a space."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model")
"""Files of a tokenizer in a folder, the first that is there."""

_SPACE = "\u2581"
"""A space in the pieces of SentencePiece."""


@dataclasses.dataclass(frozen=True)
class Specials:
    """Ids of the tokens that are no text; None or empty for those that the tokenizer lacks.

    sentinels: `<extra_id_0>`, `<extra_id_1>` and so on, of T5's span corruption. ids: all that are no text.
    """

    eos: int | None = None
    pad: int | None = None
    mask: int | None = None
    sentinels: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    bos: int | None = None


class Tokenizer(Protocol):
    """Texts to ids and back.

    vocab_size: the largest id, and one. fingerprint: of its file, the same for equal files.
    """

    vocab_size: int
    fingerprint: str
    specials: Specials
    files: dict[str, bytes]

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of each text, without special tokens."""
        ...

    def encode_parts(self, texts: Sequence[Sequence[str]]) -> list[list[Sequence[int]]]:
        """The ids of each part of each text, which joined are those of the text, but that no token is in two parts.

        Special tokens in a text are such, as in what a chat template writes.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, without special tokens."""
        ...


class ByteTokenizer:
    """One token for each byte of UTF-8, and no special tokens."""

    vocab_size, fingerprint, specials = corpus.BYTE_VOCAB_SIZE, "bytes", Specials()

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The bytes of each text."""
        return [corpus.encode(text) for text in texts]  # pyright: ignore[reportReturnType]

    def encode_parts(self, texts: Sequence[Sequence[str]]) -> list[list[Sequence[int]]]:
        """The bytes of each part."""
        return [self.encode(parts) for parts in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of bytes."""
        return corpus.decode(ids)


class SpecialByteTokenizer(ByteTokenizer):
    """Bytes, and after them 256 the end of text, 257 padding, 258 a mask, and 125 sentinels: 384 ids, as ByT5 has."""

    vocab_size, fingerprint = 384, "bytes with special tokens"
    specials = Specials(256, 257, 258, tuple(range(259, 384)), tuple(range(256, 384)))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the bytes among `ids`."""
        ids = np.asarray(ids)
        return corpus.decode(ids[ids < corpus.BYTE_VOCAB_SIZE])


class HuggingFaceTokenizer:
    """A `tokenizer.json`, by the package `tokenizers`; no file, `config`: what tokenizer_config.json beside it says."""

    def __init__(self, content: bytes, *, config: dict[str, Any] | None = None, name: str = "tokenizer.json") -> None:
        tokenizers = extras.load("tokenizers", f"{name} as a tokenizer")
        try:
            read = json.loads(content)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
            steps = {name: read.get(name) for name in ("normalizer", "pre_tokenizer")}
            within = {name: _without_prefix(step) for name, step in steps.items()}
            self._splits = not _SPLITS.isdisjoint(_types(steps))
            self._within = self._tokenizer if self._splits or within == steps else tokenizers.Tokenizer.from_str(
                json.dumps(read | within))
        except Exception as error:  # the package raises nothing narrower
            raise UsageError(f"{name} is no tokenizer file of Hugging Face ({printable(str(error))}): give a "
                             "tokenizer.json, or the .model file of SentencePiece.") from error
        for each in (self._tokenizer, self._within):
            each.no_truncation()
            each.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise UsageError(f"{name} has an empty vocabulary: give a tokenizer that was trained.")
        self.vocab_size, self.files = max(vocab.values()) + 1, {"tokenizer.json": content}
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = _specials(vocab, config or {}, [i for i, token in added.items() if token.special])

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of each text, on all cores."""
        return _encoded(self._tokenizer, texts)

    def encode_parts(self, texts: Sequence[Sequence[str]]) -> list[list[Sequence[int]]]:
        """The ids of each part; only the first of a text gets the space that some tokenizers put before a text.

        Raises ValueError where a tokenizer that splits at spaces would write a part of a word as a word.
        """
        first = [next((k for k, part in enumerate(parts) if part), 0) for parts in texts]
        heads = iter(_encoded(self._tokenizer, [parts[k] for parts, k in zip(texts, first, strict=True) if parts]))
        rest = iter(_encoded(self._within, [
            part for parts, k in zip(texts, first, strict=True) for at, part in enumerate(parts) if at != k]))
        found = [[next(heads if at == k else rest) for at in range(len(parts))]
                 for parts, k in zip(texts, first, strict=True)]
        for parts, ids in zip(texts, found, strict=True) if self._splits else ():
            filled = [each for each in zip(parts, ids, strict=True) if each[0]]
            for (before, own), (part, more) in itertools.pairwise(filled):
                if _encoded(self._tokenizer, [before + part]) != [[*own, *more]]:
                    raise UsageError(f"the tokenizer splits at spaces, and would write {named(part[:20])} after "
                                     f"{named(before[-20:])} as a word of its own: put a space or a line break between "
                                     "them.")
        return found

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids."""
        return self._tokenizer.decode([int(i) for i in ids])


class SentencePieceTokenizer:
    """The .model file of SentencePiece, by its package."""

    def __init__(self, content: bytes, *, name: str = "tokenizer.model") -> None:
        sentencepiece = extras.load("sentencepiece", f"{name} as a tokenizer")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except Exception as error:
            raise UsageError(f"{name} is no model of SentencePiece ({printable(str(error))}): give a .model file that "
                             "it has written.") from error
        # Messages of protocol buffers that follow each other are merged: the normalizer's add_dummy_prefix and
        # remove_extra_whitespaces become false, and nothing else.
        self._exact = sentencepiece.SentencePieceProcessor(model_proto=content + b"\x1a\x04\x18\x00\x20\x00")
        self.vocab_size, self.files = self._model.get_piece_size(), {"tokenizer.model": content}
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        vocab = {self._model.id_to_piece(i): i for i in range(self.vocab_size)}
        known = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id(),
                 "pad_token": self._model.pad_id()}
        config = {key: self._model.id_to_piece(i) for key, i in known.items() if i >= 0}
        no_text = [i for i in range(self.vocab_size) if self._model.is_control(i) or self._model.is_unknown(i)]
        self.specials = _specials(vocab, config, no_text)
        self._control = {piece: i for piece, i in vocab.items() if self._model.is_control(i)}

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of each text."""
        return self._model.encode(list(texts))

    def encode_parts(self, texts: Sequence[Sequence[str]]) -> list[list[Sequence[int]]]:
        """The ids of each part: spaces as those of the whole text, the dummy prefix before its first word alone."""
        prefix, suffix = self._model.normalize("a").split("a")  # a suffix with treat_whitespace_as_suffix
        collapses = _SPACE * 2 not in self._model.normalize("a  a")
        control, found = "|".join(map(re.escape, self._control)) or "(?!)", []
        for parts in texts:
            runs = [(k, run) for k, part in enumerate(parts) for run in re.split(f"({control})", part) if run]
            words = [self._exact.normalize(run) for _, run in runs if run not in self._control]
            words = _collapsed(words) if collapses else words
            filled = [k for k, word in enumerate(words) if word]
            for k, edges in ((filled[0], (prefix, "")), (filled[-1], ("", suffix))) if filled else ():
                words[k] = words[k].join(edges)
            encoded, ids = iter(self._exact.encode(words)), [[] for _ in parts]
            for k, run in runs:
                ids[k] += [self._control[run]] if run in self._control else next(encoded)
            found.append(ids)
        return found

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids."""
        return self._model.decode([int(i) for i in ids])


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a file (tokenizer.json, or .model of SentencePiece), or in a folder that has one.

    Raises ValueError where there is none, its package (extra `data`) is not installed, or it cannot be read.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        found = [path / name for name in TOKENIZERS if (path / name).exists()]
        if not found:
            raise UsageError(f"tokenizer: {path} has no tokenizer.json and no tokenizer.model: name the file.")
        path = found[0]
    if path.suffix not in (".json", ".model"):
        raise UsageError(f"tokenizer: {path}: give a tokenizer.json of Hugging Face or a .model of SentencePiece.")
    try:
        content = read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"tokenizer: {path} cannot be read ({error.strerror}).") from error
    if path.suffix == ".model":
        return SentencePieceTokenizer(content, name=str(path))
    return HuggingFaceTokenizer(content, config=_config_beside(path), name=str(path))


def _encoded(tokenizer: Any, texts: Sequence[str]) -> list[Sequence[int]]:
    return [one.ids for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def _collapsed(words: list[str]) -> list[str]:
    """`words` of a text without spaces at its ends, and with one where there are several, in one word or two."""
    result, before = [], _SPACE
    for word in words:
        word = re.sub(f"{_SPACE}+", _SPACE, word)
        result.append(word.removeprefix(_SPACE) if before == _SPACE else word)
        before = word[-1:] or before
    for k in reversed(range(len(result))):
        result[k] = result[k].rstrip(_SPACE)
        if result[k]:
            break
    return result


def _types(step: Any) -> Iterator[str]:
    """The types of the steps of a tokenizer.json, at any depth."""
    for each in step.values() if isinstance(step, dict) else step if isinstance(step, list) else ():
        yield from _types(each)
    if isinstance(step, dict):
        yield step.get("type", "")


def _without_prefix(step: Any) -> Any:
    """A normalizer or pre_tokenizer of a tokenizer.json that puts no space before a text."""
    if isinstance(step, list):
        return [each for each in map(_without_prefix, step) if each is not None]
    if not isinstance(step, dict) or step.get("type") == "Prepend":
        return None
    changed = {"Metaspace": {"prepend_scheme": "never", "add_prefix_space": False},
               "ByteLevel": {"add_prefix_space": False},
               "Sequence": {name: _without_prefix(step[name]) for name in ("normalizers", "pretokenizers")
                            if name in step}}
    return step | changed.get(step.get("type", ""), {})


def _config_beside(path: Path) -> dict[str, Any]:
    """The bos_token, eos_token, pad_token and mask_token that transformers has written beside a tokenizer.json."""
    try:
        read = json.loads(read_regular(path.with_name("tokenizer_config.json"), 1 << 24))
    except (OSError, ValueError, RecursionError):
        return {}
    read = read if isinstance(read, dict) else {}
    names = {key: read[key] for key in ("bos_token", "eos_token", "pad_token", "mask_token") if read.get(key)}
    return {key: name["content"] if isinstance(name, dict) else name for key, name in names.items()}


def _specials(vocab: dict[str, int], config: dict[str, Any], no_text: Sequence[int]) -> Specials:
    def first(key: str, names: tuple[str, ...]) -> int | None:
        return next((vocab[name] for name in (config.get(key), *names) if name in vocab), None)

    eos, pad, mask = first("eos_token", EOS), first("pad_token", PAD), first("mask_token", MASK)
    sentinels = []
    while f"<extra_id_{len(sentinels)}>" in vocab:
        sentinels.append(vocab[f"<extra_id_{len(sentinels)}>"])
    known = {*no_text, *sentinels, *(i for i in (eos, pad, mask) if i is not None)}
    return Specials(eos, pad, mask, tuple(sentinels), tuple(sorted(known)), first("bos_token", ()))


SPECIAL_TOKENS = (EOS[0], PAD[0], MASK[0])
"""The first ids of each tokenizer that is trained here."""


def train_bpe(texts: Iterable[str], *, vocab_size: int, sentinels: int = 0) -> HuggingFaceTokenizer:
    """A byte-level BPE as GPT-2's, trained on `texts`: any text is encoded, and decoded to itself.

    Ids 0 to 2 are `<|endoftext|>`, `<|pad|>` and `<|mask|>`; then come `sentinels` tokens `<extra_id_0>` and so on, for
    span corruption, and the 256 bytes. Where the texts have fewer pairs to merge, its `vocab_size` is smaller than that
    asked for. The same texts give the same tokenizer. Raises ValueError for no text, and a vocabulary smaller than the
    bytes and special tokens.
    """
    special = [*SPECIAL_TOKENS, *(f"<extra_id_{i}>" for i in range(whole("sentinels", sentinels, 0)))]
    least = 256 + len(special)
    if whole("vocab_size", vocab_size, 1) < least:
        raise UsageError(f"vocab_size={vocab_size}: 256 bytes and {len(special)} special tokens take {least}: give at "
                         "least that, as 8192.")
    tokenizers = extras.load("tokenizers", "training a tokenizer")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                             initial_alphabet=byte_level.alphabet())
    seen = False

    def texts_seen() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen = seen or bool(text)
            yield text

    tokenizer.train_from_iterator(texts_seen(), trainer)
    if not seen:
        raise UsageError("There is no text to train a tokenizer on: name files that have some.")
    return HuggingFaceTokenizer(tokenizer.to_str(pretty=True).encode())
