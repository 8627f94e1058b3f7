"""Token files: ids written by a tokenizer, memory-mapped and never read completely."""

import os
from pathlib import Path

import numpy as np

from zero_jax.errors import UsageError

RAW_DTYPES = {"uint16": "<u2", "uint32": "<u4"}  # of .bin files: little-endian everywhere

_NUM_BLOCKS, _BLOCK_TOKENS = 64, 1 << 16  # 4.2M tokens are checked where there are more


def open_tokens(
    path: str | os.PathLike, *, dtype: str | None = None, vocab_size: int | None = None
) -> np.ndarray:
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
        raise UsageError(
            f"{path}: a token file ends in .bin (raw) or .npy; rename it, or read it"
            " as text with read_text"
        )
    if vocab_size is not None:
        checked = sample(tokens)
        low, high = int(checked.min()), int(checked.max())
        if low < 0 or high >= vocab_size:
            raise UsageError(
                f"{path}: token ids reach {low}..{high} but vocab_size={vocab_size} allows"
                f" 0..{vocab_size - 1}; give the vocab_size of the tokenizer that wrote the file,"
                " or its true dtype"
            )
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
        raise UsageError(
            f"{path}: holds {tokens.dtype} of shape {tokens.shape}, not a 1-D array of integer"
            " token ids; save tokens.ravel() as uint16 or uint32"
        )
    if dtype is not None and tokens.dtype.name != dtype:
        raise UsageError(f"{path}: holds {tokens.dtype}, not {dtype}; leave dtype out for .npy")
    if not len(tokens):
        raise UsageError(f"{path}: holds 0 tokens; give a file with tokens")
    return tokens


def _map_raw(path: Path, dtype: str | None) -> np.ndarray:
    in_name = Path(path.stem).suffix[1:]
    dtype = dtype or (in_name if in_name in RAW_DTYPES else "uint16")
    if dtype not in RAW_DTYPES:
        raise UsageError(
            f"{path}: dtype={dtype!r}, but a .bin file holds uint16 or uint32; save"
            " other integers as .npy"
        )
    size, width = path.stat().st_size, np.dtype(RAW_DTYPES[dtype]).itemsize
    if size % width:
        raise UsageError(
            f"{path}: {size} bytes are not a whole number of {dtype} tokens of {width} bytes; give"
            " the dtype it was written in, or a file that is not cut short"
        )
    tokens = np.memmap(path, RAW_DTYPES[dtype], mode="r")
    first = tokens[:4096]
    if dtype == "uint16" and len(first) > 64 and first[::2].any() and not first[1::2].any():
        raise UsageError(
            f"{path}: every second uint16 token is 0, so it looks like uint32; open"
            " it with dtype='uint32'"
        )
    return tokens
