"""Examples with responses as rows of tokens, whose weights are 1 for targets of a response and 0 for all others."""

import contextlib
import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from zero_jax.data.conversations import Conversation, Span, Template
from zero_jax.data.corpus import sample
from zero_jax.data.documents import Documents
from zero_jax.data.packing import DocumentRows
from zero_jax.data.tokenizer import Tokenizer
from zero_jax.errors import UsageError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Example:
    """Tokens, int32 (number,), and which of them are a response, bool. begins: it is the first of its conversation."""

    tokens: np.ndarray
    response: np.ndarray
    begins: bool = True

    @property
    def prompt(self) -> np.ndarray:
        """The tokens before the first response."""
        return self.tokens[:int(self.response.argmax())]

    @property
    def answer(self) -> np.ndarray:
        """The tokens of the first response."""
        after = self.response[len(self.prompt):]
        return self.tokens[len(self.prompt):][:len(after) if after.all() else int(after.argmin())]


def encode(examples: Sequence[Sequence[Span]], tokenizer: Tokenizer) -> list[Example]:
    """Spans as tokens, none of which is in two spans, so that a response begins where a token does."""
    encoded = tokenizer.encode_parts([[span.text for span in spans] for spans in examples])
    eos, result = tokenizer.specials.eos, []
    for spans, parts in zip(examples, encoded, strict=True):
        ids, response = [], []
        for span, part in zip(spans, parts, strict=True):
            own = [*part] + ([eos] if span.ends and eos is not None else [])
            ids += own
            response += [span.response] * len(own)
        result.append(Example(np.array(ids, np.int32), np.array(response, bool)))
    return result


def encode_rows(rows: Sequence[Sequence[Sequence[Span]]], tokenizer: Tokenizer) -> list[Example]:
    """The examples of rows, each of which has one or several: `encode`, with what a conversation begins with."""
    begins = [number == 0 for examples in rows for number in range(len(examples))]
    return [dataclasses.replace(each, begins=first) for each, first in zip(
        encode([spans for examples in rows for spans in examples], tokenizer), begins, strict=True)]


