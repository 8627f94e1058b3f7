"""A pytest plugin: of the slow rows that are marked `grid`, the part that a text draws.

The rows of a grid vary one claim, so that a part of them finds most faults, and over several draws all rows run. CI
draws by the commit (.ci/run); `make test-slow` runs all.
"""

import hashlib

import pytest


def pytest_addoption(parser):
    parser.addoption("--grid-part", metavar="TEXT/N", help="of slow rows of a grid one of N, which TEXT draws")


def is_drawn(nodeid: str, text: str, parts: int) -> bool:
    """Whether a row is in the part that `text` draws. A row is in one of `parts` on average, each time another one."""
    digest = hashlib.sha256(f"{text} {nodeid}".encode()).digest()
    return int.from_bytes(digest[:8]) % parts == 0


def pytest_collection_modifyitems(config, items):
    option = config.getoption("--grid-part")
    if option is None:
        return
    text, _, parts = option.rpartition("/")
    if not text or not parts.isdigit() or int(parts) < 1:
        raise pytest.UsageError(f"--grid-part={option}: give a text and a number of parts, as in --grid-part=4f2a/4")

    def runs(item):
        grid = item.get_closest_marker("grid") and item.get_closest_marker("slow")
        return not grid or is_drawn(item.nodeid, text, int(parts))

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)
