"""The scripts of this repository as modules."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from support.pages import ROOT


@contextmanager
def script(path: str) -> Iterator[ModuleType]:
    """The module of `scripts/PATH.py`, loaded anew, with its own folder on the path as when it is run."""
    file = ROOT / "scripts" / f"{path}.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    sys.modules[file.stem] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[file.stem]
        sys.path.remove(str(file.parent))
