"""The record by which a generation of states on disk becomes valid: what it says, and which ones a folder has."""

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

from zero_jax.errors import CheckpointError, UsageError, few
from zero_jax.files import read_regular

FORMAT, VERSION = "zero_jax states on disk", 1

_MAX_COMMIT_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class Commit:
    """What a commit record says of its generation.

    Attributes:
        generation: its number, from 1 on; it is in file `generation % 2`.
        session: drawn when the folder was opened by the process that committed: the same number of another session is
            another generation.
        step: the number of steps that the state has taken.
        checksums: of each record.
        fingerprint, leaves: `RecordLayout.fingerprint` and `leaves` of what was written.
        note: what its writer said beside the state; plain JSON.
    """

    generation: int
    session: int
    step: int
    checksums: tuple[int, ...]
    fingerprint: str
    leaves: dict[str, Any]
    note: Any = None

    @property
    def token(self) -> tuple[int, int]:
        """What tells this generation from all others."""
        return self.session, self.generation


def has_commits(folder: Any) -> bool:
    """Whether some process committed a state in `folder`."""
    return any(Path(folder).glob("process-*/commit-*.json"))


def newest_commit(folder: Any, *, process: int = 0, num_processes: int = 1) -> Commit | None:
    """The last commit of a process, by its record alone; None where it has none.

    Raises CheckpointError where only a run of another number of processes has committed there.
    """
    own = Path(folder) / process_folder(process, num_processes)
    commits = [commit for slot in (0, 1) if (commit := read_commit(own / f"commit-{slot}.json")) is not None]
    if not commits and (others := sorted({path.parent.name for path in Path(folder).glob("process-*/commit-*.json")})):
        raise CheckpointError(
            f"disk: {folder} has the states of {few(others)}, and this is a run of {num_processes} processes: start as "
            "many as before, or remove the folder to go on from a checkpoint.")
    return max(commits, key=lambda commit: commit.generation, default=None)


def process_folder(process: int, num_processes: int) -> str:
    """The name of the folder of a process."""
    return f"process-{process:05}-of-{num_processes:05}"


def with_checksum(commit: Commit) -> dict[str, Any]:
    """What the record of a commit has."""
    body = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(commit)}
    return {**body, "checksum": _checksum(body)}


def read_commit(path: Path) -> Commit | None:
    """The commit in a file; None where there is none, or not the whole of one."""
    try:
        body = json.loads(read_regular(path, _MAX_COMMIT_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return None
    if not isinstance(body, dict) or body.pop("checksum", None) != _checksum(body):
        return None
    if (body.pop("format", None), body.pop("version", None)) != (FORMAT, VERSION):
        raise UsageError(f"disk: {path} is of another version of zero_jax: name another folder.")
    body["checksums"] = tuple(body["checksums"])
    return Commit(**body)


def _checksum(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
