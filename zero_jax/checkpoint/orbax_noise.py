"""What Orbax logs and prints beside the error that it raises, left out."""

import contextlib
import gc
import logging
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any


def is_not_raised_too(record: logging.LogRecord) -> bool:
    """False for the tracebacks that are logged of errors in Orbax's threads and tasks: `.result()` raises the first."""
    if "never retrieved" in record.getMessage() and record.exc_info:
        return not any("orbax" in frame.filename for frame in traceback.extract_tb(record.exc_info[2]))
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


def log_no_raised() -> None:
    """Leaves out of the log, from now on, what `is_not_raised_too` is False for."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_not_raised_too)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what Orbax's other concurrent reads print when one of them fails and its error is raised."""
    before = sys.unraisablehook
    log = logging.getLogger("asyncio")

    def hook(unraisable: Any) -> None:
        if not re.search("Event loop is closed|was never awaited", str(unraisable.exc_value)):
            before(unraisable)

    def keep(record: logging.LogRecord) -> bool:
        return "never retrieved" not in record.getMessage()

    sys.unraisablehook = hook
    log.addFilter(keep)
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # the coroutines of the reads live as long as the frames of the error
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*was never awaited", RuntimeWarning)
            time.sleep(0.1)  # the other reads end in threads of their own
            gc.collect()
        raise
    finally:
        log.removeFilter(keep)
        sys.unraisablehook = before
