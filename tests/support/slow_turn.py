"""A pytest plugin: of the slow rows those whose turn it is.

Of the rows of tests that are marked `grid`, which vary one claim so that a small part of them finds most faults, one in
GRIDS has its turn, of the others one in OTHERS; in as many turns all run. CI's turn is the week (.ci/run), so that a
change that mends what failed is judged by the same rows; `make test-slow` runs all.
"""

import hashlib

import pytest

GRIDS, OTHERS = 24, 6


def pytest_addoption(parser):
    parser.addoption("--slow-turn", metavar="N", help="of the slow rows those whose turn is N")


def has_turn(name: str, turn: int, turns: int) -> bool:
    """Whether the row has this turn: one of `turns`, whatever other rows there are."""
    return (int.from_bytes(hashlib.sha256(name.encode()).digest()) - turn) % turns == 0


def pytest_collection_modifyitems(config, items):
    option = config.getoption("--slow-turn")
    if option is None:
        return
    if not option.isdigit():
        raise pytest.UsageError(f"--slow-turn={option}: give the number of a turn, as in --slow-turn=2968")
    runs = [not item.get_closest_marker("slow")
            or has_turn(item.nodeid, int(option), GRIDS if item.get_closest_marker("grid") else OTHERS)
            for item in items]
    config.hook.pytest_deselected(items=[item for item, run in zip(items, runs, strict=True) if not run])
    items[:] = [item for item, run in zip(items, runs, strict=True) if run]
