"""SIGTERM as a request to save and end, at the same step in every process."""

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Notes that SIGTERM came; the loop asks before each step. Use it in a `with`, around all that takes long.

    One process notes the signal by itself. Several agree, once one of them has got it, on a step that none has begun:
    JAX takes the signal then (its preemption service, on by default), tells the others, and answers yes at that step.
    """

    def __init__(self) -> None:
        self._noted = threading.Event()
        self._previous: Any = None

    def asked(self, step: int) -> bool:
        """Whether to save and end before step number `step`; every process asks before each, with the same numbers."""
        if jax.distributed.is_initialized():
            return multihost_utils.reached_preemption_sync_point(step)
        return self._noted.is_set()

    def __enter__(self) -> "Preemption":
        main = threading.current_thread() is threading.main_thread()  # no other may handle signals
        if main and not jax.distributed.is_initialized():
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.set()
