"""The manifest of a checkpoint: what lies in it, as JSON that carries its own checksum.

It is read and held against what is asked for before any array is.
"""

import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

FORMAT, VERSION = "zero_jax checkpoint", 1

PARAMS = ("params", "frozen", "variables")
"""What is needed to use a model, and not to train it further: all that a checkpoint of kind "params" holds."""


class CheckpointError(ValueError):
    """A checkpoint cannot be saved or restored: the message says which, why, and what to do."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was saved. `restore(..., fallback=True)` takes the last one that is."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a checkpoint, in its true shape. digest: 16 hexadecimal digits, empty where it is only wanted."""

    shape: tuple[int, ...]
    dtype: str
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    step: its number. kind: "state", or "params": parameters, frozen ones and variables only. leaves: by name. run:
    stage and mesh of the run that saved it. data and config: as they were given, plain JSON. versions: of packages.
    """

    step: int
    kind: str
    leaves: Mapping[str, Leaf]
    run: Mapping[str, Any]
    data: Any
    config: Any
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """This as a dict that `json` can write, with the checksum over all of it."""
        body = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return {"sha256": _checksum(body), "manifest": body}


def parse(text: str | bytes, where: str) -> Manifest:
    """The manifest in `text`, which lies at `where`.

    Raises DamagedCheckpointError for what is not as it was written, CheckpointError for what another version wrote.
    """
    try:
        found = json.loads(text)
        body, checksum = found["manifest"], found["sha256"]
        whole = checksum == _checksum(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where} is damaged: it is no manifest ({error}).") from error
    if not whole:
        raise DamagedCheckpointError(f"{where} is damaged: its checksum is {checksum} and not {_checksum(body)}.")
    if body.get("format") != FORMAT or body.get("version") != VERSION:
        raise CheckpointError(
            f"{where} has format={body.get('format')!r} version={body.get('version')!r}, and this zero_jax reads "
            f"{FORMAT!r} version {VERSION}: restore it with the zero_jax that saved it, {body.get('versions')}.")
    try:
        leaves = {name: Leaf(tuple(leaf["shape"]), leaf["dtype"], leaf["digest"])
                  for name, leaf in body["leaves"].items()}
        rest = {key: body[key] for key in ("step", "kind", "run", "data", "config", "versions")}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} lacks what a manifest has ({error!r}): another program wrote it.") from error
    for name, leaf in leaves.items():
        check_name(name, where)
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in leaf.shape):
            raise CheckpointError(f"{where}: leaf {name} has shape={list(leaf.shape)}, which is none.")
        if not re.fullmatch("[0-9a-f]{16}", str(leaf.digest)):
            raise CheckpointError(f"{where}: leaf {name} has digest={leaf.digest!r}, which is none.")
    return Manifest(**rest, leaves=leaves)


def check_name(name: str, where: str) -> None:
    """Raises CheckpointError for the name of a leaf that could lead out of a folder or is no text."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or not name.isprintable() or "\\" in name or ":" in parts[0]:
        raise CheckpointError(
            f"{where}: {name!r} is no name of a leaf: give names of printable characters, without backslashes and "
            "without empty parts, '.' and '..' between slashes.")


def check_names(names: Iterable[str], where: str) -> None:
    """Raises CheckpointError for bad names, for two leaves of one name, and for a name that begins another's path."""
    seen: set[str] = set()
    for name in names:
        check_name(name, where)
        if name in seen:
            raise CheckpointError(f"{where}: two leaves are called {name}: give one of them another name.")
        seen.add(name)
    for name in seen:
        parts = name.split("/")
        for end in range(1, len(parts)):
            if (above := "/".join(parts[:end])) in seen:
                raise CheckpointError(f"{where}: {above} is a leaf, and {name} lies below it: rename one of them.")


def check_fit(manifest: Manifest, wanted: Mapping[str, Leaf], where: str, *, cast: bool) -> None:
    """Raises CheckpointError unless the checkpoint's leaves are those `wanted`, each with its shape and dtype.

    cast: floating dtypes may differ.
    """
    held = {name: leaf for name, leaf in manifest.leaves.items() if manifest.kind == "state" or name in wanted}
    if manifest.kind != "state" and (lacking := [name for name in wanted if _kind(name) not in PARAMS]):
        raise CheckpointError(
            f"{where} was saved with only_params=True and holds no {_kind(lacking[0])}: read it with load_params, and "
            "begin a new state from those parameters.")
    faults = []
    missing, extra = [name for name in wanted if name not in held], [name for name in held if name not in wanted]
    for name in missing:
        near = _nearest(name, wanted[name], extra, held)
        faults.append((name, f"{name} ({wanted[name]}) is not in the checkpoint" + (
            f"; it has {near} ({held[near]}), which this step lacks: was it renamed?" if near else "")))
    for name in extra:
        faults.append((name, f"{name} ({held[name]}) is in the checkpoint and not in this step"))
    for name, leaf in wanted.items():
        found = held.get(name)
        if found is not None and found.shape != leaf.shape:
            faults.append((name, f"{name} is {found} in the checkpoint and {leaf} in this step"))
        elif found is not None and found.dtype != leaf.dtype and not (cast and _floating(found) and _floating(leaf)):
            faults.append((name, f"{name} is {found} in the checkpoint and {leaf} in this step"
                           + ("" if not (_floating(found) and _floating(leaf)) else "; cast=True would convert it")))
    if faults:
        told = "; ".join(text for _, text in faults[:3])
        more = f"; and {len(faults) - 3} more leaves" if len(faults) > 3 else ""
        raise CheckpointError(f"{where} does not fit this step: {told}{more}. {_advice(name for name, _ in faults)}")


def _kind(name: str) -> str:
    return name.split("/")[0]


def _floating(leaf: Leaf) -> bool:
    return leaf.dtype in ("float16", "bfloat16", "float32", "float64")


def _nearest(name: str, leaf: Leaf, others: list[str], held: Mapping[str, Leaf]) -> str:
    """The name among `others` of a leaf of the same shape and dtype and of the same kind that is most like `name`."""
    alike = [other for other in others if held[other].shape == leaf.shape and _kind(other) == _kind(name)]
    return next(iter(difflib.get_close_matches(name, alike, n=1, cutoff=0.5)), "")


def _advice(names: Iterable[str]) -> str:
    """What to do, from where the leaves differ."""
    kinds = {_kind(name) for name in names}
    if kinds & {"params", "frozen"}:
        return "The model is another one, or its precision or frozen=: build the step with those that saved it."
    if "opt_state" in kinds:
        return "The optimizer is another one: give the one that saved it, or begin anew with load_params."
    if kinds <= {"ema", "guard"}:
        return f"Build the step with the {' and '.join(sorted(kinds))} (or precision) that saved it."
    return "Build the step as it was when this was saved."


def _checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
