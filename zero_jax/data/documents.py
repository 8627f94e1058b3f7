"""Documents as token ids: one array of tokens and where each document begins in it; and the folder of them. No JAX.

`zero_jax tokenize` writes the folder, and `train --data FOLDER` maps it:

- tokens.uint16.bin (or .uint32.bin): the ids of all documents, one after another
- documents.npy: int64 (num_documents + 1,), where each begins
- tokenizer.json, or tokenizer.model: the tokenizer; tokenizer_config.json for transformers
- tokenized.json: what is in the folder; written last, so that a folder without it is incomplete
"""

import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zero_jax.data.corpus import open_tokens, sample
from zero_jax.data.tokenizer import Specials, Tokenizer, load_tokenizer
from zero_jax.errors import UsageError, printable
from zero_jax.files import read_regular

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


MANIFEST, FORMAT = "tokenized.json", 1


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """What the manifest of such a folder says.

    tokenizer: its fingerprint. sources: the names of the files as they were given.
    """

    folder: Path
    dtype: str
    num_tokens: int
    num_documents: int
    vocab_size: int
    tokenizer: str
    specials: Specials
    sources: tuple[str, ...] = ()

    def documents(self) -> Documents:
        """The documents, of which the tokens are mapped. Raises ValueError where files are missing or damaged."""
        tokens = open_tokens(self.folder / f"tokens.{self.dtype}.bin", vocab_size=self.vocab_size)
        path = self.folder / "documents.npy"
        try:
            offsets = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UsageError(f"{path} cannot be read ({printable(str(error))}): tokenize the text again.") from error
        if offsets.shape != (self.num_documents + 1,) or offsets.dtype != np.int64 or len(tokens) != self.num_tokens:
            raise UsageError(f"{self.folder}: it has {len(tokens):,} tokens and {len(offsets) - 1:,} documents, "
                             f"{MANIFEST} says {self.num_tokens:,} and {self.num_documents:,}: tokenize again.")
        return Documents(tokens, offsets)

    def load_tokenizer(self) -> Tokenizer:
        """Its tokenizer; needs the package that reads it."""
        return load_tokenizer(self.folder)


def is_tokenized(path: str | Path) -> bool:
    """Whether `path` is such a folder, complete or not."""
    path = Path(path).expanduser()
    return (path / MANIFEST).is_file() or (path / "documents.npy").is_file()


def open_tokenized(path: str | Path) -> Tokenized:
    """The folder at `path`; raises ValueError where it is incomplete, damaged or of another version."""
    folder = Path(path).expanduser()
    try:
        read = json.loads(read_regular(folder / MANIFEST, 1 << 24))
    except OSError as error:
        raise UsageError(f"{folder} has no {MANIFEST} ({error.strerror}): tokenizing it was interrupted: do it again."
                         ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{folder / MANIFEST} is damaged ({printable(str(error))}): tokenize the text again."
                         ) from error
    try:
        if read["format"] != FORMAT:
            raise UsageError(f"{folder} has format {read['format']!r}, this version reads {FORMAT}: tokenize again.")
        special = read["specials"]
        specials = Specials(special["eos"], special["pad"], special["mask"], tuple(special["sentinels"]),
                            tuple(special["ids"]), special.get("bos"))
        tokens, documents, ids = (int(read[name]) for name in ("num_tokens", "num_documents", "vocab_size"))
        return Tokenized(folder, str(read["dtype"]), tokens, documents, ids, str(read["tokenizer"]), specials,
                         tuple(read["sources"]))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{folder / MANIFEST} is damaged ({error!r}): tokenize the text again.") from error


def write_tokenized(folder: str | Path, texts: Iterable[str], tokenizer: Tokenizer, *, sources: Iterable[str] = ()
                    ) -> Tokenized:
    """Tokenizes `texts` into a new folder, some hundred at a time. Raises ValueError for no text, or a used folder."""
    folder = Path(folder).expanduser()
    check_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = {2: "uint16", 4: "uint32"}[token_dtype(tokenizer.vocab_size).itemsize]
    lengths = []
    with (folder / f"tokens.{dtype}.bin").open("wb") as file:
        for ids, counts in encode_documents(texts, tokenizer):
            file.write(ids.tobytes())
            lengths.append(counts)
    if not lengths:
        (folder / f"tokens.{dtype}.bin").unlink()
        raise UsageError("The data have no text: give files that have some.")
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    np.save(folder / "documents.npy", offsets)
    for name, content in {**tokenizer.files, **for_transformers(tokenizer)}.items():
        (folder / name).write_bytes(content)
    written = Tokenized(folder, dtype, int(offsets[-1]), len(offsets) - 1, tokenizer.vocab_size, tokenizer.fingerprint,
                        tokenizer.specials, tuple(map(str, sources)))
    manifest = {"format": FORMAT, **{name: value for name, value in dataclasses.asdict(written).items()
                                     if name != "folder"}}
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=1) + "\n")
    temporary.replace(folder / MANIFEST)
    return written


def check_new(folder: Path) -> None:
    """Raises ValueError unless `folder` can be a new one: it is not there, or empty, or left by an interruption."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"out={folder}: there is a file of that name: give a folder.")
    if (folder / MANIFEST).exists() or folder.is_dir() and any(folder.iterdir()) and not is_left_over(folder):
        raise UsageError(f"out={folder} is not empty: give a new folder.")


def is_left_over(folder: Path) -> bool:
    """Whether all files in `folder` are those of an interrupted `write_tokenized`."""
    ours = ("tokens.uint16.bin", "tokens.uint32.bin", "documents.npy", "tokenizer.json", "tokenizer.model",
            "tokenizer_config.json", f"{MANIFEST}.tmp")
    return all(path.name in ours for path in folder.iterdir())


def for_transformers(tokenizer: Tokenizer) -> dict[str, bytes]:
    """tokenizer_config.json, with which transformers.AutoTokenizer reads the folder."""
    if "tokenizer.json" not in tokenizer.files:
        return {}
    specials: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    names = {i: token["content"] for token in json.loads(tokenizer.files["tokenizer.json"]).get("added_tokens", ())
             for i in (token["id"],)}
    for key in ("bos", "eos", "pad", "mask"):
        if (name := names.get(getattr(tokenizer.specials, key))) is not None:
            specials[f"{key}_token"] = name
    return {"tokenizer_config.json": (json.dumps(specials, indent=1) + "\n").encode()}
