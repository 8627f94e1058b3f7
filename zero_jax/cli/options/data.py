"""The options of the data of a run. Nothing here imports JAX."""

import dataclasses
import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from zero_jax.cli.options.choices import Within
from zero_jax.cli.options.run import WITH_RESPONSES
from zero_jax.data import extras
from zero_jax.data.documents import Tokenized, is_tokenized, open_tokenized
from zero_jax.data.image_files import is_images
from zero_jax.data.images import DIGITS
from zero_jax.data.mixture import check_weights
from zero_jax.data.remote_files import is_remote
from zero_jax.data.text_sources import check_file, check_not_compressed, files_of, format_of, has_documents
from zero_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from zero_jax.errors import UsageError, few

BYTES = 256
"""Vocabulary size of text, which is read as bytes."""


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """What a run reads, and how."""

    data: tuple[str, ...] = ("python",)
    """Files, folders and globs of text, .jsonl, .parquet or .array_record, those of .parquet also as gs://bucket/folder
    (extra gcs); folders that `tokenize` has written; or one file of tokens (.bin, .npy); or "python", its own library.
    What several names stand for is read once. Text is read as bytes where there is no tokenizer. For models of images:
    a folder with one of pictures for each class, .parquet of pictures and classes, one .npz or folder with the arrays
    images and labels, or "digits", those of scikit-learn."""

    data_weights: tuple[float, ...] | None = None
    """Fractions of the sequences, one for each name in data, whose sum is 1. None: by their sizes."""

    tokenizer: Path | None = None
    """A tokenizer.json of Hugging Face, a .model of SentencePiece, or a folder with one, for data that are text.
    Default: that of the folder that --model names, where it has one; else bytes."""

    text_field: str = "text"
    """The field of JSON lines, or column of Parquet, that has the text."""

    documents: Literal["concatenate", "pack", "pad"] = None  # pyright: ignore[reportAssignmentType]
    """Rows of documents. concatenate: one after another, cut anywhere; pack: several in a row, with no attention from
    one to another; pad: each has a row. None: concatenate, and pack with objective=instruct."""

    max_bytes: Annotated[int | None, Within(1)] = None
    """Read no more text than this, in bytes, of each name in data where there are data_weights. None: all. Not for
    tokens."""

    prefetch: Annotated[int, Within(0, 1024)] = 2
    """Batches that a thread reads and puts on the devices ahead of the step. 0: none."""

    def check_data_options(self) -> None:
        """Raises ValueError for values that are wrong whatever the files hold."""
        if not self.data or "" in self.data:
            raise UsageError('data is empty: name files, or "python".')
        if self.data_weights is not None:
            check_weights(self.data_weights, len(self.data))

    def check_data(self) -> None:
        """Raises ValueError for data that are not there, or empty, or whose start shows that they are no text."""
        if self.reads_images:
            return self._check_images()
        if getattr(self, "objective", None) in WITH_RESPONSES:
            return check_data_files("data", self.data)  # the objective looks into them
        reads_documents = self.reads_documents
        names = tuple(name for name in self.data if name != "python") if reads_documents else self.data
        check_data_files("data", names)
        if self.max_bytes is not None:
            self._check_no_tokens()
        if self.data_weights is not None:
            check_distinct(self.data)
        if self.text_field != "text":
            check_has_fields(self.text_field, (*self.data, *getattr(self, "eval_data", ())))
        if reads_documents:
            extras.check_installed("grain", "data of documents")
            self.run_tokenizer()
            self.check_text("data", self.data)

    def check_text(self, option: str, names: tuple[str, ...]) -> None:
        """Raises ValueError for what the starts of the files of `names` show to be wrong."""
        for name in names:
            if name != "python" and not is_tokenized(name) and not is_token_file(name):
                for path in files_of(name):
                    check_file(path, field=self.text_field)
            elif (is_token_file(name) and self.documents != "concatenate"
                  and self.run_tokenizer().specials.eos is None):
                raise UsageError(f"{option}: {name} with documents={self.documents}: documents are told apart by their "
                                 "end of text: give the tokenizer that wrote it.")

    def data_vocab_size(self) -> int | None:
        """The size of the data's vocabulary, where it is known before they are read."""
        if self.reads_documents and (self.tokenizer is not None or not any(map(is_token_file, self.data))):
            return self.run_tokenizer().vocab_size
        return None if self.token_file else BYTES

    def run_tokenizer(self) -> "Tokenizer | Tokenized":
        """The tokenizer of the data: that which is given, or that of a folder of tokens, else bytes.

        Raises ValueError where those of several folders, or that which is given, differ.
        """
        folders = [open_tokenized(name) for name in (*self.data, *getattr(self, "eval_data", ())) if is_tokenized(name)]
        chosen = load_tokenizer(self.tokenizer) if self.tokenizer is not None else None
        for folder in folders:
            known = chosen.fingerprint if chosen is not None else folders[0].tokenizer
            if folder.tokenizer != known:
                source = self.tokenizer if chosen is not None else folders[0].folder
                raise UsageError(f"{folder.folder} was tokenized with another tokenizer than {source}: ids would mean "
                                 "other texts: tokenize it again, or give its own.")
        return chosen or (folders[0] if folders else ByteTokenizer())

    def _check_no_tokens(self) -> None:
        for option, names in (("data", self.data), ("eval_data", getattr(self, "eval_data", ()))):
            for name in filter(is_tokens, names):
                raise UsageError(f"max_bytes={self.max_bytes}: {option}: {name} has tokens, all of which are read, and "
                                 "no text: leave it out, or give fewer tokens (tokenize --max-bytes).")

    def _check_images(self) -> None:
        for option in ("tokenizer", "data_weights", "max_bytes"):
            if getattr(self, option) is not None:
                raise UsageError(f"{option}: data={self.data[0]} are images, which have none: leave it out.")
        for option, default in (("documents", "concatenate"), ("text_field", "text")):
            if getattr(self, option) != default:
                raise UsageError(f"{option}: data={self.data[0]} are images and no documents: leave it out.")
        extras.check_installed("grain", "data of images")
        for option, names in (("data", self.data), ("eval_data", getattr(self, "eval_data", ()))):
            if len(names) > 1:
                raise UsageError(f"{option}: images come from one file or folder, and not {len(names)}: give one.")
            if names == (DIGITS,):
                extras.check_installed("sklearn", "the images of digits")
            else:
                check_data_files(option, names)

    @property
    def reads_images(self) -> bool:
        """Whether data are images with labels."""
        return any(map(is_images, self.data))

    @property
    def reads_documents(self) -> bool:
        """Whether data are read as documents, and not as one text of bytes or one file of tokens.

        Files have documents, also those of a folder or a glob.
        """
        names = (*self.data, *getattr(self, "eval_data", ()))
        return (self.tokenizer is not None or self.data_weights is not None or self.documents != "concatenate"
                or any(is_tokenized(name) or has_documents(name) for name in names
                       if name != "python" and not is_images(name)))

    @property
    def batch_arrays(self) -> dict[str, str]:
        """The arrays of a batch, all of shape (batch_size, seq_len), with their dtypes."""
        arrays = {"inputs": "int32", "targets": "int32"}
        if self.documents != "concatenate":
            arrays["weights"] = "float32"
        if self.documents == "pack":
            arrays |= {"segment_ids": "int32", "positions": "int32"}
        return arrays

    @property
    def token_file(self) -> bool:
        """Whether the data are ids of some tokenizer, and not text read as bytes."""
        return is_token_file(self.data[0])


