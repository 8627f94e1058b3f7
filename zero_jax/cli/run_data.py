"""What the options of a run say of its data, read and divided: training and evaluation batches, prompts, text."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zero_jax.cli.train_config import TrainConfig
from zero_jax.data import corpus
from zero_jax.data.batches import Batches
from zero_jax.data.documents import Documents, cut_text, documents_at, tokenize
from zero_jax.data.example_batches import ExampleBatches
from zero_jax.data.objectives import causal
from zero_jax.data.packing import DocumentRows, Windows
from zero_jax.data.positions import NumberedBatches
from zero_jax.data.text_sources import read_documents
from zero_jax.data.token_file import open_tokens
from zero_jax.data.tokenized import Tokenized, is_tokenized, open_tokenized
from zero_jax.data.tokenizer import Tokenizer
from zero_jax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run. train_tokens, eval_tokens: their numbers.

    eval_part: tokens of the evaluation set, (number,). bigram: the loss of a bigram model, where the vocabulary is
    small. batches: from the sharding of a batch to the batches of training and of evaluation. text: of ids. summary:
    a line for the user.
    """

    train_tokens: int
    eval_tokens: int
    eval_part: np.ndarray
    bigram: float | None
    batches: Callable[[Any], tuple[NumberedBatches, NumberedBatches]]
    text: Callable[[np.ndarray], str]
    summary: str


def load_data(config: TrainConfig, vocab_size: int | None) -> RunData:
    """Reads the data of `config`; raises ValueError for what is wrong with them, or too little.

    vocab_size: of the model, where it says.
    """
    return _documents(config, vocab_size) if config.reads_documents else _plain(config, vocab_size)


def _plain(config: TrainConfig, vocab_size: int | None) -> RunData:
    """Of one array of tokens, bytes or a file's."""
    tokens = corpus.load(config.data, max_bytes=config.max_bytes, vocab_size=vocab_size)
    train, held_out = _parts(tokens, config, vocab_size)
    shape: dict[str, Any] = {"batch_size": config.batch_size, "length": config.seq_len, "vocab_size": vocab_size}

    def batches(sharding: Any) -> tuple[Batches, Batches]:
        shape["sharding"] = sharding
        return Batches(train, seed=config.seed, **shape), Batches(held_out, **shape)

    bigram = _bigram(vocab_size if config.token_file else corpus.BYTE_VOCAB_SIZE, train, held_out)
    text = _ids_text if config.token_file else corpus.decode
    return RunData(len(train), len(held_out), held_out, bigram, batches, text, _counts(len(train), len(held_out)))


def _documents(config: TrainConfig, vocab_size: int | None) -> RunData:
    """Of documents: tokenized, mixed, packed or padded."""
    tokenizer = config.run_tokenizer()
    sources = _read(config, config.data, tokenizer, separate=config.data_weights is not None)
    sizes = [len(source.tokens) for source in sources]
    weights = config.data_weights or [size / sum(sizes) for size in sizes]
    if config.eval_data:
        train, held_out = sources, _read(config, config.eval_data, tokenizer, separate=False)
        eval_weights = None
    else:
        least = [math.ceil(weight * config.batch_size + 1) * (config.seq_len + 1) for weight in weights]
        parts = [source.split(config.eval_fraction, least=few) for source, few in zip(sources, least, strict=True)]
        train, held_out = [part for part, _ in parts], [part for _, part in parts]
        eval_weights = config.data_weights
    train_tokens, eval_tokens = (sum(len(part.tokens) for part in parts) for parts in (train, held_out))
    rows = [[_rows(part, config, tokenizer) for part in parts] for parts in (train, held_out)]

    def batches(sharding: Any) -> tuple[ExampleBatches, ExampleBatches]:
        shape = {"batch_size": config.batch_size, "sharding": sharding, "vocab_size": vocab_size,
                 "make": lambda row, _: _as_batch(row, config.documents), "name": f"causal, {config.documents}"}
        return (ExampleBatches(rows[0], seed=config.seed, weights=config.data_weights, **shape),
                ExampleBatches(rows[1], weights=eval_weights, **shape))

    used = sum(each.used_fraction * each.num_examples for each in rows[0]) / max(1, sum(
        each.num_examples for each in rows[0]))
    summary = _counts(train_tokens, eval_tokens) + ("" if config.documents == "concatenate" else
                                  f" Rows are {used:.1%} tokens, and the rest padding ({config.documents}).")
    eval_part = held_out[0].tokens
    bigram = _bigram(tokenizer.vocab_size, train[0].tokens, eval_part) if len(train) == 1 else None
    return RunData(train_tokens, eval_tokens, eval_part, bigram, batches, _decoder(tokenizer), summary)


