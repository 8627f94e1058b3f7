"""The examples in docstrings print what they say."""

import doctest
import importlib

import pytest
from support.pages import ROOT

MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted((ROOT / "zero_jax").rglob("*.py"))
           if ">>>" in path.read_text()]


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name):
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed


def test_a_wrong_example_fails(capsys):
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(wrong).failed == 1 and "Expected:" in capsys.readouterr().out
