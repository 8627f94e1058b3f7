"""The command `tokenize`: text to a folder of tokens that runs map, with a tokenizer of others or one of its own."""

import dataclasses
from pathlib import Path
from typing import Annotated

from zero_jax.cli.environment import check_folder
from zero_jax.cli.options.choices import Within, settle
from zero_jax.cli.options.data import check_has_fields
from zero_jax.data import extras
from zero_jax.data.documents import check_new, cut_text, write_tokenized
from zero_jax.data.text_sources import check_file, files_of, read_documents
from zero_jax.data.tokenizer import load_tokenizer, train_bpe
from zero_jax.errors import UsageError

VOCAB_SIZE = 8192
"""Of a tokenizer that is trained, where none is given."""


@dataclasses.dataclass(frozen=True)
class TokenizeConfig:
    """Tokenize text once, for runs that map it: train --data OUT. Trains a tokenizer where none is given."""

    out: Path
    """The new folder: tokens, tokenizer.json (which transformers loads, too) and what they are."""

    data: tuple[str, ...] = ("python",)
    """Files, folders and globs of text, .jsonl, .parquet or .array_record; or "python", its own library."""

    tokenizer: Path | None = None
    """A tokenizer.json of Hugging Face, a .model of SentencePiece, or a folder with one. None: a byte-level BPE is
    trained on the text."""

    vocab_size: Annotated[int | None, Within(1)] = None
    """Of the tokenizer that is trained. None: 8192."""

    sentinels: Annotated[int, Within(0)] = 0
    """Tokens <extra_id_N> of the tokenizer that is trained, for span corruption; T5 has 100."""

    text_field: str = "text"
    """The field of JSON lines, or column of Parquet, that has the text."""

    max_bytes: Annotated[int | None, Within(1)] = None
    """Read no more text than this, in bytes. None: all."""

    def check(self) -> None:
        """Raises ValueError for what is wrong and can be known from the options and the start of the files."""
        settle(self)
        if self.tokenizer is not None and (self.vocab_size is not None or self.sentinels):
            raise UsageError("tokenizer, and vocab_size or sentinels: the first is used as it is, the others are of "
                             "one that is trained: leave one out.")
        if not self.data or "" in self.data:
            raise UsageError('data is empty: name files, or "python".')
        check_folder("out", self.out)
        check_new(self.out.expanduser())
        extras.check_installed("tokenizers", "tokenize")
        if self.tokenizer is not None:
            load_tokenizer(self.tokenizer)
        for name in self.data:
            for path in files_of(name) if name != "python" else ():
                check_file(path, field=self.text_field)
        if self.text_field != "text":
            check_has_fields(self.text_field, self.data)


def tokenize_command(config: TokenizeConfig) -> list[str]:
    """Writes the folder and returns what to say of it. The text is read twice where a tokenizer is trained on it."""
    def texts():
        return cut_text(read_documents(config.data, field=config.text_field), config.max_bytes)

    asked, lines = config.vocab_size or VOCAB_SIZE, []
    if config.tokenizer is None:
        tokenizer = train_bpe(texts(), vocab_size=asked, sentinels=config.sentinels)
        if tokenizer.vocab_size < asked:
            lines.append(f"The text has pairs for a vocabulary of {tokenizer.vocab_size:,} only, and not {asked:,}.")
    else:
        tokenizer = load_tokenizer(config.tokenizer)
    size = 0

    def counted():
        nonlocal size
        for text in texts():
            size += len(text.encode())
            yield text

    try:
        written = write_tokenized(config.out, counted(), tokenizer, sources=config.data)
    except OSError as error:  # not of the data, of which reading tells
        raise UsageError(f"out={config.out} cannot be written ({error.strerror or error}): free space, or give another "
                         "folder.") from error
    return [*lines, f"{written.num_documents:,} documents, {written.num_tokens:,} tokens of a vocabulary of "
            f"{written.vocab_size:,} in {written.folder}: {size / written.num_tokens:.2f} bytes for a token. "
            f"train --data {written.folder} reads them."]
