"""A pytest plugin: memory of the test workers is freed between modules, and the peak of each is printed at the end.

JAX keeps every program that it has compiled, so that a worker of a long run grows with each module. Dropping the caches
costs the recompilation of what modules share and half a second, so that it is done above `FREE_ABOVE` only, and after
a growth of `GROWTH`: what compilers keep for themselves is not freed by it.
"""

import ctypes
import gc
import os
import resource

import jax
import pytest

FREE_ABOVE = 1.2 * 2**30
FREE_AT_ONCE = 1.45 * 2**30
"""Bytes from which the caches are dropped within a module, too."""
GROWTH = 2**27
"""Bytes by which a process has grown since its caches were dropped, before they are dropped again."""
LIMIT = 2 * 2**30
"""Bytes of resident memory of a process."""

_peaks: dict[str, int] = {}
_kept = 0  # bytes that were resident after the caches were dropped


def resident_bytes() -> int:
    """Of this process, now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _return_free_memory() -> None:
    """To the operating system, where the C library is glibc: it keeps what was freed."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def peak_bytes() -> int:
    """The most that this process had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pytest_runtest_teardown(item, nextitem):
    global _kept
    ends = nextitem is None or nextitem.path != item.path
    if resident_bytes() > max(FREE_ABOVE if ends else FREE_AT_ONCE, _kept + GROWTH):
        jax.clear_caches()
        gc.collect()
        _return_free_memory()
        _kept = resident_bytes()


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak_bytes"] = peak_bytes()


@pytest.hookimpl(optionalhook=True)  # known to pytest-xdist alone
def pytest_testnodedown(node, error):
    """On the controller of pytest-xdist, when a worker has ended."""
    if peak := getattr(node, "workeroutput", {}).get("peak_bytes"):
        _peaks[node.gateway.id] = peak


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workeroutput"):
        return
    peaks = _peaks or {"this process": peak_bytes()}
    text = ", ".join(f"{name} {peak / 2**30:.2f} GiB" for name, peak in sorted(peaks.items()))
    over = [name for name, peak in peaks.items() if peak > LIMIT]
    terminalreporter.write_line(f"peak memory: {text}" + (f"; above 2 GiB: {', '.join(over)}" if over else ""))
