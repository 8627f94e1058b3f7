"""Scripts that no test runs import what is there."""

import ast
import importlib

import pytest
from support.pages import ROOT

SCRIPTS = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "scripts").rglob("*.py"))}


def missing(source):
    """The names that a source imports from this repository, and that are not there."""
    return [f"{node.module}.{each.name}" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
            and node.module and node.module.partition(".")[0] in ("zero_jax", "models") for each in node.names
            if not is_there(node.module, each.name)]


def is_there(module, name):
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_imports_is_there(name):
    assert missing(SCRIPTS[name]) == []


def test_what_is_not_there_is_found():
    assert missing("from zero_jax.planning.plan import RESERVED, plan\nfrom zero_jax.nowhere import x") == [
        "zero_jax.planning.plan.RESERVED", "zero_jax.nowhere.x"]
