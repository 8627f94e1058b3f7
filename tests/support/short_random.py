"""A pytest plugin: random numbers of a few operations, for tests that need no more of them than that both sides agree.

XLA compiles a thirtieth of a CPU second for each draw of Threefry's 20 iterations, and more in large programs; of a
step of a small model the two initialisations (the library's and the plain loop's) are more than half of what is
compiled: a quarter of the CPU time of such a test. A hash of 12 operations is as good there: in the default rows of
`FOLDERS` and in the slow rows that are marked `short_random`. A test that is marked `own_random` has JAX's own.
"""

import functools
import sys

import jax
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

FOLDERS = ("conformance", "diloco", "finetune", "frontends", "gather", "layout", "offload", "optim", "sharding", "step",
           "transforms", "views")
RULES = mlir._platform_specific_lowerings["cpu"]
JAX_OWN = RULES[threefry2x32_p]


def short_hash(key_0, key_1, high, low):
    """Two words of each counter and key: multiplied and mixed as in xxHash, not for cryptography."""
    a = (high + key_0 + np.uint32(0x165667B1)) * np.uint32(0x9E3779B1)
    b = (low ^ key_1) * np.uint32(0x85EBCA77)
    a = (a ^ (b >> np.uint32(15))) * np.uint32(0xC2B2AE3D)
    b = (b ^ (a >> np.uint32(13))) * np.uint32(0x27D4EB2F)
    return a ^ (b >> np.uint32(16)), b ^ (a >> np.uint32(15))


def use(short: bool) -> None:
    """Has JAX draw by the short hash from here on, or by its own; a change forgets programs and cached results."""
    if (RULES[threefry2x32_p] is not JAX_OWN) == short:
        return
    if short:
        mlir.register_lowering(threefry2x32_p, mlir.lower_fun(short_hash, multiple_results=True), platform="cpu")
    else:
        RULES[threefry2x32_p] = JAX_OWN
    jax.clear_caches()
    for name, module in sys.modules.items():
        if name.startswith("support.") or name.rpartition(".")[2].startswith("test_"):
            for kept in vars(module).values():
                if isinstance(kept, functools._lru_cache_wrapper):
                    kept.cache_clear()


def draws_short(item: pytest.Item) -> bool:
    """Whether the test draws from the hash."""
    slow, marked, own = map(item.get_closest_marker, ("slow", "short_random", "own_random"))
    return not own and bool(marked if slow else item.path.parent.name in FOLDERS)


def pytest_collection_modifyitems(items):
    """They are the first: what is compiled is forgotten where that changes."""
    items.sort(key=draws_short, reverse=True)


def pytest_runtest_setup(item):
    use(short=draws_short(item))


def pytest_sessionfinish(session):
    use(short=False)


@pytest.fixture
def short_random():
    """For a test of the plugin itself."""
    use(short=True)
    yield
    use(short=False)
