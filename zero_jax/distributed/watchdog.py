"""A thread that reports where a process hangs. No JAX."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

HUNG = 124
"""Exit status of a process that was ended because a step hung, as timeout(1) has it."""


class Watchdog:
    """Prints the Python stacks of all threads when an activity exceeds its time limit. Use it in a `with`.

    Most often a collective hangs because another process does not take part in it: that one's stacks say why.
    """

    def __init__(self, seconds: float | None, *, process: int = 0, end: bool = False, file: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic):
        """Nothing is watched before the first `beat`.

        Args:
          seconds: time limit of an activity; None: no limit, and no thread is started.
          process: the number of this process, for the message.
          end: whether to exit then with status `HUNG`, without running any more of the process's code.
          file: must have a file descriptor; default: standard error.
          clock: returns seconds; monotonic.
        """
        self._seconds, self._process, self._end, self._file, self._clock = seconds, process, end, file, clock
        self._activity: tuple[str, float] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zero_jax watchdog", daemon=True)

    def beat(self, activity: str) -> None:
        """`activity`, as "step 12", starts now, and the one before it is done."""
        self._activity = activity, self._clock()

    def rest(self) -> None:
        """Nothing is watched until the next `beat`."""
        self._activity = None

    def look(self) -> bool:
        """Reports an activity that exceeds its limit, once; returns whether it did."""
        activity = self._activity
        if self._seconds is None or activity is None or self._clock() - activity[1] <= self._seconds:
            return False
        if self._activity is activity:
            self._activity = None
        file = self._file or sys.stderr
        print(f"Process {self._process}: {activity[0]} takes more than {self._seconds:g} seconds. Its stacks:",
              file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)
        if self._end:
            os._exit(HUNG)
        return True

    def __enter__(self) -> "Watchdog":
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        assert self._seconds is not None
        while not self._over.wait(min(1.0, self._seconds / 10)):
            self.look()