def _read(config: TrainConfig, names: Sequence[str], tokenizer: Tokenizer | Tokenized, *, separate: bool
          ) -> list[Documents]:
    """The documents of `names`: one source each, or if not `separate` one of all that are text."""
    read, texts = [], []
    for name in names:
        if is_tokenized(name):
            read.append(open_tokenized(name).documents())
        elif name.endswith((".bin", ".npy")):
            tokens, eos = open_tokens(name), tokenizer.specials.eos
            whole = Documents(tokens, np.array([0, len(tokens)]))
            read.append(documents_at(tokens, eos) if eos is not None and config.documents != "concatenate" else whole)
        elif separate:
            read.append(_tokenized(config, [name], tokenizer))
        else:
            texts.append(name)
    return [*read, _tokenized(config, texts, tokenizer)] if texts else read


def _tokenized(config: TrainConfig, names: Sequence[str], tokenizer: Tokenizer | Tokenized) -> Documents:
    encoder = tokenizer.load_tokenizer() if isinstance(tokenizer, Tokenized) else tokenizer
    documents = (text for name in names for text in read_documents(name, field=config.text_field))
    return tokenize(cut_text(documents, config.max_bytes), encoder)


def _rows(documents: Documents, config: TrainConfig, tokenizer: Tokenizer | Tokenized) -> Any:
    if config.documents == "concatenate":
        return Windows(documents, config.seq_len, causal=True)
    pad = tokenizer.specials.pad
    return DocumentRows(documents, config.seq_len, pack=config.documents == "pack", causal=True, pad=pad or 0)


def _as_batch(row: dict[str, np.ndarray], rows: str) -> dict[str, np.ndarray]:
    """A row with its weights; where each document has one, no segments: what is predicted never attends to padding."""
    row = causal(row)
    return {name: array for name, array in row.items() if rows != "pad" or name not in ("segment_ids", "positions")}


def _parts(tokens: np.ndarray, config: TrainConfig, vocab_size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(training part, evaluation part): the set of `eval_data`, or a twentieth that is held out, at least one batch."""
    one_batch = config.batch_size * config.seq_len + 1
    if config.eval_data:
        parts = tokens, corpus.load(config.eval_data, max_bytes=config.max_bytes, vocab_size=vocab_size)
        for name, part in zip(("data", "eval_data"), parts, strict=True):
            if len(part) < one_batch:
                raise UsageError(f"{name} has {len(part):,} tokens, and one batch takes {one_batch:,}: give more, or a "
                                 f"smaller batch_size={config.batch_size} or seq_len={config.seq_len}.")
        return parts
    if len(tokens) < 2 * one_batch + config.seq_len:
        raise UsageError(
            f"The data has {len(tokens):,} tokens, and two batches, one of them held out, take {2 * one_batch:,}: give "
            f"more data, or a smaller batch_size={config.batch_size} or seq_len={config.seq_len}.")
    return corpus.split(tokens, length=config.seq_len, holdout=max(config.eval_fraction, one_batch / len(tokens)))


def _bigram(vocab_size: int | None, *parts: np.ndarray) -> float | None:
    if vocab_size is None or vocab_size > 4096:
        return None  # its table of counts has the square of that
    return corpus.bigram_loss(*parts, vocab_size=vocab_size)


def _counts(train: int, held_out: int) -> str:
    return f"Data: {train:,} tokens to train on, {held_out:,} to evaluate on."


def _ids_text(ids: np.ndarray) -> str:
    return " ".join(map(str, ids))


def _decoder(tokenizer: Tokenizer | Tokenized) -> Callable[[np.ndarray], str]:
    """Ids to text; to the ids themselves where the package that decodes is not installed."""
    if not isinstance(tokenizer, Tokenized):
        return tokenizer.decode
    try:
        return tokenizer.load_tokenizer().decode
    except UsageError:
        return _ids_text
