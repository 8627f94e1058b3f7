"""The command `evaluate`: nats per token and perplexity of texts under the model of a checkpoint."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from zero_jax.cli.objectives.choose import kind_of
from zero_jax.cli.objectives.objective import with_perplexity
from zero_jax.cli.training.evaluation import token_sums
from zero_jax.cli.weights.file_configs import EvaluateConfig
from zero_jax.cli.weights.saved_model import SavedModel
from zero_jax.data.text_sources import read_documents
from zero_jax.distributed.initialize import put_global
from zero_jax.errors import UsageError

Window = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Inputs and targets, int32 (length,), and the weight of each target, float32 (length,)."""


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The sum over all texts. tokens: those predicted, all but the first of each text. nats: of all of them."""

    texts: int
    bytes: int
    tokens: int
    nats: float
    accuracy: float

    @property
    def nats_per_token(self) -> float:
        """The loss."""
        return self.nats / self.tokens

    def as_json(self) -> dict[str, float]:
        """All of it, with nats per token, perplexity and bits per byte."""
        return dataclasses.asdict(self) | {
            "nats_per_token": self.nats_per_token,
            "perplexity": with_perplexity({"loss": self.nats_per_token})["perplexity"],
            "bits_per_byte": self.nats / math.log(2) / self.bytes}

    def __str__(self) -> str:
        found = self.as_json()
        return (f"{self.texts:,} texts, {self.bytes:,} bytes, {self.tokens:,} tokens predicted (all but the first of "
                f"each text)\nnats per token {self.nats_per_token:.6f}, perplexity {found['perplexity']:.4f}, bits per "
                f"byte {found['bits_per_byte']:.6f}, accuracy {self.accuracy:.4f}")


def windows(tokens: Sequence[int] | np.ndarray, length: int, stride: int) -> Iterator[Window]:
    """Windows of `length` tokens that begin `stride` apart, in which every token but the first counts once.

    The last one is filled up with zeros of weight 0, which no token before them sees.

    >>> [(inputs.tolist(), weights.tolist()) for inputs, _, weights in windows([5, 6, 7, 8, 9], 3, 2)]
    [([5, 6, 7], [1.0, 1.0, 1.0]), ([7, 8, 0], [0.0, 1.0, 0.0])]
    """
    ids, counted = np.asarray(tokens, np.int32), 0
    for start in range(0, len(ids) - 1, stride):
        stop = min(start + length, len(ids) - 1)
        window = np.zeros(length, np.int32), np.zeros(length, np.int32), np.zeros(length, np.float32)
        window[0][:stop - start], window[1][:stop - start] = ids[start:stop], ids[start + 1:stop + 1]
        window[2][counted - start:stop - start] = 1
        yield window
        counted = stop
        if stop == len(ids) - 1:
            return


def evaluate_command(config: EvaluateConfig) -> TextScore:
    """The score of all texts of `config`.

    Raises UsageError for a model that does not predict the next token, and texts that it cannot take.
    """
    saved = SavedModel(config)
    if (kind := kind_of(saved.choice)) != "next token":
        raise UsageError(f"model={saved.run.model}: it is a model of {kind}, and evaluate measures those of the next "
                         "token: train --eval-data measures others.")
    if saved.tokenizer is None:
        raise UsageError("text: the run read files of tokens, and its tokenizer is not known: give it with tokenizer.")
    length = config.seq_len or saved.run.seq_len
    config.check_stride(length)
    saved.choice.check(seq_len=length, vocab_size=saved.tokenizer.vocab_size)
    texts = list(read_documents(config.text, field=config.text_field))
    rows = [window for ids in saved.tokenizer.encode(texts) for window in windows(ids, length, config.stride or length)]
    if not rows:
        raise UsageError("text has no two tokens, of which the second is predicted from the first: give more.")
    step, state, devices = saved.loaded
    evaluate = step.evaluator(token_sums, ema=config.ema)
    sums = np.zeros(3)  # of float64: a float32 sum of a batch is exact enough, one of a book is not
    for batch in _batches(rows, -(-config.batch_size // devices) * devices):
        found = evaluate(state, put_global(batch, step.batch_sharding))
        sums += [float(found[name]) for name in ("loss", "accuracy", "weight")]
    nats, right, tokens = sums
    return TextScore(len(texts), sum(len(text.encode()) for text in texts), round(tokens), nats, right / tokens)


def _batches(rows: Sequence[Window], size: int) -> Iterable[dict[str, np.ndarray]]:
    """`size` windows at a time, the last ones filled up with rows of weight 0."""
    for start in range(0, len(rows), size):
        inputs, targets, weights = (np.stack(each) for each in zip(*rows[start:start + size], strict=True))
        missing = ((0, size - len(inputs)), (0, 0))
        yield {"inputs": np.pad(inputs, missing), "targets": np.pad(targets, missing),
               "weights": np.pad(weights, missing)}
