"""Several processes of one run on this machine, over 127.0.0.1 and with simulated devices. No JAX."""

import contextlib
import dataclasses
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from zero_jax.errors import UsageError

COORDINATOR, NUM_PROCESSES, PROCESS_ID, LOCAL_DEVICES = (
    "ZERO_JAX_COORDINATOR", "ZERO_JAX_NUM_PROCESSES", "ZERO_JAX_PROCESS_ID", "ZERO_JAX_DEVICES_PER_PROCESS")
"""Environment variables that identify a process of a run."""
LAUNCHER = "ZERO_JAX_LAUNCHER"
"""Environment variable with the process ID of the launcher."""

PREEMPTED = 75
"""Exit status of a run that ended on SIGTERM and can be resumed: EX_TEMPFAIL, "try again", which schedulers know."""

FINAL = (0, 2, PREEMPTED, 129, 130)
"""Statuses after which a run is not started again: done, bad input, asked to end."""

GRACE_SECONDS = 5.0
"""Seconds that the other processes have to end by themselves after one has failed."""

SHOWN_LINES = 20
"""Of the output of a failed process other than process 0, the last lines to show."""


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Run a command as several processes on this machine: launch --processes 2 -- train --steps 100."""

    processes: int = 2
    """Number of processes; they communicate over 127.0.0.1."""

    devices_per_process: int = 4
    """Simulated CPU devices per process."""

    restarts: int = 0
    """How often to start the run again from its last good checkpoint, with --resume, after a process has died."""

    min_processes: int | None = None
    """Start again without the process that has died, and its devices, down to this many. None: with all of them."""

    def __post_init__(self) -> None:
        for name, least in (("processes", 1), ("devices_per_process", 1), ("restarts", 0)):
            if not least <= getattr(self, name) <= 1024:
                raise UsageError(f"{name}={getattr(self, name)}: give at least {least}, and at most 1024.")
        if self.min_processes is not None:
            if not self.restarts:
                raise UsageError("min_processes without restarts: say how often to start again.")
            if not 1 <= self.min_processes <= self.processes:
                raise UsageError(f"min_processes={self.min_processes} is not within 1 to processes={self.processes}.")


def launch(command: Sequence[str], *, processes: int, devices_per_process: int, restarts: int = 0,
           smaller: Callable[[int], tuple[int, int] | None] | None = None) -> int:
    """Runs `python -m zero_jax` with the arguments `command` as that many processes; returns their exit status.

    Process 0 writes to this process's output; of another one the last lines are shown if it fails. SIGTERM and SIGINT
    are forwarded to all, which may take as long as they need to save; a second SIGINT kills. If this process is
    killed, they send themselves SIGTERM. If one fails without a signal, the others have a few seconds to end, and are
    then killed. The status is that of the first to fail, 128 + n where signal n ended it.

    Args:
      command: as of the command line, `train` and its options.
      processes: how many.
      devices_per_process: simulated CPU devices of each.
      restarts: how often to start again with `--resume` after a failure whose status is not in `FINAL`.
      smaller: called after a failure with the number of processes that are left; returns (processes, devices of each)
        to start again with, or None to give up. Default: as many as before.
    """
    received: list[int] = []
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, lambda number, _: received.append(number)))
        for restart in range(1, restarts + 2):
            failed, code = _run(command, processes, devices_per_process, received, again=restart <= restarts)
            status = code if code >= 0 else 128 - code
            if restart > restarts or received or status in FINAL:
                break
            if (chosen := (processes, devices_per_process) if smaller is None else smaller(processes - 1)) is None:
                break
            if chosen != (processes, devices_per_process):
                command = [*command, "--devices", str(math.prod(chosen))]
            processes, devices_per_process = chosen
            command = command if "--resume" in command else [*command, "--resume"]
            cause = f"ended with status {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
            print(f"Process {failed} {cause}. Restart {restart} of {restarts}, from the last good checkpoint, on "
                  f"{processes} processes with {devices_per_process} devices each.", file=sys.stderr, flush=True)
    return status


def _run(command: Sequence[str], processes: int, devices_per_process: int, received: Sequence[int], *, again: bool
         ) -> tuple[int, int]:
    """(the first process to fail, its return code), or (0, 0) when all have ended.

    again: the run is started again if this fails: when one has been killed, the others are given no time to end.
    """
    with contextlib.ExitStack() as stack:
        address, running = f"127.0.0.1:{_free_port()}", []
        stack.callback(_end, running)
        outputs: list[IO[bytes] | None] = [
            stack.enter_context(tempfile.TemporaryFile()) if number else None for number in range(processes)]
        for number, output in enumerate(outputs):
            variables = {COORDINATOR: address, NUM_PROCESSES: str(processes), PROCESS_ID: str(number),
                         LOCAL_DEVICES: str(devices_per_process), LAUNCHER: str(os.getpid())}
            # A session of its own, so that Ctrl-C on a terminal reaches it through this process only.
            running.append(subprocess.Popen(
                [sys.executable, "-m", "zero_jax", *command], env=os.environ | variables, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output and subprocess.STDOUT))
        first = _wait(running, received)
        if first is None:
            return 0, 0
        code = running[first].returncode
        others_end_anyway = again and code < 0 and not received
        _end(running, grace=0.0 if others_end_anyway else GRACE_SECONDS)
        for number, (process, output) in enumerate(zip(running, outputs, strict=True)):
            if output is not None and process.returncode not in (0, PREEMPTED):
                output.seek(0)
                lines = output.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]
                print("\n".join(f"[process {number}] {line}" for line in lines), file=sys.stderr, flush=True)
        return first, code


def end_with_launcher() -> None:
    """In a process that `launch` started: sends itself SIGTERM when the launcher is gone, for whatever reason."""
    def watch(launcher: str) -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    if launcher := os.environ.pop(LAUNCHER, ""):  # processes that this one starts have another parent
        threading.Thread(target=watch, args=(launcher,), daemon=True).start()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _wait(running: Sequence[subprocess.Popen], received: Sequence[int]) -> int | None:
    """Waits until all have ended, or one has failed without a forwarded signal; returns the first to fail, if any."""
    forwarded, first = 0, None
    while any(process.poll() is None for process in running):
        for number in received[forwarded:]:
            forwarded += 1
            kill = received[:forwarded].count(signal.SIGINT) > 1
            for process in running:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL if kill else number)
        first = _failed(running) if first is None else first
        if first is not None and not received:
            return first
        time.sleep(0.05)
    return _failed(running) if first is None else first


def _failed(running: Sequence[subprocess.Popen]) -> int | None:
    return next((number for number, process in enumerate(running) if process.poll()), None)


def _end(running: Sequence[subprocess.Popen], *, grace: float = 0.0) -> None:
    """Waits up to `grace` seconds for all to end, then kills the rest."""
    end = time.monotonic() + grace
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
