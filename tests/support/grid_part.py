"""A pytest plugin: of the slow rows of each file, the part that a text draws.

The rows of tests that are marked `grid` vary one claim, so that a small part of them finds most faults; of the others
a sixth is drawn. Over several draws all run. CI draws by the commit (.ci/run); `make test-slow` runs all.
"""

import collections
import hashlib

import pytest

OTHERS = 6

def pytest_addoption(parser):
    parser.addoption("--grid-part", metavar="TEXT/N", help="of each file one in N slow rows of grids, drawn by TEXT")


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
    grids, others = collections.defaultdict(list), collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            kind = grids if item.get_closest_marker("grid") else others
            kind[item.nodeid.partition("::")[0]].append(item.nodeid)
    kept = {name for kind, each in ((grids, int(parts)), (others, OTHERS)) for names in kind.values()
            for name in drawn(names, text, each)}
    runs = [not item.get_closest_marker("slow") or item.nodeid in kept for item in items]
    config.hook.pytest_deselected(items=[item for item, run in zip(items, runs, strict=True) if not run])
    items[:] = [item for item, run in zip(items, runs, strict=True) if run]
