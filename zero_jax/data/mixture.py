"""Which example is taken when: several sources by weights, each in an order of its own in every epoch, by `grain`."""

import fractions
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from zero_jax.data import extras
from zero_jax.errors import UsageError

MAX_WEIGHT_ERROR = 1e-3
"""How far the sum of the weights may be from 1, as where they are written with three digits."""


def check_weights(weights: Sequence[float], sources: int) -> None:
    """Raises ValueError unless there is a positive weight for each source, and their sum is 1."""
    if len(weights) != sources:
        raise UsageError(f"data_weights: {len(weights)} weights for {sources} sources: give one for each of data.")
    if any(not math.isfinite(weight) or weight <= 0 for weight in weights):
        raise UsageError(f"data_weights={list(weights)}: each is positive; leave a source out that is not to be used.")
    if abs(sum(weights) - 1) > MAX_WEIGHT_ERROR:
        raise UsageError(f"data_weights={list(weights)}: their sum is {sum(weights):g} and not 1: give the fraction of "
                         "the sequences that each source has.")


class Mixture:
    """An endless sequence of (source, example): that of place i is a pure function of (sizes, weights, seed, i).

    Of the first n places a source has n times its weight, rounded up at most, and fewer than that by less than the
    number of other sources, whatever n. Each source goes through its examples in a new order in every epoch of its own:
    no example twice before all of them once. By grain's `shuffle` (a permutation that is computed and not stored) and
    `repeat`: about 15 microseconds for a place, and half a millisecond where a source has only tens of examples.

    weights: fractions, one for each source; None: by the sizes, so that all examples are taken equally often.
    places: of an epoch, in which no source repeats an example.

    >>> mixture = Mixture([300, 100], weights=[0.5, 0.5], seed=0)
    >>> [sum(mixture[i][0] == source for i in range(100)) for source in (0, 1)], mixture.places
    ([50, 50], 200)
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[float] | None = None, seed: int = 0) -> None:
        dataset: Any = extras.load("grain", "mixing and shuffling examples").MapDataset
        if weights is not None:
            check_weights(weights, len(sizes))
        self._proportions = tuple(map(int, sizes)) if weights is None else _proportions(weights)
        self._sources = []
        for source, size in enumerate(sizes):
            own = int(np.random.SeedSequence((seed, source)).generate_state(1)[0])
            self._sources.append(dataset.range(size).seed(own).shuffle().repeat(None))
        total = sum(self._proportions)
        self.places = min(int(size) * total // each for size, each in zip(sizes, self._proportions, strict=True))

    def __getitem__(self, place: int) -> tuple[int, int]:
        source, number = _taken(place, self._proportions)
        return source, int(self._sources[source][number])


def _proportions(weights: Sequence[float]) -> tuple[int, ...]:
    """Integers in the proportions of `weights` as they are written in decimals: grain's own are cut to hundredths."""
    exact = [fractions.Fraction(repr(float(weight))) for weight in weights]
    common = math.lcm(*(each.denominator for each in exact))
    return tuple(int(each * common) for each in exact)


def _taken(place: int, proportions: Sequence[int]) -> tuple[int, int]:
    """(Source, how many places before `place` have it), as grain's `mix`.

    Each source takes its part of the places that those before it leave: it has a place where that number grows.

    >>> [_taken(place, (2, 1)) for place in range(4)]
    [(0, 0), (0, 1), (1, 0), (0, 2)]
    """
    here, after, total = place, place + 1, sum(proportions)
    for source, each in enumerate(proportions):
        left, left_after = here * (total - each) // total, after * (total - each) // total
        if left == left_after:
            return source, here - left
        here, after, total = left, left_after, total - each
    raise AssertionError("the last source takes all that is left")
