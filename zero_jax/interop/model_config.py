"""The config.json of a checkpoint of transformers: whether it is of a model, and which of our models it is of. No JAX.

What its fields mean is a table of our models, `models/layers/huggingface.py`. These are `zero_jax.models`, and a wheel
contains them there. A checkout has them at its top, as `models/`, from where they are loaded under that same name:
`models` in `sys.modules` stays the user's.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.files import read_regular, write_text
from zero_jax.interop.safetensors_file import read_header

OURS = "zero_jax.models"
"""The package of our models, wherever it is loaded from."""


def folder_of_ours() -> Path | None:
    """Where our models are: in the installed package, or at the top of the checkout; None where somebody removed them.

    That the top is our checkout, and not a project that has a copy of zero_jax, is read from its pyproject.toml.
    """
    package = Path(__file__).resolve().parents[1]
    if (package / "models").is_dir():
        return package / "models"
    project = package.parent / "pyproject.toml"
    if (package.parent / "models").is_dir() and project.is_file() and 'name = "zero-jax"' in project.read_text():
        return package.parent / "models"
    return None


def import_ours(short: str) -> ModuleType:
    """Our module of that short name, as `zero_jax.models.<short>`, which its relative imports need."""
    if OURS not in sys.modules:
        if (folder := folder_of_ours()) is None:
            raise UsageError("The folder models/ of zero_jax is not there: install it again.")
        spec = importlib.util.spec_from_file_location(
            OURS, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None and spec.loader is not None
        sys.modules[OURS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[OURS])
    return importlib.import_module(f"{OURS}.{short}")


CONFIG, IN_FILE = "config.json", "zero_jax_config"
"""The file beside weights; the field of a safetensors file's metadata that holds the same text."""

_TABLE = "layers.huggingface"
"""Our module that says what the fields of each family mean."""

MAX_BYTES = 10_000_000
"""Of a config.json: larger is something else."""


def check_config(weights: Path, expected: Mapping[str, Any] | None, model: str, files: Iterable[Path] = ()) -> None:
    """Raises ValueError unless what is known of the model of `weights` describes `model`.

    That is the config.json beside them, and the one that their files hold.

    weights: the file, the index or the folder. expected: config.json of the model; None: not known. model: its name.
    files: those of the tensors.
    """
    files = sorted({*files})
    found = [(file, _parsed(file, text)) for file in files if (text := read_header(file)[1].get(IN_FILE)) is not None]
    if expected is None:
        if found:
            raise UsageError(f"{weights} says of which model it is, and of {model} that is not known: give "
                             "names=zero_jax.Names(config=llama.huggingface_config(config)), say, or the module of the "
                             "model a function huggingface_config(config).")
        return
    folder = weights if weights.is_dir() else weights.parent
    if (beside := read_config(folder)) is not None:
        found.append((folder / CONFIG, beside))
    if files and not found and weights.is_dir():
        raise UsageError(f"{weights} has no {CONFIG}, and tensors do not show the number of heads, say: put it there, "
                         "or name the file where you know that it is of this model.")
    for path, config in found:
        _compare(path, config, expected, model)


def _compare(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], model: str) -> None:
    kind = expected.get("model_type")
    if found.get("model_type", kind) != kind:
        raise UsageError(f"{path} is of a model of type {shown(found['model_type'])}, and {model} is of type {kind!r}: "
                         "give the checkpoint of such a model.")
    table = import_ours(_TABLE)
    try:
        theirs, ours = (table.settled(config, expected) for config in (found, expected))
    except table.ConfigError as error:
        raise UsageError(f"{path} says {error}") from error
    if (wrong := table.difference(theirs, ours)) is not None:
        name, value, own = wrong
        verb = "says" if name in found else "means"
        raise UsageError(f"{path} {verb} {name}={shown(value)}, and {model} has {shown(own)}: give a checkpoint of "
                         "this model, a preset that is the checkpoint's, or its folder as the model.")


def model_of(folder: Path) -> tuple[ModuleType, Any]:
    """(The module of ours that computes the model of a folder's config.json, its config).

    Raises ValueError where there is none, and where it is of a model or has a field that no module of ours has.
    """
    table = import_ours(_TABLE)
    if (config := read_config(folder)) is None:
        raise UsageError(f"{folder} has no {CONFIG}, and tensors do not show which model they are of: put it there.")
    try:
        return table.model_config(config, import_ours)
    except table.ConfigError as error:
        raise UsageError(f"{folder / CONFIG} says {error}") from error


def task_of(config: Mapping[str, Any]) -> str | None:
    """What the model of a config.json generates, as PEFT calls it; None for a model that does not generate."""
    tasks = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
    kinds = config.get("architectures") or ()
    return next((task for kind in kinds for end, task in tasks.items() if str(kind).endswith(end)), None)


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config.json of a folder; None where there is none. Raises ValueError for one that is no JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    try:
        return _parsed(path, read_regular(path, MAX_BYTES))
    except OSError as error:
        raise UsageError(f"{path} is not a model's config: it cannot be read ({error}).") from error


def _parsed(path: Path, text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a model's config: its JSON cannot be read ({error}).") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a model's config: its JSON is no object.")
    return value


def write_config(folder: Path, config: Mapping[str, Any], dtype: str) -> Path | None:
    """Writes config.json into `folder` and returns its path; None where there is one, which stays as it is."""
    path = folder / CONFIG
    if path.exists():
        return None
    write_text(path, json.dumps({**config, "torch_dtype": dtype}, indent=2) + "\n")
    return path
