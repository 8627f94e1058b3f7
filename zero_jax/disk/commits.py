"""The record by which a generation of states on disk becomes valid: what it says, and which ones a folder has."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from zero_jax.errors import CheckpointError, DamagedCheckpointError, few
from zero_jax.files import read_regular, retried, sealed, unsealed

FORMAT = "zero_jax states on disk 2"

RECORDS = "commit-0.json", "commit-1.json"
"""The files of a process's commit records, each of the generation file of its number."""

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
    checksums: tuple[str, ...]
    fingerprint: str
    leaves: dict[str, Any]
    note: Any = None

    @property
    def token(self) -> tuple[int, int]:
        """What tells this generation from all others."""
        return self.session, self.generation


def records_in(folder: Any) -> list[Path]:
    """The commit records of all processes in `folder`, whole or not; raises CheckpointError where it cannot be read."""
    def entries(path: Path) -> list[Path]:
        try:
            return sorted(path / name for name in retried(lambda: os.listdir(path), what=path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    return [path for own in entries(Path(folder)) if own.name.startswith("process-")
            for path in entries(own) if path.name in RECORDS]


def check_processes(folder: Any, num_processes: int) -> None:
    """Raises CheckpointError where all commits in `folder` are of runs of other numbers of processes."""
    owners = sorted({path.parent.name for path in records_in(folder)})
    if owners and not any(owner.endswith(f"-of-{num_processes:05}") for owner in owners):
        raise CheckpointError(
            f"disk: {folder} has the states of {few(owners)}, and this is a run of {num_processes} processes: start as "
            "many as before, or remove the folder to go on from a checkpoint.")


def process_folder(process: int, num_processes: int) -> str:
    """The name of the folder of a process."""
    return f"process-{process:05}-of-{num_processes:05}"


def sealed_commit(commit: Commit) -> dict[str, Any]:
    """What the record of a commit has."""
    return sealed(FORMAT, dataclasses.asdict(commit))


def read_commits(own: Path) -> tuple[list[Commit | None], list[str]]:
    """(the commit of each file in the folder of a process, None where it has no whole one; what is damaged, as text).

    Raises CheckpointError where a record cannot be read, and where another version of zero_jax wrote it.
    """
    commits: list[Commit | None] = []
    damaged = []
    for path in (own / name for name in RECORDS):
        commits.append(None)
        try:
            text = retried(lambda path=path: read_regular(path, _MAX_COMMIT_BYTES), what=path)
            body = unsealed(text, FORMAT, path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (DamagedCheckpointError, IsADirectoryError) as error:
            damaged.append(str(error))
            continue
        body["checksums"] = tuple(body["checksums"])
        commits[-1] = Commit(**body)
    return commits, damaged
