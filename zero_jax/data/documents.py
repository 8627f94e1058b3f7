"""Documents as token ids: one array of tokens, and where each document begins in it."""

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from zero_jax.data.token_file import sample
from zero_jax.data.tokenizer import Tokenizer
from zero_jax.errors import UsageError

_BATCH_TEXTS, _BATCH_CHARACTERS = 512, 1 << 22


@dataclasses.dataclass(frozen=True)
class Documents:
    """tokens: (num_tokens,) of any integer dtype, mapped or in memory. offsets: int64 (num_documents + 1,).

    Document d is tokens[offsets[d]:offsets[d + 1]]; it ends with the tokenizer's end of text where there is one.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        for name in ("tokens", "offsets"):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
                kind = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise UsageError(f"{name}: {kind} is not a 1-D NumPy array of integers: give np.asarray(...) of some.")
        if len(self.offsets) < 2 or self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            raise UsageError(f"offsets do not cover {len(self.tokens)} tokens: the first is 0, the last their number.")
        if (np.diff(self.offsets) <= 0).any():
            raise UsageError("offsets do not increase: each document has at least one token.")

    def split(self, fraction: float, *, least: int = 0) -> tuple["Documents", "Documents"]:
        """(training part, held-out part): the last `fraction` of the tokens is held out, at least `least` of them.

        The cut is at the next begin of a document where that holds out between half of this and all of it, else in a
        document. No token is in both parts. Raises ValueError where nothing is left to train on.
        """
        if not 0 < fraction < 1:
            raise UsageError(f"eval_fraction={fraction}: give a fraction between 0 and 1, as 0.05.")
        total, held_out = len(self.tokens), max(least, round(fraction * len(self.tokens)), 1)
        if held_out >= total:
            raise UsageError(f"{total:,} tokens are too few to hold {held_out:,} of them out: give more text, smaller "
                             "eval_fraction, batch_size or seq_len, or eval_data.")
        cut = total - held_out
        begin = int(self.offsets[np.searchsorted(self.offsets, cut)])
        if total - begin >= max(held_out / 2, least):
            cut = begin
        inside = int(np.searchsorted(self.offsets, cut))
        before = np.append(self.offsets[:inside], cut)
        after = self.offsets[inside + (self.offsets[inside] == cut):] - cut
        return Documents(self.tokens[:cut], before), Documents(self.tokens[cut:], np.concatenate([[0], after]))

    def fingerprint(self) -> int:
        """CRC-32 of up to 4.2M of the tokens and of the offsets: other data have another one, but for rare chance."""
        return zlib.crc32(self.offsets.astype("<i8").tobytes(), zlib.crc32(sample(self.tokens).astype("<i8").tobytes()))


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for ids below 65536, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, lengths) of some hundred texts after another: the ids of all, and int64 how many each text has.

    Each text ends with the end of text, where the tokenizer has one; one without any token is left out.
    """
    dtype, eos = token_dtype(tokenizer.vocab_size), tokenizer.specials.eos
    for batch in _batches(texts):
        encoded = [np.asarray(ids, dtype) for ids in tokenizer.encode(batch)]
        if eos is not None:
            encoded = [np.append(ids, dtype.type(eos)) for ids in encoded if len(ids)]
        encoded = [ids for ids in encoded if len(ids)]
        if encoded:
            yield np.concatenate(encoded), np.array([len(ids) for ids in encoded], np.int64)


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> Documents:
    """The documents of `texts`, in memory. Raises ValueError where there is no text."""
    parts = list(encode_documents(texts, tokenizer))
    if not parts:
        raise UsageError("The data have no text: give files that have some.")
    lengths = np.concatenate([lengths for _, lengths in parts])
    return Documents(np.concatenate([ids for ids, _ in parts]), np.concatenate([[0], np.cumsum(lengths)]))


def cut_text(texts: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    """`texts` up to so many bytes of UTF-8 in all, the last one cut. None: all of them."""
    left = max_bytes
    for text in texts:
        if left is None:
            yield text
            continue
        content = text.encode("utf-8")
        yield text if len(content) <= left else content[:left].decode("utf-8", "ignore")
        left -= len(content)
        if left <= 0:
            return


def documents_at(tokens: np.ndarray, eos: int) -> Documents:
    """Documents of a token file in which each ends with the id `eos`; reads all of it once."""
    ends = np.flatnonzero(tokens == eos) + 1
    if not len(ends):
        raise UsageError(f"The token file has no end of text (id {eos}), by which documents are told apart: give the "
                         "tokenizer that wrote it, or documents=concatenate.")
    last = [len(tokens)] if ends[-1] < len(tokens) else []
    return Documents(tokens, np.concatenate([[0], ends, last]).astype(np.int64))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in itertools.chain(texts, [None]):
        if batch and (text is None or len(batch) == _BATCH_TEXTS or size + len(text) > _BATCH_CHARACTERS):
            yield batch
            batch, size = [], 0
        if text is not None:
            batch.append(text)
            size += len(text)
