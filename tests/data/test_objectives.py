"""Objectives: what they select and replace, by count and by statistics, and that the same key gives the same row."""

import collections
import math

import numpy as np
import pytest

from zero_jax.data.objectives import (
    causal,
    lengths_of_inputs,
    masked_language,
    span_corruption,
    span_lengths,
)

MASK, VOCAB = 3, 1000
ORDINARY = np.arange(10, VOCAB)
TOKENS = np.arange(10, 138) % 500 + 10


def masked(key, **options):
    return masked_language(TOKENS, key, mask_id=MASK, replacements=ORDINARY, **options)


def test_causal_weights_are_of_what_is_no_padding():
    row = {"inputs": np.arange(3), "targets": np.arange(1, 4)}
    assert causal(row) is row
    assert causal({**row, "segment_ids": np.array([1, 2, 0])})["weights"].tolist() == [1, 1, 0]


def test_masking_selects_exactly_and_replaces_by_berts_fractions():
    kinds, replaced, where, rows = collections.Counter(), [], np.zeros(len(TOKENS)), 600
    for number in range(rows):
        row = masked((7, number))
        chosen = row["weights"] == 1
        assert chosen.sum() == round(0.15 * len(TOKENS)) == 19 and set(row["weights"]) == {0, 1}
        assert (row["targets"] == TOKENS).all() and (row["inputs"] == TOKENS)[~chosen].all()
        kinds["mask"] += (row["inputs"] == MASK).sum()
        kinds["same"] += (row["inputs"] == TOKENS)[chosen].sum()
        other = row["inputs"][(row["inputs"] != TOKENS) & (row["inputs"] != MASK)]
        replaced += other.tolist()
        where += chosen
    total = 19 * rows
    kinds["other"] = len(replaced)
    for kind, share in (("mask", 0.8), ("same", 0.1), ("other", 0.1)):  # within five standard deviations
        assert abs(kinds[kind] / total - share) < 5 * math.sqrt(share * (1 - share) / total) + 2e-4, kinds
    assert min(replaced) >= 10 and max(replaced) < VOCAB
    assert abs(np.mean(replaced) - 504.5) < 5 * 286 / math.sqrt(len(replaced))
    assert abs(where / rows - 19 / 128).max() < 5 * math.sqrt(0.15 * 0.85 / rows)  # no position is preferred


def test_the_same_key_gives_the_same_row():
    row, again, other = masked((0, 1)), masked((0, 1)), masked((0, 2))
    assert all((row[name] == again[name]).all() for name in row) and (row["weights"] != other["weights"]).any()
    # Written down from numpy 2.4: another numpy, platform or rewrite must give the same.
    assert np.flatnonzero(row["weights"])[:6].tolist() == [4, 7, 10, 11, 15, 18]


def test_special_tokens_and_padding_are_not_candidates():
    candidates = np.zeros(len(TOKENS), bool)
    candidates[[5, 6, 7]] = True
    for number in range(50):
        row = masked((1, number), candidates=candidates)
        assert row["weights"].sum() == 1 and not row["weights"][~candidates].any()
    with pytest.raises(ValueError, match="Masks leave no token"):
        masked((1, 1), candidates=np.zeros(len(TOKENS), bool))
    with pytest.raises(ValueError, match="fraction=0: give"):
        masked((1, 1), fraction=0)


@pytest.mark.parametrize("inputs, tokens, targets", [(512, 568, 114), (128, 141, 29)])
def test_lengths_are_those_of_t5(inputs, tokens, targets):
    lengths = lengths_of_inputs(inputs)
    assert (lengths.tokens, lengths.inputs, lengths.targets) == (tokens, inputs, targets)


@pytest.mark.parametrize("length", [2, 3, 4, 5, 17, 128, 568])
def test_spans_put_together_are_the_tokens(length):
    tokens, sentinels, eos = np.arange(1000, 1000 + length), [*range(99, 0, -1)], 0
    lengths = span_lengths(length)
    for number in range(20):
        row = span_corruption(tokens, (3, number), sentinels=sentinels, eos=eos)
        assert (len(row["inputs"]), len(row["targets"])) == (lengths.inputs, lengths.targets)
        assert row["decoder_inputs"].tolist() == [0, *row["targets"][:-1]]
        assert row["inputs"][-1] == row["targets"][-1] == 0
        spans, last = {}, None
        for token in row["targets"][:-1].tolist():
            if token < 1000:
                last = spans[token] = []
            else:
                last.append(token)
        assert [*spans] == sentinels[:lengths.spans] and all(spans.values())
        whole = [token for each in row["inputs"][:-1].tolist() for token in spans.get(each, [each])]
        assert whole == tokens.tolist()
        assert row["inputs"][0] >= 1000  # what is kept comes first


def test_noise_is_spread_evenly_and_spans_have_their_mean_length():
    length, rows, noise, sizes = 60, 800, np.zeros(60), collections.Counter()
    for number in range(rows):
        row = span_corruption(np.arange(length) + 100, (number,), sentinels=range(9), eos=99)
        spans = "".join("s" if token < 9 else "n" if token > 99 else "" for token in row["targets"]).split("s")[1:]
        sizes.update(map(len, spans))
        noise[row["targets"][row["targets"] > 99] - 100] += 1
    assert sum(size * count for size, count in sizes.items()) == 9 * rows and sum(sizes.values()) == 3 * rows
    # 9 tokens cut into 3 parts, each of the 28 ways equally likely: a first part of k has 8 - k of them.
    for size in range(1, 8):
        share = (8 - size) / 28
        assert abs(sizes[size] / (3 * rows) - share) < 5 * math.sqrt(share * (1 - share) / rows)
    inner = noise[10:45] / rows
    assert abs(inner.mean() - inner).max() < 0.05 and noise.sum() == 9 * rows
    assert noise[0] == 0 and noise[-1] == rows  # as in T5, spans that are kept and noise alternate to the end


def test_the_same_key_gives_the_same_spans():
    rows = [span_corruption(np.arange(100, 160), key, sentinels=range(9), eos=99) for key in ((1, 2), (1, 2), (1, 3))]
    assert (rows[0]["inputs"] == rows[1]["inputs"]).all() and (rows[0]["inputs"] != rows[2]["inputs"]).any()


def test_what_span_corruption_cannot_do():
    with pytest.raises(ValueError, match="has 28 noise spans, and the tokenizer 4 sentinels"):
        span_corruption(np.arange(568), (0,), sentinels=range(4), eos=9)
    with pytest.raises(ValueError, match="it takes at least 4"):
        lengths_of_inputs(3)
