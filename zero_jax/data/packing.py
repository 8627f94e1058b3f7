"""Documents as rows of one length: packed with others, or each padded by itself. Attention must not cross documents.

By hand and not grain's packing: that is a stateful iterator of one process, and its rows would depend on the number of
processes. Here the plan is made once from the lengths of the documents, so that row r is a pure function of r.
"""

import dataclasses

import numpy as np

from zero_jax.arguments import whole
from zero_jax.data.documents import Documents
from zero_jax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Which chunks of the token array each row holds. Row r has the chunks first[r]:first[r + 1].

    starts, slots: int64 (num_chunks,): where a chunk begins in the array, and how many positions it takes in its row.
    """

    starts: np.ndarray
    slots: np.ndarray
    first: np.ndarray

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.first) - 1


def plan_rows(offsets: np.ndarray, length: int, *, pack: bool, shift: int) -> RowPlan:
    """Every token of the documents at `offsets` in rows of `length` positions.

    shift: 1 where a position is an input and the token after it its target, so that a document of n tokens takes n - 1
    positions, and one of a single token none; 0 where each token is a position. A longer document is cut into chunks of
    `length` positions, with no target lost. pack: chunks share rows by best fit, the longest first (Ding et al. 2024,
    arXiv 2404.10830, "Fewer Truncations Improve Language Modeling"), about a microsecond for each; else each has a row.

    Raises ValueError where no document has a position.
    """
    positions = np.diff(offsets) - shift
    counts = -(-positions // length)
    if not counts.sum():
        raise UsageError("Masks leave no token: every document has a single one, and nothing to predict after it: give "
                         "longer documents, or documents=concatenate.")
    document = np.repeat(np.arange(len(positions)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the chunk in its document
    starts = offsets[document] + number * length
    slots = np.minimum(length, positions[document] - number * length)
    if not pack:
        return RowPlan(starts, slots, np.arange(len(starts) + 1))
    row = _best_fit(slots, length)
    order = np.argsort(row, kind="stable")
    first = np.searchsorted(row[order], np.arange(row.max() + 2))
    return RowPlan(starts[order], slots[order], first)


def _best_fit(slots: np.ndarray, length: int) -> np.ndarray:
    """The row of each chunk: the fullest row that it fits into, the longest chunks first. int64 (num_chunks,)."""
    rows = np.empty(len(slots), np.int64)
    by_free: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the number of their free positions
    non_empty, num_rows = 0, 0  # bit n of non_empty is set where by_free[n] has a row
    for chunk in np.argsort(-slots, kind="stable").tolist():
        size = int(slots[chunk])
        fitting = non_empty >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            row = by_free[free].pop()
            if not by_free[free]:
                non_empty ^= 1 << free
        else:
            free, row, num_rows = length, num_rows, num_rows + 1
        rows[chunk] = row
        if left := free - size:
            by_free[left].append(row)
            non_empty |= 1 << left
    return rows


class DocumentRows:
    """Rows of documents, packed or padded: "inputs", "segment_ids" and "positions", int32 (length,), and "targets".

    segment_ids: 1, 2 and so on for the chunks of a row, 0 for padding. positions: 0, 1 and so on in each chunk, and of
    padding 0. targets, with `causal` alone: the token after each input, of its own document always. Padding has the id
    `pad` in both.

    >>> documents = Documents(np.arange(1, 10), np.array([0, 5, 9]))
    >>> row = DocumentRows(documents, 8, pack=True, causal=True).row(0)
    >>> row["inputs"].tolist(), row["segment_ids"].tolist()
    ([1, 2, 3, 4, 6, 7, 8, 0], [1, 1, 1, 1, 2, 2, 2, 0])
    """

    def __init__(self, documents: Documents, length: int, *, pack: bool, causal: bool, pad: int = 0) -> None:
        self._tokens, self._length, self._causal, self._pad = documents.tokens, whole("length", length, 1), causal, pad
        self._plan = plan_rows(documents.offsets, length, pack=pack, shift=int(causal))
        self.num_examples = self._plan.num_rows
        self.fingerprint = documents.fingerprint()

    @property
    def used_fraction(self) -> float:
        """The fraction of all positions that is no padding."""
        return float(self._plan.slots.sum() / (self._plan.num_rows * self._length))

    def row(self, number: int) -> dict[str, np.ndarray]:
        """Row `number`."""
        row = {name: np.zeros(self._length, np.int32) for name in ("segment_ids", "positions")}
        for name in ("inputs", "targets") if self._causal else ("inputs",):
            row[name] = np.full(self._length, self._pad, np.int32)
        chunks = slice(*self._plan.first[number:number + 2])
        end = 0
        for segment, (start, slots) in enumerate(zip(self._plan.starts[chunks], self._plan.slots[chunks], strict=True)):
            place = slice(end, end + slots)
            row["inputs"][place] = _ids(self._tokens[start:start + slots])
            if self._causal:
                row["targets"][place] = _ids(self._tokens[start + 1:start + slots + 1])
            row["segment_ids"][place], row["positions"][place] = segment + 1, np.arange(slots)
            end += slots
        return row


class Windows:
    """Documents one after another, cut into windows of `length` tokens: "inputs", and with `causal` "targets".

    Windows run across documents, and so does attention. An incomplete last window is left out; with `complete` it
    begins earlier, and rows have "weights", float32 (length,), which are 0 for what is in the window before it.
    """

    def __init__(self, documents: Documents, length: int, *, causal: bool, complete: bool = False) -> None:
        self._tokens, self._length, self._causal = documents.tokens, whole("length", length, 1), causal
        self._last, self._complete = len(self._tokens) - causal - length, complete
        self.num_examples = max(0, len(self._tokens) - causal) // length
        self.num_examples += bool(complete and self.num_examples and self._last % length)
        self.fingerprint, self.used_fraction = documents.fingerprint(), 1.0

    def row(self, number: int) -> dict[str, np.ndarray]:
        """Window `number`."""
        start = min(number * self._length, self._last)
        tokens = _ids(self._tokens[start:start + self._length + self._causal])
        row = {"inputs": tokens[:-1], "targets": tokens[1:]} if self._causal else {"inputs": tokens}
        new = np.arange(start, start + self._length) >= number * self._length
        return row | ({"weights": new.astype(np.float32)} if self._complete else {})


def _ids(tokens: np.ndarray) -> np.ndarray:
    """`tokens` as int32; raises ValueError for ids that it cannot hold, which would become others."""
    ids = tokens.astype(np.int32)
    if tokens.dtype.itemsize > 2 and (ids != tokens).any():
        raise UsageError(f"tokens hold ids {tokens.min()}..{tokens.max()}, and int32 ends at {2**31 - 1}: give the "
                         "dtype that they were written in.")
    return ids