def is_token_file(name: str) -> bool:
    """Whether data of that name are ids of some tokenizer, and not text."""
    return Path(name).suffix in (".bin", ".npy")


def is_tokens(name: str) -> bool:
    """Whether data of that name are tokens already: a file or a folder of them."""
    return is_tokenized(name) or is_token_file(name)


def check_distinct(data: tuple[str, ...]) -> None:
    """Raises ValueError where two names of `data`, each of which has a weight, stand for one file."""
    seen: set[str] = set()
    for name in data:
        paths = {*_paths((name,))}
        if paths & seen:
            raise UsageError(f"data: {few(sorted(paths & seen))} is in two of the names, and each of them has a weight "
                             "of its own in data_weights: leave it out of one.")
        seen |= paths


def check_has_fields(text_field: str, names: tuple[str, ...]) -> None:
    """Raises ValueError where no file of `names` has fields, so that `text_field` would change nothing."""
    files = (file for name in names if name != "python" and not is_tokenized(name) for file in files_of(name))
    if not any(format_of(file) in ("jsonl", "parquet") for file in files):
        raise UsageError(f"text_field={text_field}: no file of {', '.join(names)} has fields, as JSON lines and "
                         "Parquet have: leave it out.")


def check_data_files(option: str, data: tuple[str, ...]) -> None:
    """Raises ValueError for files of `option` that are not there, cannot be read as data, or are empty."""
    for name in data:
        if is_remote(name):
            files_of(name)  # which raises
            continue
        path = Path(name).expanduser()
        if data not in (("python",), (DIGITS,)) and not path.exists() and not glob.glob(str(path), recursive=True):
            raise UsageError(f"{option}: {name}: no such file, folder or glob match.")
        if path.exists() and not path.is_dir():
            if not path.is_file():
                raise UsageError(f"{option}: {name}: it is a pipe, a socket or a device: give a file.")
            if not path.stat().st_size:
                raise UsageError(f"{option}: {name}: the file is empty: give one with text or tokens.")
        if not (is_images(name) or is_tokenized(name) or name in ("python", DIGITS)):
            files = files_of(name)
            for file in [] if path.is_dir() else files:  # of a folder they are read later, many of them
                check_not_compressed(file)


def check_eval_data(options: DataOptions, names: tuple[str, ...]) -> None:
    """Raises ValueError for an evaluation set that is not there, of another kind than data, or a part of data."""
    if not names:
        return
    check_data_files("eval_data", tuple(name for name in names if name not in ("python", DIGITS)) or names)
    with_responses = getattr(options, "objective", None) in WITH_RESPONSES  # the objective looks into them
    if any(map(is_images, names)) != options.reads_images:
        raise UsageError("data and eval_data: one is images and the other is text: give two of a kind.")
    if not options.reads_documents and is_token_file(names[0]) != options.token_file:
        raise UsageError("data and eval_data: one is a file of tokens and the other is text: give two of a kind.")
    if options.reads_documents and not with_responses:
        options.check_text("eval_data", names)
    both = {*_paths(names)} & {*_paths(options.data)}
    if both:
        raise UsageError(f"eval_data: {few(sorted(both))} is in data, too: the model would be evaluated on what it was "
                         "trained on: leave it out of one.")


def _paths(names: tuple[str, ...]) -> Iterator[str]:
    """The files of `names`, and folders of tokens, by their true paths."""
    for name in names:
        whole = not is_remote(name) and (is_images(name) or is_tokenized(name))
        yield from [name] if name in ("python", DIGITS) else (
            str(file.resolve()) for file in ([Path(name).expanduser()] if whole else files_of(name)))
