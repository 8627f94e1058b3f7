"""The corpus: text or a token file as one 1-D array of token ids, and its held-out split.

Text is read as bytes, one token per byte, so that the vocabulary is 256 and no tokenizer is needed. Token files are
memory-mapped. Everything here is NumPy, and the same on every process that reads the same files; `batches` cuts the
array into batches.
"""

import codecs
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from zero_jax.data.text_sources import files_below, is_binary, matching, python_files, python_folder, unseen
from zero_jax.errors import UsageError

BYTE_VOCAB_SIZE = 256


def encode(text: str) -> np.ndarray:
    """Bytes of `text` in UTF-8: uint8 (num_bytes,), read-only.

    >>> encode("ZeRO").tolist()
    [90, 101, 82, 79]
    """
    return np.frombuffer(text.encode("utf-8"), np.uint8)


def decode(tokens: Sequence[int] | np.ndarray) -> str:
    """Text of byte tokens (num_bytes,); a byte that is not valid UTF-8 becomes U+FFFD.

    Raises ValueError for a token outside 0..255, which is no byte.

    >>> decode(encode("ZeRO"))
    'ZeRO'
    """
    tokens = np.asarray(tokens)
    if tokens.size and not (0 <= tokens.min() and tokens.max() < BYTE_VOCAB_SIZE):
        raise UsageError(f"decode: tokens span {tokens.min()}..{tokens.max()} but a byte is 0..255; these ids come "
                         "from another tokenizer, decode them with that one")
    return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def load(
    source: str | os.PathLike | Sequence[str | os.PathLike] = "python",
    *,
    max_bytes: int | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
) -> np.ndarray:
    """Tokens (num_tokens,) of `source`, whose name selects the reader.

    "python" is `python_source`, one name ending in .bin or .npy is `open_tokens` (the only one to use `dtype` and
    `vocab_size`), anything else is `read_text` (a text file named python is "./python"). `max_bytes` limits the first
    and the last.
    """
    names = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    token_files = [name for name in names if Path(name).suffix in (".bin", ".npy")]
    if token_files:
        if len(names) > 1:
            raise UsageError(f"{os.fspath(token_files[0])} is a token file and comes with {len(names) - 1} other "
                             "names; give exactly one token file, or text files only")
        return open_tokens(names[0], dtype=dtype, vocab_size=vocab_size)
    return python_source(max_bytes) if names == ["python"] else read_text(names, max_bytes)


def python_source(max_bytes: int | None = None) -> np.ndarray:
    """The standard library of the running Python as UTF-8 bytes: uint8 (about 12M,).

    Every *.py file but those of tests, of installed packages and of the build (`_sysconfigdata*` differs between
    machines). The bytes depend on the Python version: processes of one run must have the same one.
    """
    root = python_folder()
    return _concatenate([(path.relative_to(root).as_posix(), path) for path in python_files()], max_bytes)


def read_text(names: str | os.PathLike | Iterable[str | os.PathLike], max_bytes: int | None = None) -> np.ndarray:
    """Bytes of files, directories and globs ("docs/**/*.md"): uint8 (num_bytes,), in memory.

    A directory stands for all files below it that are neither hidden nor binary (a zero byte in the first 8 KiB); a
    file that is named, or matched by a glob, is always read. A file that several names match is read once, an empty one
    below a directory or glob is left out. Raises ValueError for a name that matches nothing, an empty or unreadable
    file that was named, and for no text at all.
    """
    names = [names] if isinstance(names, (str, os.PathLike)) else list(names)
    labels: dict[Path, str] = {}
    for name in names:
        for label, path in _expand(os.fspath(name)):
            labels.setdefault(path, label)
    files = [(labels[path], path) for path in unseen(labels, set()) if path.stat().st_size]
    if not files:
        raise UsageError(f"no text files in {names}; name a file, a directory or a glob with text")
    return _concatenate(files, max_bytes)


