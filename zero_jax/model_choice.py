"""The model that a name on the command line stands for. Nothing here imports JAX: a mistake is answered at once."""

import dataclasses
import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """A preset of a module of models: `build(config)` makes the Flax model.

    names: the module's `huggingface`, which gives the fields of `Names` for a config; None where it has none.
    rules: `tensor_rules(config)` of the module, how tensor parallelism splits its parameters; None if it has none.
    """

    name: str
    config: Any
    build: Callable[[Any], Any]
    names: Callable[[Any], Mapping[str, Any]] | None = None
    rules: Callable[[Any], Any] | None = None

    def tensor_rules(self, tensor: int) -> tuple[Any, ...]:
        """The rules for an axis of size `tensor`; none for 1. Raises ValueError where the module has none."""
        if tensor == 1:
            return ()
        if self.rules is None:
            raise ValueError(f"tensor={tensor}: {self.name.partition(':')[0]} has no tensor_rules(config), which say "
                             "how parameters are split: write them, or leave tensor out.")
        return tuple(self.rules(self.config))

    def check(self, *, length: int, vocab_size: int | None) -> None:
        """Raises ValueError for sequences or token ids that the model's config has no room for."""
        longest, known = getattr(self.config, "max_length", None), getattr(self.config, "vocab_size", None)
        if longest is not None and length > longest:
            raise ValueError(f"length={length} is longer than max_length={longest} of {self.name}.")
        if known is not None and vocab_size is not None and vocab_size > known:
            raise ValueError(f"The data's vocabulary of {vocab_size} is larger than vocab_size={known} of {self.name}.")


def find_model(name: str) -> ModelChoice:
    """The model that MODULE:PRESET stands for, of any importable module with `PRESETS` and `build`.

    The current folder is searched too. Raises ValueError for one that is not there, with the nearest that is; an
    error inside the module is its own.
    """
    module_name, _, preset = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not _exists(module_name):
        raise ValueError(
            f"model={name!r}: there is no module {module_name!r}" + nearest(module_name, _modules_beside(module_name)))
    module = importlib.import_module(module_name)
    presets, build = getattr(module, "PRESETS", None), getattr(module, "build", None)
    if not isinstance(presets, Mapping) or not callable(build):
        raise ValueError(
            f"model={name!r}: {module_name} lacks PRESETS (configs by name) or build(config) (a Flax model)"
            + nearest(module_name, _modules_beside(module_name)))
    if preset not in presets:
        wrong = f"{module_name} has no preset {preset!r}" if preset else f"name a preset, as in {module_name}:PRESET"
        raise ValueError(f"model={name!r}: {wrong}" + nearest(preset, list(presets)))
    return ModelChoice(name, presets[preset], build, getattr(module, "huggingface", None),
                       getattr(module, "tensor_rules", None))


def _exists(module: str) -> bool:
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its package is not there; a name such as "a..b"
        return False


def _modules_beside(module: str) -> list[str]:
    """Names of modules in the same package; in `models` where there is no such package."""
    for package in (module.rpartition(".")[0], "models"):
        if _exists(package):
            spec = importlib.util.find_spec(package)
            folders = spec.submodule_search_locations if spec else None
            return [f"{package}.{found.name}" for found in pkgutil.iter_modules(folders)]
    return []


def nearest(word: str, known: list[str]) -> str:
    """The end of a message about `word`, which is none of `known`: the one that it may have meant, and all."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    hint = f". Did you mean {close[0]!r}?" if close else "."
    return hint + (f" There are: {', '.join(known)}." if known else "")
