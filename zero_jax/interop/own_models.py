"""Where our models are, and how they are imported. No JAX.

They are `zero_jax.models`, and a wheel contains them there. A checkout has them at its top, as `models/`, from where
they are loaded under that same name: `models` in `sys.modules` stays the user's.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from zero_jax.errors import UsageError

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
