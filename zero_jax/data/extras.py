"""Packages of the extra `data`, imported where they are used: what is missing is one error that names the extra."""

import importlib
import importlib.util
from types import ModuleType

from zero_jax.errors import UsageError

PACKAGES = {"grain": "grain", "tokenizers": "tokenizers", "sentencepiece": "sentencepiece", "pyarrow": "pyarrow",
            "scipy": "scipy", "sklearn": "scikit-learn", "jinja2": "jinja2", "PIL": "pillow", "gcsfs": "gcsfs"}
"""Modules of the extra, with the names under which they are installed; gcsfs is of the extra gcs."""


def check_installed(module: str, what: str) -> None:
    """Raises ValueError unless `module` can be imported, which it is not; `what` needs it."""
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"{what} needs the package {PACKAGES[module]}: pip install "
                         f"'zero-jax[{'gcs' if module == 'gcsfs' else 'data'}]'.")


def load(module: str, what: str) -> ModuleType:
    """The module of that dotted name, for `what`; raises ValueError where its package is not installed."""
    check_installed(module.partition(".")[0], what)
    return importlib.import_module(module)
