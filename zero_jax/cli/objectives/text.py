"""The text of a run as its options name it, divided into a part to train on and one held out; and its next token."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero_jax.cli.objectives.objective import Objective, RunData, batches_of, check_text
from zero_jax.cli.options.data import is_tokens
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.evaluation import continuations
from zero_jax.data import corpus
from zero_jax.data.batches import Batches
from zero_jax.data.corpus import open_tokens
from zero_jax.data.documents import Documents, Tokenized, cut_text, documents_at, is_tokenized, open_tokenized, tokenize
from zero_jax.data.objectives import Key, causal
from zero_jax.data.packing import DocumentRows, Windows
from zero_jax.data.text_sources import read_documents, unseen
from zero_jax.data.tokenizer import Tokenizer
from zero_jax.errors import UsageError
from zero_jax.step.step import ZeroTrainStep


def document_data(
    config: TrainConfig, tokenizer: Tokenizer | Tokenized, *, rows: Callable[..., Any],
    make: Callable[..., dict[str, np.ndarray]], name: str, vocab_size: int | None, row_tokens: int | None = None,
    baseline: Callable[[np.ndarray, np.ndarray], Mapping[str, float]] | None = None
) -> RunData:
    """The data of a run from the documents of its options.

    Args:
      config: which documents, and how they are mixed and held out.
      tokenizer: that encodes text.
      rows: of (documents, complete), their rows as a source of examples; complete: every token is in one.
      make: an example from (row, key), where the key is (seed, place).
      name: of that, with what changes its result: a run that resumes must have the same.
      vocab_size: of the model, where it says.
      row_tokens: that a row takes. None: seq_len and one.
      baseline: of the tokens to train on and those held out, where there is one source.
    """
    sources = _read(config, config.data, tokenizer, separate=config.data_weights is not None)
    sizes = [len(source.tokens) for source in sources]
    weights = config.data_weights or [size / sum(sizes) for size in sizes]
    if config.eval_data:
        train, held_out = sources, _read(config, config.eval_data, tokenizer, separate=False)
        eval_weights = None
    else:
        each = row_tokens or config.seq_len + 1
        least = [math.ceil(weight * config.batch_size + 1) * each for weight in weights]
        parts = [source.split(config.eval_fraction, least=few) for source, few in zip(sources, least, strict=True)]
        train, held_out = [part for part, _ in parts], [part for _, part in parts]
        eval_weights = config.data_weights
    sets = [[rows(part, complete) for part in parts] for parts, complete in ((train, False), (held_out, True))]
    batches = batches_of(config, *sets, name=name, make=make, vocab_size=vocab_size, weights=config.data_weights,
                         eval_weights=eval_weights)
    used = sum(each.used_fraction * each.num_examples for each in sets[0]) / max(1, sum(
        each.num_examples for each in sets[0]))
    train_tokens, eval_tokens = (sum(len(part.tokens) for part in parts) for parts in (train, held_out))
    summary = counts_text(train_tokens, eval_tokens) + (
        "" if config.documents == "concatenate" else
        f" Rows are {used:.1%} tokens, and the rest padding ({config.documents}).")
    baselines = baseline(train[0].tokens, held_out[0].tokens) if baseline and len(train) == 1 else {}
    return RunData(batches, summary, held_out[0].tokens, _decoder(tokenizer), baselines)


def token_parts(tokens: np.ndarray, config: TrainConfig, vocab_size: int | None) -> tuple[np.ndarray, np.ndarray]:
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


def counts_text(train: int, held_out: int, items: str = "tokens") -> str:
    """How many of what there are, in a line."""
    return f"Data: {train:,} {items} to train on, {held_out:,} held out."


def ids_text(ids: np.ndarray) -> str:
    """Ids of a tokenizer that is not known."""
    return " ".join(map(str, ids))


def _read(config: TrainConfig, names: Sequence[str], tokenizer: Tokenizer | Tokenized, *, separate: bool
          ) -> list[Documents]:
    """The documents of `names`: one source each, or if not `separate` one of all that are text.

    What is named twice is read once.
    """
    texts = [name for name in names if not is_tokens(name)]
    if separate:  # no file is in two of them: such options are refused
        return [_tokenized(config, [name], tokenizer) if name in texts
                else _opened(config, Path(name).expanduser(), tokenizer) for name in names]
    tokens = unseen((Path(name).expanduser() for name in names if name not in texts), set())
    read = [_opened(config, path, tokenizer) for path in tokens]
    return [*read, _tokenized(config, texts, tokenizer)] if texts else read


def _opened(config: TrainConfig, path: Path, tokenizer: Tokenizer | Tokenized) -> Documents:
    """The documents of a folder of tokens, or of a file of them, whose ends of text tell them apart."""
    if is_tokenized(path):
        return open_tokenized(path).documents()
    tokens, eos = open_tokens(path), tokenizer.specials.eos
    whole = Documents(tokens, np.array([0, len(tokens)]))
    return documents_at(tokens, eos) if eos is not None and config.documents != "concatenate" else whole


def _tokenized(config: TrainConfig, names: Sequence[str], tokenizer: Tokenizer | Tokenized) -> Documents:
    encoder = tokenizer.load_tokenizer() if isinstance(tokenizer, Tokenized) else tokenizer
    return tokenize(cut_text(read_documents(names, field=config.text_field), config.max_bytes), encoder)


def _decoder(tokenizer: Tokenizer | Tokenized) -> Callable[[np.ndarray], str]:
    """Ids to text; to the ids themselves where the package that decodes is not installed."""
    if not isinstance(tokenizer, Tokenized):
        return tokenizer.decode
    try:
        return tokenizer.load_tokenizer().decode
    except UsageError:
        return ids_text


class Causal(Objective):
    """Each token from those before it, of text one after another, packed or padded documents."""

    name, model_kind = "causal", "next token"

    def check(self) -> None:
        """As `Objective`."""
        check_text(self, None if self.config.reads_images else self.config.data_vocab_size())

    def describe(self) -> str:
        """As `Objective`."""
        return "the next token"

    def load_data(self) -> RunData:
        """Of one array of tokens, or of documents. A bigram model is the baseline where the vocabulary is small."""
        return self._documents() if self.config.reads_documents else self._plain()

    def samples(self, step: ZeroTrainStep, state: Any, data: RunData) -> tuple[str, ...]:
        """Continuations of held-out text."""
        return continuations(self.config, self.choice, step, state, data.held_out, data.text)

    def _plain(self) -> RunData:
        config, vocab_size = self.config, self.vocab_size
        tokens = corpus.load(config.data, max_bytes=config.max_bytes, vocab_size=vocab_size)
        train, held_out = token_parts(tokens, config, vocab_size)
        shape: dict[str, Any] = {"batch_size": config.batch_size, "length": config.seq_len, "vocab_size": vocab_size}

        def batches(sharding: Any) -> tuple[Batches, Batches]:
            shape["sharding"] = sharding
            return Batches(train, seed=config.seed, **shape), Batches(held_out, complete=True, **shape)

        return RunData(batches, counts_text(len(train), len(held_out)), held_out,
                       ids_text if config.token_file else corpus.decode,
                       _bigram(vocab_size if config.token_file else corpus.BYTE_VOCAB_SIZE, train, held_out))

    def _documents(self) -> RunData:
        config = self.config
        tokenizer = config.run_tokenizer()
        pad = tokenizer.specials.pad or 0

        def rows(documents: Documents, complete: bool) -> Any:
            if config.documents == "concatenate":
                return Windows(documents, config.seq_len, causal=True, complete=complete)
            return DocumentRows(documents, config.seq_len, pack=config.documents == "pack", causal=True, pad=pad)

        def make(row: dict[str, np.ndarray], _: Key) -> dict[str, np.ndarray]:
            """With weights; where each document has a row, no segments: a target never attends to padding."""
            row = causal(row)
            return {name: array for name, array in row.items()
                    if config.documents != "pad" or name not in ("segment_ids", "positions")}

        return document_data(config, tokenizer, rows=rows, make=make, name=f"causal, {config.documents}",
                             vocab_size=self.vocab_size, baseline=lambda *parts: _bigram(tokenizer.vocab_size, *parts))


def _bigram(vocab_size: int | None, *parts: np.ndarray) -> dict[str, float]:
    if vocab_size is None or vocab_size > 4096:
        return {}  # its table of counts has the square of that
    return {"bigram model": corpus.bigram_loss(*parts, vocab_size=vocab_size)}
