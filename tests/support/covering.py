"""Grids of parametrized tests: the first rows run by default and the others are slow; or rows that cover all pairs."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def weekly(names: str, values: Iterable[Any], *, default: int = 1, **options: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` of which all but the first `default` rows that are not slow are rows of a slow grid."""
    rows = []
    for value in values:
        row = value if isinstance(value, type(pytest.param())) else (
            pytest.param(*value) if "," in names else pytest.param(value))
        if not any(mark.name == "slow" for mark in row.marks):
            default -= 1
        rows.append(row if default >= 0 else pytest.param(
            *row.values, id=row.id, marks=(*row.marks, pytest.mark.slow, pytest.mark.grid)))
    return pytest.mark.parametrize(names, rows, **options)


def covering(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations of `factors` that cover every pair of two factors' values.

    Faults of a program mostly come from one value or from two together (Kuhn, Wallace and Gallo, 2004). Greedy and
    deterministic: each row that runs is the first of those that cover the most pairs not covered before it.
    """
    grid = list(itertools.product(*map(tuple, factors)))
    chosen: list[tuple[Any, ...]] = []
    missing = set().union(*map(pairs, grid)) if grid else set()
    while missing:
        chosen.append(max(grid, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(chosen[-1])
    return sorted(chosen, key=grid.index)


def pairs(row: tuple[Any, ...]) -> set[Any]:
    """Each value of a row (where it has but one factor), and each two of them with their places."""
    places = list(enumerate(row))
    return set(itertools.combinations(places, 2)) or set(places)
