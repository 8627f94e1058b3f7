"""One run at a time saves to a folder: a file beside it names the process that does.

The process touches the file every `HEARTBEAT` seconds. On the same host it is asked whether that process still exists;
elsewhere the file is watched for `STALE` seconds, so that the clocks of two hosts are never compared.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from zero_jax.disk.durable_files import make_folder
from zero_jax.errors import CheckpointError

LOG = logging.getLogger("zero_jax")
HEARTBEAT, STALE = 5.0, 20.0

_held: dict[str, "_Held"] = {}
_guard = threading.Lock()


def _forget() -> None:
    """In a forked child: the locks are the parent's, which goes on."""
    global _guard
    _guard = threading.Lock()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class RunLock:
    """The lock of a folder of checkpoints, as one of its users in this process; they share it."""

    def __init__(self, folder: Any):
        self.path = f"{os.path.realpath(folder)}.lock"  # one for all links to the folder
        self._is_user = False

    def acquire(self) -> str:
        """Takes the lock, if this process does not have it yet. Returns a message where it was that of a dead process.

        Raises CheckpointError while another process has it, and where one has taken it over since.
        """
        message = ""
        with _guard:
            try:
                if self.path not in _held:
                    _held[self.path] = _Held(self.path)
                    message = _held[self.path].taken_over
                held = _held[self.path]
                held.check()
            except OSError as error:
                LOG.warning("%s cannot be written (%s): another run in this folder would not be noticed.",
                            self.path, error)
                return ""
            held.users += not self._is_user
            self._is_user = True
        return message

    def release(self) -> None:
        """Removes the lock when this is its last user."""
        with _guard:
            held = _held.get(self.path)
            if held is None or not self._is_user:
                return
            self._is_user = False
            held.users -= 1
            if not held.users:
                del _held[self.path]
                held.end()


class _Held:
    """A lock that this process has: its file and the thread that touches it."""

    def __init__(self, path: str):
        self.path, self.users, self.taken_over, self._token = path, 0, "", uuid.uuid4().hex
        self._take()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="zero_jax lock", daemon=True).start()

    def check(self) -> None:
        """Writes the lock again where it was removed; raises CheckpointError where another process has it now."""
        owner = _read(self.path)
        if owner is None:
            LOG.warning("%s was removed while this process has it: it is written again.", self.path)
            self._take()
        elif owner.get("token") != self._token:
            raise CheckpointError(
                f"{self.path} was taken over by {_text(owner)}, while this process did not run: end one of them.")

    def end(self) -> None:
        """Removes the file, if it is still that of this process."""
        self._ended.set()
        with contextlib.suppress(OSError):
            if (_read(self.path) or {}).get("token") == self._token:
                os.unlink(self.path)

    def _take(self) -> None:
        make_folder(os.path.dirname(self.path))
        mine = f"{self.path}.{self._token}"
        Path(mine).write_text(json.dumps({
            "host": socket.gethostname(), "pid": os.getpid(), "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": _machine(), "started": _started(os.getpid()), "token": self._token}))
        try:
            while True:
                try:
                    os.link(mine, self.path)  # fails where the file exists; one with contents appears at once
                    return
                except FileExistsError:
                    self._remove_stale()
        finally:
            os.unlink(mine)

    def _remove_stale(self) -> None:
        """Removes the file of a process that is dead; raises CheckpointError for one that is not."""
        owner = _read(self.path)
        if owner is None:
            return
        if owner.get("machine") == _machine():
            started = _started(owner.get("pid"))
            alive = started is not None and started == owner.get("started")
        else:
            alive = _is_touched(self.path)
        if alive:
            raise CheckpointError(
                f"{self.path} says that {_text(owner)} saves to this folder: wait for the end of that run, or choose "
                "another folder.")
        aside = f"{self.path}.{self._token}.stale"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            taken = _read(aside)
            if taken != owner:  # another process was faster, and this is its lock
                os.link(aside, self.path)
            else:
                self.taken_over = f"{self.path} is taken over from {_text(owner)}, which is dead."
            os.unlink(aside)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def _read(path: str) -> dict[str, Any] | None:
    """The contents of a lock; None where there is none. One that is damaged has no owner."""
    try:
        owner = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _text(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('time')}"


def _machine() -> str:
    """What processes must share for one's id to mean the same to the other: a start of a kernel, and a namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _started(pid: Any) -> str | None:
    """When a process of this machine started, so that another with its id is distinguished; None where it is gone."""
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, IndexError):
        return None
    if os.path.exists("/proc/self/stat"):
        return None
    with contextlib.suppress(OSError):  # without /proc
        os.kill(int(pid), 0)
        return "alive"
    return None


def _is_touched(path: str) -> bool:
    """Whether a lock is touched within `STALE` seconds."""
    def touched() -> int | None:
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # NFS caches what is not opened
            return os.fstat(file.fileno()).st_mtime_ns
        return None

    first, deadline = touched(), time.monotonic() + STALE
    while first is not None and time.monotonic() < deadline:
        time.sleep(min(0.2, STALE / 20))
        if touched() != first:
            return touched() is not None
    return False
