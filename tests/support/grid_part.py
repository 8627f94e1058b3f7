"""A pytest plugin: of the slow rows of each test that is marked `grid`, the part that a text draws.

The rows of a grid vary one claim, so that a part of them finds most faults, and over several draws all rows run. CI
draws by the commit (.ci/run); `make test-slow` runs all.
"""

import collections
import hashlib

import pytest


def pytest_addoption(parser):
    parser.addoption("--grid-part", metavar="TEXT/N", help="one in N of a grid's slow rows, drawn by TEXT")


def drawn(names: list[str], text: str, parts: int) -> set[str]:
    """One in `parts` of `names`, and at least one: the first in an order that depends on `text`."""
    ordered = sorted(names, key=lambda name: hashlib.sha256(f"{text} {name}".encode()).digest())
    return {*ordered[:-(-len(names) // parts)]}


def pytest_collection_modifyitems(config, items):
    option = config.getoption("--grid-part")
    if option is None:
        return
    text, _, parts = option.rpartition("/")
    if not text or not parts.isdigit() or int(parts) < 1:
        raise pytest.UsageError(f"--grid-part={option}: give a text and a number of parts, as in --grid-part=4f2a/8")
    grids = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("grid") and item.get_closest_marker("slow"):
            grids[item.nodeid.partition("[")[0]].append(item.nodeid)
    left_out = {name for names in grids.values() for name in {*names} - drawn(names, text, int(parts))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]
