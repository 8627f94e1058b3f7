"""Writes docs/inventory.md: the targets, models and options that there are, read from the code.

    python scripts/tables/inventory.py

tests/docs/test_inventory.py compares the page with what this makes.
"""

import ast
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

from zero_jax.cli.train_config import TrainConfig
from zero_jax.xla.targets import built_in, chip_files

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "inventory.md"
INTRODUCTION = """# Targets, models and options

`python scripts/tables/inventory.py` makes this page from the code.
"""


def targets() -> list[str]:
    """The rows of chips that can be compiled and planned for."""
    return [f"| {chip.name} | {', '.join(f'`{name}`' for name in chip.examples)} | {chip.memory_bytes / 2**30:.1f} |"
            for chip in map(built_in, chip_files())]


def models() -> list[str]:
    """The rows of modules in models/ with presets."""
    rows = []
    for path in sorted((ROOT / "models").glob("*.py")):
        presets = getattr(importlib.import_module(f"models.{path.stem}"), "PRESETS", None)
        if presets:
            rows.append(f"| `{path.stem}` | {', '.join(f'`{name}`' for name in presets)} |")
    return rows


def first_sentence(text: str) -> str:
    """The first sentence of `text`, in one line, as a table's cell."""
    line = " ".join(text.split()).replace("|", "\\|")
    end = line.find(". ")
    return line[:end + 1] if end >= 0 else line


def kind(annotation) -> str:
    """The type of an option in words: the choices of a Literal, the names of types."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        of, within = get_args(annotation)
        low = "above 0" if 0 < within.low < 1e-6 else f"at least {within.low:g}"
        return f"{kind(of)}, {low}" + f", at most {within.high:g}" * (within.high < 2**31 - 1)
    names = [part for part in get_args(annotation) if part not in (type(None), Ellipsis)]
    return " or ".join(dict.fromkeys(map(kind, names))) if names else getattr(annotation, "__name__", str(annotation))


def options() -> list[str]:
    """For each group of `zero-jax train`'s options, its heading and rows."""
    parts = []
    for group in reversed(TrainConfig.__mro__):
        fields = group.__dict__.get("__annotations__", {})
        if not fields:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(group))).body
        assert isinstance(definition, ast.ClassDef)
        parts.append(f"\n### {first_sentence(group.__doc__ or group.__name__).rstrip('.')}\n\n"
                     "| option | values | default | what |\n| --- | --- | --- | --- |")
        for node, after in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
                name = node.target.id
                default = f"`{TrainConfig.__dataclass_fields__[name].default}`"
                parts.append(f"| `--{name.replace('_', '-')}` | {kind(fields[name])} | {default} | "
                             f"{first_sentence(ast.literal_eval(after.value))} |")
    return parts


def page() -> str:
    """The text of the page."""
    return "\n".join([
        INTRODUCTION,
        "## Targets\n\nOther sizes are written alike (`h100:16x8`: 16 hosts of 8).\n",
        "| chip | targets | memory, GiB |\n| --- | --- | --- |", *targets(),
        "\n## Models\n\n`--model MODULE:PRESET`, or a folder with a `config.json` ([models](guide/models.md)).\n",
        "| module | presets |\n| --- | --- |", *models(),
        "\n## Options of `zero-jax train`\n\n`zero-jax train --help` has the whole texts; "
        "[what does not go together](combinations.md).", *options(), ""])


if __name__ == "__main__":
    PAGE.write_text(page())
