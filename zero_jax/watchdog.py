"""A thread that tells where a process hangs. No JAX."""

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
    """Prints the Python stacks of all threads where one activity takes longer than it may. Use it in a `with`.

    What hangs is most often a collective that another process does not take part in: its stacks tell why.
    """

    def __init__(self, seconds: float | None, *, process: int = 0, end: bool = False, file: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic):
        """Nothing is watched before the first `beat`.

        Args:
          seconds: that an activity may take; None: any number, and there is no thread.
          process: the number of this process, to be told.
          end: whether to end the process with status `HUNG` then, without any more of its code.
          file: with a file descriptor; default: standard error.
          clock: seconds from anywhere.
        """
        self._seconds, self._process, self._end, self._file, self._clock = seconds, process, end, file, clock
        self._activity: tuple[str, float] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zero_jax watchdog", daemon=True)

    def beat(self, activity: str) -> None:
        """`activity`, as "step 12", begins now, and what was before it is done."""
        self._activity = activity, self._clock()

    def rest(self) -> None:
        """Nothing is watched until the next `beat`."""
        self._activity = None

    def look(self) -> bool:
        """Tells of an activity that takes too long, once; returns whether it did."""
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
