"""Which example is taken when: several sources by weights, each in an order of its own in every epoch, by `grain`."""

import functools
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
        raise UsageError(f"data_weights={list(weights)}: their sum is {sum(weights):g} and not 1: give the fraction "
                         "of the sequences that each source has.")


class Mixture:
    """An endless sequence of (source, example): that of place i is a pure function of (sizes, weights, seed, i).

    Of any number of places the sources have as many as their weights say, but for one. Each source goes through its
    examples in a new order in every epoch of its own: no example twice before all of them once. By grain's `shuffle`
    (a permutation that is computed and not stored), `repeat` and `mix`: about 15 microseconds for a place, and
    half a millisecond where a source has only tens of examples.

    weights: fractions, one for each source; None: by the sizes, so that all examples are taken equally often.
    places: of an epoch: the most in which no source repeats an example.

    >>> mixture = Mixture([300, 100], weights=[0.5, 0.5], seed=0)
    >>> [sum(mixture[i][0] == source for i in range(100)) for source in (0, 1)], mixture.places
    ([50, 50], 200)
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[float] | None = None, seed: int = 0) -> None:
        dataset: Any = extras.load("grain", "mixing and shuffling examples").MapDataset
        weights = [size / sum(sizes) for size in sizes] if weights is None else weights
        check_weights(weights, len(sizes))
        sources = []
        for source, size in enumerate(sizes):
            own = int(np.random.SeedSequence((seed, source)).generate_state(1)[0])
            examples = dataset.range(size).map(functools.partial(_with_source, source))
            sources.append(examples.seed(own).shuffle().repeat(None))
        self._places = dataset.mix(sources, weights) if len(sources) > 1 else sources[0]
        self.places = int(min(size / weight for size, weight in zip(sizes, weights, strict=True)) + 1e-6)

    def __getitem__(self, place: int) -> tuple[int, int]:
        return self._places[place]


def _with_source(source: int, example: int) -> tuple[int, int]:
    return source, example
