"""Tokenizers: bytes, `tokenizer.json` files of Hugging Face, and SentencePiece models. Nothing here imports JAX."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zero_jax.data import corpus, extras
from zero_jax.errors import UsageError, printable
from zero_jax.files import read_regular

EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
PAD = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>")
MASK = ("<|mask|>", "<mask>", "[MASK]")
"""The usual names of the tokens, where no tokenizer_config.json beside the file says them."""

MAX_FILE_BYTES = 1 << 28


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
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises nothing narrower
            raise UsageError(f"{name} is no tokenizer file of Hugging Face ({printable(str(error))}): give a "
                             "tokenizer.json, or the .model file of SentencePiece.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise UsageError(f"{name} has an empty vocabulary: give a tokenizer that was trained.")
        self.vocab_size, self.files = max(vocab.values()) + 1, {"tokenizer.json": content}
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = _specials(vocab, config or {}, [i for i, token in added.items() if token.special])

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of each text, on all cores."""
        return [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

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
        self.vocab_size, self.files = self._model.get_piece_size(), {"tokenizer.model": content}
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        vocab = {self._model.id_to_piece(i): i for i in range(self.vocab_size)}
        known = {"eos_token": self._model.eos_id(), "pad_token": self._model.pad_id()}
        config = {key: self._model.id_to_piece(i) for key, i in known.items() if i >= 0}
        no_text = [i for i in range(self.vocab_size) if self._model.is_control(i) or self._model.is_unknown(i)]
        self.specials = _specials(vocab, config, no_text)

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of each text."""
        return self._model.encode(list(texts))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids."""
        return self._model.decode([int(i) for i in ids])


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a file (tokenizer.json, or .model of SentencePiece), or in a folder that has one.

    Raises ValueError where there is none, its package (extra `data`) is not installed, or it cannot be read.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model", "spiece.model")
        found = [path / name for name in names if (path / name).exists()]
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


def _config_beside(path: Path) -> dict[str, Any]:
    """The eos_token, pad_token and mask_token that transformers has written beside a tokenizer.json."""
    try:
        read = json.loads(read_regular(path.with_name("tokenizer_config.json"), 1 << 24))
    except (OSError, ValueError, RecursionError):
        return {}
    read = read if isinstance(read, dict) else {}
    names = {key: read[key] for key in ("eos_token", "pad_token", "mask_token") if read.get(key)}
    return {key: name["content"] if isinstance(name, dict) else name for key, name in names.items()}


def _specials(vocab: dict[str, int], config: dict[str, Any], no_text: Sequence[int]) -> Specials:
    def first(key: str, names: tuple[str, ...]) -> int | None:
        return next((vocab[name] for name in (config.get(key), *names) if name in vocab), None)

    eos, pad, mask = first("eos_token", EOS), first("pad_token", PAD), first("mask_token", MASK)
    sentinels = []
    while f"<extra_id_{len(sentinels)}>" in vocab:
        sentinels.append(vocab[f"<extra_id_{len(sentinels)}>"])
    known = {*no_text, *sentinels, *(i for i in (eos, pad, mask) if i is not None)}
    return Specials(eos, pad, mask, tuple(sentinels), tuple(sorted(known)))