def split(tokens: np.ndarray, *, length: int, holdout: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Cuts (num_tokens,) into (training part, held-out part): views, nothing is copied or read.

    The held-out part is the last block: the fewest complete sequences of `length` (plus the last target) that make up
    the fraction `holdout`, and at least one. No token is in both parts, so no training window or target overlaps the
    held-out part. Text files are in shuffled order already. Raises ValueError where either part would be shorter than
    one sequence.
    """
    if not 0 < holdout < 1:
        raise UsageError(f"holdout={holdout}: it is a fraction, between 0 and 1 (0.05 is usual)")
    if length < 1:
        raise UsageError(f"length={length}: a sequence has at least 1 token")
    sequences = max(1, -(-int(holdout * len(tokens)) // length))
    held_out = sequences * length + 1
    if len(tokens) - held_out < length + 1:
        raise UsageError(f"{len(tokens)} tokens are too short: {held_out} held out for validation leave "
                         f"{max(0, len(tokens) - held_out)} to train on and one sequence of length={length} needs "
                         f"{length + 1}; use more text, a shorter length or a smaller holdout")
    return tokens[:-held_out], tokens[-held_out:]


def bigram_loss(train_tokens: np.ndarray, eval_tokens: np.ndarray, *, vocab_size: int = BYTE_VOCAB_SIZE) -> float:
    """Cross entropy in nats per token of a bigram model fitted on one part, evaluated on the other.

    p(b | a) = (count(a, b) + 1) / (count(a) + vocab_size). A language model above it has learned no more than pairs of
    tokens. Of each part at most 4.2M tokens are used (those that `open_tokens` checks): 0.1 s and 100 MB whatever their
    size. Raises ValueError for vocab_size > 4096 (the table has its square), ids outside, and fewer than 2 tokens.
    """
    if not 1 <= vocab_size <= 4096:
        raise UsageError(f"bigram_loss: vocab_size={vocab_size}, but its table of counts has vocab_size squared "
                         "entries; use it for 1..4096, bytes above all")
    counts = []
    for name, part in (("train_tokens", train_tokens), ("eval_tokens", eval_tokens)):
        ids = sample(part)
        if len(ids) < 2 or ids.min() < 0 or ids.max() >= vocab_size:
            raise UsageError(f"bigram_loss: {name} needs at least 2 tokens, all of them within 0..{vocab_size - 1}; "
                             "give byte tokens or the right vocab_size")
        ids = ids.astype(np.int32)  # 4096 squared fits
        pairs = np.bincount(ids[:-1] * vocab_size + ids[1:], minlength=vocab_size**2)
        counts.append(pairs.reshape(vocab_size, vocab_size))
    fitted, tried = counts
    log_p = np.log(fitted + 1.0) - np.log(fitted.sum(axis=1, keepdims=True) + vocab_size)
    return float(-(tried * log_p).sum() / tried.sum())


def _expand(name: str) -> list[tuple[str, Path]]:
    """The files that one name stands for, each with a label that does not depend on its absolute path."""
    path = Path(name).expanduser()
    if path.is_dir():
        return [(file.relative_to(path).as_posix(), file) for file in sorted(files_below(path)) if not is_binary(file)]
    if path.is_file() and not path.stat().st_size:
        raise UsageError(f"{name}: the file is empty; leave it out or give one with text")
    if not (matches := matching(path)):
        raise UsageError(f"{name}: no such file, directory or glob match; check the spelling")
    return [(file.name, file) for file in matches]


def _concatenate(files: list[tuple[str, Path]], max_bytes: int | None) -> np.ndarray:
    """Bytes of all (label, file) with a newline between, in the order of a hash of the labels.

    The hash shuffles (a split is not alphabetical) without a random generator: the order is the same on every platform,
    and does not change when files are added.
    """
    if max_bytes is not None and max_bytes < 1:
        raise UsageError(f"max_bytes={max_bytes}: at least 1 is needed, or None for no limit")
    parts, size = [], 0
    for _, path in sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file[0])).digest()):
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            raise UsageError(f"{path}: cannot be read as bytes ({error.strerror}); change its permissions or leave it "
                             "out") from error
        if parts[-1].startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UsageError(f"{path} is text in UTF-16, of which a model of bytes learns every second byte as a zero: "
                             "convert it (iconv -f utf-16 -t utf-8), or name other files.")
        size += len(parts[-1]) + 1
        if max_bytes is not None and size > max_bytes:
            break
    return np.frombuffer(b"\n".join(parts), np.uint8)[:max_bytes]


RAW_DTYPES = {"uint16": "<u2", "uint32": "<u4"}  # of .bin files: little-endian everywhere

_NUM_BLOCKS, _BLOCK_TOKENS = 64, 1 << 16  # 4.2M tokens are checked where there are more


def open_tokens(path: str | os.PathLike, *, dtype: str | None = None, vocab_size: int | None = None) -> np.ndarray:
    """A memory-mapped token file: (num_tokens,) of its integer dtype, read only where indexed.

    `.npy` stores its dtype. `.bin` is raw and little-endian, as nanoGPT writes it: `dtype` is "uint16" or "uint32", by
    default what the name says ("train.uint32.bin"), else uint16. With a `vocab_size` ids are checked at once: all of
    them up to 4.2M tokens, above that 64 evenly spaced blocks of 65536, the first and the last among them (8 to 17 MB
    of reading whatever the size of the file). `Batches(vocab_size=)` checks every id that is used. Raises ValueError
    for a file that is missing, empty, of another dtype or rank, or with ids out of range.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: no such file; name an existing .bin or .npy token file")
    if not path.stat().st_size:
        raise UsageError(f"{path}: the file is empty; give one with tokens")
    if path.suffix == ".npy":
        tokens = _map_npy(path, dtype)
    elif path.suffix == ".bin":
        tokens = _map_raw(path, dtype)
    else:
        raise UsageError(f"{path}: a token file ends in .bin (raw) or .npy; rename it, or read it as text with "
                         "read_text")
    if vocab_size is not None:
        checked = sample(tokens)
        low, high = int(checked.min()), int(checked.max())
        if low < 0 or high >= vocab_size:
            raise UsageError(f"{path}: token ids reach {low}..{high} but vocab_size={vocab_size} allows "
                             f"0..{vocab_size - 1}; give the vocab_size of the tokenizer that wrote the file, or its "
                             "true dtype")
    return tokens


def sample(tokens: np.ndarray) -> np.ndarray:
    """All tokens up to 4.2M, above that evenly spaced blocks with the first and the last."""
    if len(tokens) <= _NUM_BLOCKS * _BLOCK_TOKENS:
        return np.asarray(tokens)
    starts = np.arange(_NUM_BLOCKS) * (len(tokens) - _BLOCK_TOKENS) // (_NUM_BLOCKS - 1)
    return np.concatenate([tokens[i : i + _BLOCK_TOKENS] for i in starts])


def _map_npy(path: Path, dtype: str | None) -> np.ndarray:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header raises whatever it leads to: ValueError, OverflowError, TypeError
        raise UsageError(f"{path}: not a .npy array ({error}); write it with np.save") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UsageError(f"{path}: holds {tokens.dtype} of shape {tokens.shape}, not a 1-D array of integer token ids; "
                         "save tokens.ravel() as uint16 or uint32")
    if dtype is not None and tokens.dtype.name != dtype:
        raise UsageError(f"{path}: holds {tokens.dtype}, not {dtype}; leave dtype out for .npy")
    if not len(tokens):
        raise UsageError(f"{path}: holds 0 tokens; give a file with tokens")
    return tokens


def _map_raw(path: Path, dtype: str | None) -> np.ndarray:
    in_name = Path(path.stem).suffix[1:]
    dtype = dtype or (in_name if in_name in RAW_DTYPES else "uint16")
    if dtype not in RAW_DTYPES:
        raise UsageError(f"{path}: dtype={dtype!r}, but a .bin file holds uint16 or uint32; save other integers "
                         "as .npy")
    size, width = path.stat().st_size, np.dtype(RAW_DTYPES[dtype]).itemsize
    if size % width:
        raise UsageError(f"{path}: {size} bytes are not a whole number of {dtype} tokens of {width} bytes; give the "
                         "dtype it was written in, or a file that is not cut short")
    tokens = np.memmap(path, RAW_DTYPES[dtype], mode="r")
    first = tokens[:4096]
    if dtype == "uint16" and len(first) > 64 and first[::2].any() and not first[1::2].any():
        raise UsageError(f"{path}: every second uint16 token is 0, so it looks like uint32; open it with "
                         "dtype='uint32'")
    return tokens
