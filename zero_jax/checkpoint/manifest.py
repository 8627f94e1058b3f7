"""The manifest of a checkpoint: its leaves and metadata, as JSON with its own checksum.

It is read, and compared with what the step expects, before any array is read.
"""

import contextlib
import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import jax

from zero_jax.distributed.agreement import check_same, spans_processes
from zero_jax.errors import CheckpointError, DamagedCheckpointError, UsageError
from zero_jax.files import sealed, unsealed
from zero_jax.step.step import ZeroTrainStep

FORMAT = "zero_jax checkpoint 2"

PARAMS = ("params", "frozen", "variables")
"""The parts of a state that inference needs: all that a checkpoint of kind "params" contains."""

PACKAGES = ("zero-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a checkpoint, in its logical shape. digest: 16 hexadecimal digits; empty where none was computed."""

    shape: tuple[int, ...]
    dtype: str
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    step: its number. kind: "state", or "params": parameters, frozen ones and variables only. leaves: by name. run:
    stage and mesh of the run that saved it. data, config: as passed to `save`, plain JSON. versions: of packages.
    """

    step: int
    kind: str
    leaves: Mapping[str, Leaf]
    run: Mapping[str, Any]
    data: Any
    config: Any
    versions: Mapping[str, str]

    def to_json(self, digests: Mapping[str, str] | None = None) -> dict[str, Any]:
        """This, its leaves with these `digests`, as a dict that `json` can write, with the checksum over all of it."""
        leaves = {name: leaf if digests is None else dataclasses.replace(leaf, digest=digests.get(name, ""))
                  for name, leaf in self.leaves.items()}
        return {"manifest": sealed(FORMAT, dataclasses.asdict(dataclasses.replace(self, leaves=leaves)))}


def parse(text: str | bytes, where: str) -> Manifest:
    """The manifest in `text`, the contents of the file `where`.

    Raises DamagedCheckpointError for what no version of zero_jax wrote, CheckpointError for what another version did.
    """
    try:
        record = json.loads(text)["manifest"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where} is damaged: it is no manifest ({error}).") from error
    body = unsealed(record, FORMAT, where)
    _check_types(body, where, step=int, kind=str, leaves=dict, run=dict, versions=dict)
    if lacking := {"data", "config"} - body.keys():
        raise DamagedCheckpointError(f"{where} lacks what a manifest has: {', '.join(sorted(lacking))}.")
    if body["kind"] not in ("state", "params"):
        raise DamagedCheckpointError(f"{where} is damaged: kind is {body['kind'][:50]!r}, and not state or params.")
    leaves = {}
    for name, leaf in body["leaves"].items():
        try:
            check_name(name, where)
        except CheckpointError as error:
            raise DamagedCheckpointError(str(error)) from error
        _check_types(leaf, f"{where}: leaf {name}", shape=list, dtype=str, digest=str)
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in leaf["shape"]):
            raise DamagedCheckpointError(f"{where}: leaf {name} has shape={leaf['shape']}, which is none.")
        if not re.fullmatch("[0-9a-f]{16}", leaf["digest"]):
            raise DamagedCheckpointError(f"{where}: leaf {name} has digest={leaf['digest']!r}, which is none.")
        leaves[name] = Leaf(tuple(leaf["shape"]), leaf["dtype"], leaf["digest"])
    rest = {key: body[key] for key in ("step", "kind", "run", "data", "config", "versions")}
    return Manifest(**rest, leaves=leaves)


def _check_types(value: Any, where: str, **types: type) -> None:
    """Raises DamagedCheckpointError unless `value` is a dict that has the given keys with values of the given types."""
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{where} is damaged: {str(value)[:50]!r} is no dict.")
    for key, kind in types.items():
        if key not in value:
            raise DamagedCheckpointError(f"{where} lacks what a manifest has: {key}.")
        if not isinstance(value[key], kind) or isinstance(value[key], bool):
            raise DamagedCheckpointError(
                f"{where} is damaged: {key} is {str(value[key])[:50]!r} and no {kind.__name__}.")


def check_name(name: str, where: str) -> None:
    """Raises CheckpointError for the name of a leaf that could point outside of its folder or is not printable."""
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
                raise CheckpointError(f"{where}: {above} is a leaf, and {name} is below it: rename one of them.")


def check_fit(manifest: Manifest, wanted: Mapping[str, Leaf], where: str, *, cast: bool) -> None:
    """Raises CheckpointError unless the checkpoint has exactly the `wanted` leaves, each with its shape and dtype.

    cast: floating dtypes may differ.
    """
    saved = manifest.leaves
    if manifest.kind != "state" and (lacking := [name for name in wanted if _kind(name) not in PARAMS]):
        raise CheckpointError(
            f"{where} was saved with only_params=True and holds no {_kind(lacking[0])}: read it with load_params, and "
            "begin a new state from those parameters.")
    faults = []
    missing, extra = [name for name in wanted if name not in saved], [name for name in saved if name not in wanted]
    for number, name in enumerate(missing):
        near = _nearest(name, wanted[name], extra, saved) if number < 3 else ""  # of those that the message shows
        faults.append((name, f"{name} ({wanted[name]}) is not in the checkpoint" + (
            f"; it has {near} ({saved[near]}), which this step lacks: was it renamed?" if near else "")))
    for name in extra:
        faults.append((name, f"{name} ({saved[name]}) is in the checkpoint and not in this step"))
    for name, leaf in wanted.items():
        other = saved.get(name)
        if other is not None and other.shape != leaf.shape:
            faults.append((name, f"{name} is {other} in the checkpoint and {leaf} in this step"))
        elif other is not None and other.dtype != leaf.dtype and not (cast and _floating(other) and _floating(leaf)):
            faults.append((name, f"{name} is {other} in the checkpoint and {leaf} in this step"
                           + ("" if not (_floating(other) and _floating(leaf)) else "; cast=True would convert it")))
    if faults:
        listed = "; ".join(text for _, text in faults[:3])
        more = f"; and {len(faults) - 3} more leaves" if len(faults) > 3 else ""
        raise CheckpointError(f"{where} does not fit this step: {listed}{more}. {_advice(name for name, _ in faults)}")


def package_versions() -> dict[str, str]:
    """The versions of the packages that save, of those that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _kind(name: str) -> str:
    return name.split("/")[0]


def _floating(leaf: Leaf) -> bool:
    return leaf.dtype in ("float16", "bfloat16", "float32", "float64")


def _nearest(name: str, leaf: Leaf, others: list[str], saved: Mapping[str, Leaf]) -> str:
    """The name among `others` of a leaf of the same shape and dtype and of the same kind that is most like `name`."""
    alike = [other for other in others[:1000] if len(other) < 1000
             and saved[other].shape == leaf.shape and _kind(other) == _kind(name)]
    return next(iter(difflib.get_close_matches(name, alike, n=1, cutoff=0.5)), "")


def _advice(names: Iterable[str]) -> str:
    """What to do, by the kinds of the leaves that differ."""
    kinds = {_kind(name) for name in names}
    if kinds & {"params", "frozen"}:
        return "The model is another one, or its precision or frozen=: build the step with those that saved it."
    if "opt_state" in kinds:
        return "The optimizer is another one: give the one that saved it, or start a new state with load_params."
    if kinds <= {"ema", "guard"}:
        return f"Build the step with the {' and '.join(sorted(kinds))} (or precision) that saved it."
    return "Build the step as it was when this was saved."


def run_of(step: ZeroTrainStep) -> dict[str, Any]:
    """Stage and mesh of a run, and alpha of its adapters, as a manifest has them."""
    lora = getattr(step, "lora", None)
    return {"stage": step.stage.number, "mesh": step.axes.sizes, "devices": step.mesh.size,
            "platform": step.axes.platform, "processes": jax.process_count(),
            **({} if lora is None else {"lora_alpha": float(lora.config.alpha)})}


def check_given(step: ZeroTrainStep, data: Any, config: Any) -> None:
    """Raises ValueError for what is not the same once it was written as JSON, and where processes give other `data`."""
    for name, value in (("data", data), ("config", config)):
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise UsageError(f"{name}={value!r} is not plain JSON: give dicts with text as keys, lists, text, numbers.")
    if spans_processes(step.mesh):
        check_same("data of Checkpoints.save", json.dumps(data, sort_keys=True),
                   "it is saved once: give all processes the same, as a dict of the positions of all of them")


def check_adapters(step: ZeroTrainStep, manifest: Manifest, where: str) -> None:
    """Raises CheckpointError where the adapters of `step` would be multiplied by another number than those saved."""
    lora, saved = getattr(step, "lora", None), manifest.run.get("lora_alpha")
    if lora is not None and saved is not None and lora.config.alpha != saved:
        raise CheckpointError(f"{where} has adapters of alpha={saved}, and those of this step have "
                              f"alpha={lora.config.alpha}, with which they would be another model: give "
                              f"zero_jax.lora(model, ..., alpha={saved}).")
