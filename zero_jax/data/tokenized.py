"""A folder of tokenized documents, which `zero_jax tokenize` writes and `train --data FOLDER` maps. No JAX.

- tokens.uint16.bin (or .uint32.bin): the ids of all documents, one after another
- documents.npy: int64 (num_documents + 1,), where each begins
- tokenizer.json, or tokenizer.model: the tokenizer; tokenizer_config.json for transformers
- tokenized.json: what is in the folder; written last, so that a folder without it is incomplete
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from zero_jax.data.documents import Documents, encode_documents, token_dtype
from zero_jax.data.token_file import open_tokens
from zero_jax.data.tokenizer import Specials, Tokenizer, load_tokenizer
from zero_jax.errors import UsageError, printable
from zero_jax.files import read_regular

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
                            tuple(special["ids"]))
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
