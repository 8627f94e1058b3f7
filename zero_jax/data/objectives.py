"""What is predicted of a row of tokens: pure functions of (tokens, key), in NumPy: any process can make any row.

A key is a tuple of integers that are not negative, such as (seed, number of the example). The draws are raw words of
PCG64, whose stream NumPy guarantees, unlike that of its distributions: a row is the same on every platform and version.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from zero_jax.errors import UsageError

MASKED, KEPT, NOISE, SPAN = 0.15, 0.1, 0.15, 3.0
"""BERT's fraction of predicted tokens, and of these those that stay (as many are replaced at random); T5's fraction of
noise, and mean length of its spans."""

Key = Sequence[int]


def random_words(key: Key, number: int) -> np.ndarray:
    """So many random words of 64 bits: uint64 (number,)."""
    return np.random.PCG64(np.random.SeedSequence(tuple(key))).random_raw(number)


def random_order(key: Key, number: int) -> np.ndarray:
    """A permutation of range(number): int64 (number,). 0.1 s per million.

    Raw words are sorted, since NumPy guarantees their stream, unlike that of `Generator.permutation` (NEP 19).
    """
    return np.argsort(random_words(key, number), kind="stable")


def causal(row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`row` with "weights", float32: 1 where the target is a token, 0 for padding, if the row has any of that kind."""
    if "segment_ids" not in row:
        return row
    return {**row, "weights": (row["segment_ids"] > 0).astype(np.float32)}


def masked_language(tokens: np.ndarray, key: Key, *, mask_id: int, replacements: np.ndarray,
                    candidates: np.ndarray | None = None, fraction: float = MASKED) -> dict[str, np.ndarray]:
    """BERT's objective (arXiv 1810.04805, section 3.1 and A.1) for tokens, int (length,).

    Of the `candidates`, bool (length,), max(1, round(fraction * number)) are predicted: 80 % of them become `mask_id`,
    10 % one of the ids in `replacements`, and 10 % stay, each drawn by itself. Returns "inputs" and "targets" (the
    tokens as they were), int32, and "weights", float32: 1 for what is predicted.

    Raises ValueError where no token is a candidate.
    """
    candidates = np.ones(len(tokens), bool) if candidates is None else candidates
    number = int(candidates.sum())
    if not number:
        raise UsageError("Masks leave no token: a row has only padding and special tokens, and nothing to predict.")
    if not 0 < fraction <= 1:
        raise UsageError(f"fraction={fraction}: give a fraction of the tokens, as 0.15.")
    order, action, which = random_words(key, 3 * len(tokens)).reshape(3, -1)
    order = np.where(candidates, order, np.iinfo(np.uint64).max)
    chosen = np.argsort(order, kind="stable")[:max(1, round(fraction * number))]
    draw = action[chosen] / 2.0**64
    inputs = np.array(tokens, np.int32)
    inputs[chosen] = np.where(
        draw < 1 - 2 * KEPT, mask_id,
        np.where(draw < 1 - KEPT, replacements[which[chosen] % len(replacements)], inputs[chosen]))
    weights = np.zeros(len(tokens), np.float32)
    weights[chosen] = 1
    return {"inputs": inputs, "targets": np.array(tokens, np.int32), "weights": weights}


@dataclasses.dataclass(frozen=True)
class SpanLengths:
    """Lengths of T5's span corruption: of `tokens`, `noise` are predicted, in `spans` spans.

    With their sentinels and an end of text they make `inputs` and `targets` positions.
    """

    tokens: int
    noise: int
    spans: int

    @property
    def inputs(self) -> int:
        """Positions of the encoder."""
        return self.tokens - self.noise + self.spans + 1

    @property
    def targets(self) -> int:
        """Positions of the decoder."""
        return self.noise + self.spans + 1


def span_lengths(tokens: int, *, noise: float = NOISE, span: float = SPAN) -> SpanLengths:
    """Of so many tokens, at least 2."""
    number = min(max(round(tokens * noise), 1), tokens - 1)
    return SpanLengths(tokens, number, min(max(round(number / span), 1), number, tokens - number))


def lengths_of_inputs(inputs: int, *, noise: float = NOISE, span: float = SPAN) -> SpanLengths:
    """The most tokens whose encoder takes at most `inputs` positions (T5's `random_spans_helper`).

    >>> lengths = lengths_of_inputs(512)
    >>> lengths.tokens, lengths.inputs, lengths.targets
    (568, 512, 114)
    """
    if inputs < 4:
        raise UsageError(f"Span corruption of rows of {inputs} tokens: it takes at least 4: give a larger seq_len.")
    tokens = 2
    while span_lengths(tokens + 1, noise=noise, span=span).inputs <= inputs:
        tokens += 1
    return span_lengths(tokens, noise=noise, span=span)


def span_corruption(tokens: np.ndarray, key: Key, *, sentinels: Sequence[int], eos: int, noise: float = NOISE,
                    span: float = SPAN, start: int = 0) -> dict[str, np.ndarray]:
    """T5's objective (arXiv 1910.10683, section 3.1.4) for tokens, int (length,); lengths as `span_lengths` has them.

    "inputs": the tokens, with each noise span replaced by the next of `sentinels`, and `eos`. "targets": each sentinel
    and the span that it stands for, and `eos`. "decoder_inputs": the targets moved by one, after the id `start`.
    Spans of noise and of what is kept alternate, what is kept first, and all ways to cut them are equally likely.

    Raises ValueError for more spans than sentinels.
    """
    lengths = span_lengths(len(tokens), noise=noise, span=span)
    if lengths.spans > len(sentinels):
        raise UsageError(f"A row of {len(tokens)} tokens has {lengths.spans} noise spans, and the tokenizer "
                         f"{len(sentinels)} sentinels <extra_id_N>: give shorter rows, or a tokenizer with more.")
    words = random_words(key, len(tokens))
    noise_sizes = _cut(lengths.noise, lengths.spans, words[:lengths.noise])
    kept_sizes = _cut(lengths.tokens - lengths.noise, lengths.spans, words[lengths.noise:])
    inputs, targets, at = [], [], 0
    for sentinel, kept, noisy in zip(sentinels, kept_sizes, noise_sizes, strict=False):
        inputs += [tokens[at:at + kept], [sentinel]]
        targets += [[sentinel], tokens[at + kept:at + kept + noisy]]
        at += kept + noisy
    row = {"inputs": np.concatenate([*inputs, [eos]]), "targets": np.concatenate([*targets, [eos]])}
    row["decoder_inputs"] = np.concatenate([[start], row["targets"][:-1]])
    return {name: array.astype(np.int32) for name, array in row.items()}


def _cut(number: int, parts: int, words: np.ndarray) -> np.ndarray:
    """`number` as a sum of `parts` positive integers, each such sum equally likely; words: at least number - 1."""
    cuts = np.sort(np.argsort(words[:number - 1], kind="stable")[:parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [number]]))