def prompt_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt as `encode` has them, before a response."""
    return [*tokenizer.encode_parts([[text, " x"]])[0][0]]


def response_text(ids: Sequence[int], template: Template | None, tokenizer: Tokenizer) -> str:
    """The text of a response that a model has written, up to its end: the end of text, or what `template` ends it with.

    template: None where prompts and responses are texts.
    """
    ends, after = {tokenizer.specials.eos}, ""
    with contextlib.suppress(UsageError):  # of a template that takes no conversation of two messages
        spans = [] if template is None else template.examples(Conversation([
            {"role": "user", "content": "?"}, {"role": "assistant", "content": "zero"}]), "")[0]
        before, _, after = "".join(span.text for span in spans).rpartition("zero")
        after_ids = tokenizer.encode_parts([[before + "zero", after]])[0][1]
        ends |= {next((i for i in after_ids if i in tokenizer.specials.ids), None)}
    end = next((k for k, i in enumerate(ids) if i in ends), len(ids))
    text = tokenizer.decode(ids[:end])
    return text[:text.find(after)] if end == len(ids) and after.strip() and after in text else text


def fitting(examples: Iterable[Example], length: int) -> tuple[list[Example], int, int]:
    """(Examples cut to rows of `length` inputs, how many were cut, how many were left out: no response was left).

    Raises ValueError where nothing is left.
    """
    kept, cut, left_out = _fitting(((each,) for each in examples), length, "response is")
    return [each for each, in kept], cut, left_out


def fitting_pairs(pairs: Iterable[tuple[Example, Example]], length: int
                  ) -> tuple[list[tuple[Example, Example]], int, int]:
    """`fitting` of pairs, which are left out if one of them is, or if what is left of both is the same."""
    return _fitting(pairs, length, "two responses that differ are")


def _fitting(groups: Iterable[tuple[Example, ...]], length: int, what: str) -> tuple[list[Any], int, int]:
    kept, cut, number = [], 0, 0
    for group in groups:
        short = tuple(dataclasses.replace(each, tokens=each.tokens[:length + 1], response=each.response[:length + 1])
                      for each in group)
        number += 1
        if all(each.response[1:].any() for each in short) and all(map(_differ, short, short[1:])):
            kept.append(short)
            cut += max(len(each.tokens) for each in group) > length + 1
    if not kept:
        raise UsageError(f"No {what} left of {number:,} examples in rows of seq_len={length} tokens: give a longer "
                         "seq_len, or shorter prompts.")
    return kept, cut, number - len(kept)


def _differ(one: Example, other: Example) -> bool:
    """Whether the tokens, or which of them are a response, are not the same."""
    return not (np.array_equal(one.tokens, other.tokens) and np.array_equal(one.response, other.response))


def split_examples(examples: list[T], fraction: float, least: int) -> tuple[list[T], list[T]]:
    """(Those to train on, the last `fraction` of them, at least `least`). Raises ValueError for too few.

    All examples of a conversation are in one part.
    """
    held_out = max(least, round(fraction * len(examples)))
    while held_out < len(examples) and isinstance(first := examples[-held_out], Example) and not first.begins:
        held_out += 1
    if held_out + least > len(examples):
        raise UsageError(f"The data have {len(examples):,} examples: too few to hold {held_out:,} of them out and "
                         f"train on batches of {least:,}: give more, eval_data, or a smaller batch_size.")
    return examples[:-held_out], examples[-held_out:]


class ResponseRows:
    """Rows of `DocumentRows`, packed or padded, with "weights", float32 (length,): 1 where the target is a response."""

    def __init__(self, examples: Sequence[Example], length: int, *, pack: bool, pad: int) -> None:
        offsets = np.concatenate([[0], np.cumsum([len(each.tokens) for each in examples])])
        tokens = Documents(np.concatenate([each.tokens for each in examples]), offsets)
        response = Documents(np.concatenate([each.response for each in examples]).astype(np.int32), offsets)
        self._tokens = DocumentRows(tokens, length, pack=pack, causal=True, pad=pad)
        self._response = DocumentRows(response, length, pack=pack, causal=True)  # in the same places
        self._names = ("segment_ids", "positions") if pack else ()
        self.num_examples, self.used_fraction = self._tokens.num_examples, self._tokens.used_fraction
        self.fingerprint = zlib.crc32(repr((tokens.fingerprint(), response.fingerprint())).encode())

    def row(self, number: int) -> dict[str, np.ndarray]:
        """Row `number`; where each example has one, no segments: a target never attends to padding after it."""
        row = self._tokens.row(number)
        kept = {name: row[name] for name in ("inputs", "targets", *self._names)}
        return {**kept, "weights": self._response.row(number)["targets"].astype(np.float32)}


class PairRows:
    """Pairs of responses as `dpo_loss` takes them: "inputs", "targets" and "weights" (2, length), the chosen one first.

    reference: float32 (pairs, 2), the log-probabilities of the reference model, which a run writes once it has one.
    """

    def __init__(self, pairs: Sequence[tuple[Example, Example]], length: int, *, pad: int) -> None:
        self._pairs, self._length, self._pad = pairs, length, pad
        self.num_examples, self.used_fraction = len(pairs), 1.0
        self.reference = np.zeros((len(pairs), 2), np.float32)
        flat = [leaf for pair in pairs for each in pair for leaf in (each.tokens, each.response.astype(np.int32))]
        self.fingerprint = zlib.crc32(sample(np.concatenate(flat)).astype("<i8").tobytes())

    def row(self, number: int) -> dict[str, np.ndarray]:
        """Pair `number`, with its `reference`."""
        row: dict[str, np.ndarray] = {
            name: np.full((2, self._length), self._pad, np.int32) for name in ("inputs", "targets")}
        row["weights"] = np.zeros((2, self._length), np.float32)
        for place, each in enumerate(self._pairs[number]):
            end = len(each.tokens) - 1
            row["inputs"][place, :end], row["targets"][place, :end] = each.tokens[:-1], each.tokens[1:]
            row["weights"][place, :end] = each.response[1:]
        return {**row, "reference": self.reference[number]}
