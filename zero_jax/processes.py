"""Several processes as one run: how they find each other, and what only the first of them does."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def first_process(act: Callable[[], object]) -> None:
    """Runs `act` on the first process while the others wait; a ValueError there is one on all of them."""
    problem: ValueError | None = None
    if is_first():
        try:
            act()
        except ValueError as error:
            problem = error
    if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(np.int32(problem is not None)):
        raise problem or ValueError("The first process could not do its part; it tells why.")
    if problem is not None:
        raise problem
