"""What many tests need and takes long to make: made once in a run, by the worker that asks first.

With ZERO_JAX_TEST_PROGRAMS set to a folder it stays there for the next run with the same sources.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = "ZERO_JAX_TEST_PROGRAMS"
"""The variable that names the folder; tests/conftest.py sets it for the length of a run."""


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[Path]:
    """The path of what is called `name`, which may not exist yet; the other workers wait while one is inside."""
    path = folder() / hashlib.sha256(f"{name} {fingerprint()}".encode()).hexdigest()[:16]
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        yield path


@functools.cache
def folder() -> Path:
    path = Path(os.environ.get(FOLDER) or tempfile.mkdtemp())
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def fingerprint() -> str:
    """A digest of everything that a program depends on: the sources and the compilers."""
    sources = sorted([*(ROOT / "zero_jax").rglob("*.py"), *(ROOT / "zero_jax").rglob("*.toml"),
                      *(ROOT / "models").rglob("*.py"), *Path(__file__).parent.glob("*.py")])
    digest = hashlib.sha256()
    for source in sources:
        digest.update(str(source.relative_to(ROOT)).encode() + source.read_bytes())
    for package in ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda13-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package}={importlib.metadata.version(package)}".encode())
    digest.update(" ".join(sorted({*os.environ.get("XLA_FLAGS", "").split()})).encode())  # workers have them twice
    return digest.hexdigest()
