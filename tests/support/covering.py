"""Grids of parametrized tests: by default the rows that cover all pairs of values, in `make test-slow` the others."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairwise(*factors: Iterable[Any]) -> list[Any]:
    """All combinations of `factors`; those that are not needed to cover every pair of two factors' values are slow.

    Faults of a program mostly come from one value or from two together (Kuhn, Wallace and Gallo, 2004). Greedy and
    deterministic: each row that runs is the first of those that cover the most pairs not covered before it.
    """
    grid = list(itertools.product(*map(tuple, factors)))
    chosen, missing = set(), set().union(*map(pairs, grid)) if grid else set()
    while missing:
        best = max(range(len(grid)), key=lambda number: len(pairs(grid[number]) & missing))
        chosen.add(best)
        missing -= pairs(grid[best])
    return [pytest.param(*row, marks=() if number in chosen else pytest.mark.slow) for number, row in enumerate(grid)]


def pairs(row: tuple[Any, ...]) -> set[Any]:
    """Each value of a row (where it has but one factor), and each two of them with their places."""
    places = list(enumerate(row))
    return set(itertools.combinations(places, 2)) or set(places)
