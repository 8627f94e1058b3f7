"""The memory that a process of JAX gets of a device, and what XLA:GPU is given of it.

JAX takes 75 % of a GPU unless the environment names another fraction. XLA:GPU rewrites a program that needs more than
its own limit to recompute, which costs FLOPs and often saves nothing: MPT-7B on 8 H100 fell from 13,535 to 10,828
tokens/s, and had 13,674 with a higher limit (jax 0.11.2). The limit is that of the process, therefore. No JAX: the
command line sets the fraction before JAX starts.
"""

import os

from zero_jax.errors import UsageError
from zero_jax.xla.chip import Chip

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The variable of the environment that says what JAX takes of each GPU; `XLA_CLIENT_MEM_FRACTION` is its newer name."""
JAX_FRACTION, OURS = 0.75, 0.92
"""What JAX takes by itself, and what the command line lets it take: the rest of 80 GB is for CUDA and NCCL."""
RESERVED = 2**30
"""Bytes of a GPU that no program gets: the CUDA context and NCCL's buffers. libtpu's limit has them already."""
_NAMES = "XLA_CLIENT_MEM_FRACTION", FRACTION


def memory_fraction() -> float:
    """The share of each GPU's memory that JAX takes, by the environment.

    Raises UsageError for what is no positive number.
    """
    name = next((name for name in _NAMES if os.environ.get(name)), None)
    if name is None:
        return JAX_FRACTION
    try:
        fraction = float(os.environ[name])
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise UsageError(f"{name}={os.environ[name]!r}: give JAX's share of a GPU's memory, above 0 and at most 1.")
    return fraction


def set_fraction() -> None:
    """Lets JAX take `OURS` of each GPU, where the environment names nothing; to be called before JAX starts."""
    if not any(map(os.environ.get, _NAMES)):
        os.environ[FRACTION] = str(OURS)


def fraction_text() -> str:
    """What JAX takes of each GPU, and what changes that: a sentence."""
    return f"JAX takes {memory_fraction():.0%} of each GPU's memory; {FRACTION} in the environment changes that."


def process_bytes(chip: Chip) -> int:
    """Bytes of a device of `chip` that programs of a process may use."""
    if chip.gpu is None:
        return chip.memory_bytes
    return min(int(memory_fraction() * chip.memory_bytes), chip.memory_bytes - RESERVED)


def limit_percent(chip: Chip, state_bytes: int) -> int | None:
    """XLA:GPU's "slop factor" that makes its limit what a process has; None at JAX's own fraction, and elsewhere.

    The limit is 80 % of the memory without the program's arguments, times this, and the arguments. state_bytes: of the
    arguments on each device.
    """
    theirs = chip.memory_bytes * 80 // 100 - state_bytes
    if chip.gpu is None or memory_fraction() <= JAX_FRACTION or theirs <= 0:
        return None
    return 100 * (process_bytes(chip) - state_bytes) // theirs
