"""SIGTERM, Ctrl-C and SIGHUP as requests to save and stop, at the same step in every process."""

import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

_SHOW_CURSOR = b"\x1b[?25h\n"


class Preemption:
    """Records the signals for the loop, which checks before each step. Use it in a `with` around all that takes long.

    A single process handles the signals itself. Several processes agree, once one of them has received one, on a step
    that none has started: JAX's preemption service (on by default) handles SIGTERM, notifies the others, and reports
    that step as the synchronisation point. The other signals are passed on to it as SIGTERM.

    Nothing is raised: a KeyboardInterrupt is lost where Python calls back from C++, as in the collector's callbacks of
    JAX. A second Ctrl-C ends the process at once with status 130, also while it compiles.

    Attributes:
      signal: the first signal that this process has received, SIGTERM of several processes excepted; None before.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1

    def asked(self, step: int) -> bool:
        """Whether to save and stop before step number `step`; every process must ask before each step."""
        if jax.distributed.is_initialized():
            return multihost_utils.reached_preemption_sync_point(step)
        return self.signal is not None

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
            return self
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            passed_on = number == signal.SIGTERM and jax.distributed.is_initialized()
            # A background job ignores Ctrl-C, and what nohup started the end of the terminal.
            if not passed_on and signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._record)
        if signal.SIGINT in self._previous:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=_end_at_second, args=(self._pipe[0],), daemon=True).start()
        return self

    def release(self) -> None:
        """Handles signals as before, from here on. Called at the end of the `with`, if not earlier."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._pipe[1])  # which ends the thread
            self._pipe = None

    def __exit__(self, *error: object) -> None:
        self.release()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)


def _end_at_second(pipe: int) -> None:
    """Ends the process when `pipe`, to which Python writes the number of each signal, has SIGINT for the second time.

    A handler would have to wait until the main thread returns from C++, as from compiling.
    """
    count = 0
    while numbers := os.read(pipe, 16):
        count += numbers.count(signal.SIGINT)
        if count > 1:
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)  # which a progress display hides
            os._exit(128 + signal.SIGINT)
    os.close(pipe)
