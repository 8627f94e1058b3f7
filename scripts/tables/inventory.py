"""Writes docs/inventory.md: the targets, models and options that there are, read from the code.

    python scripts/tables/inventory.py

tests/docs/test_inventory.py compares the page with what this makes.
"""

import importlib
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from zero_jax.cli.flags import first_sentence, flag_of, subjects_of, texts_of
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
    parts, texts = [], texts_of(TrainConfig)
    hints = get_type_hints(TrainConfig, include_extras=True)
    for subject, names in subjects_of(TrainConfig).items():
        parts.append(f"\n### {subject}\n\n| option | values | default | what |\n| --- | --- | --- | --- |")
        for name in names:
            text = first_sentence(texts[name]).replace("|", "\\|")
            default = TrainConfig.__dataclass_fields__[name].default
            parts.append(f"| `{flag_of(name)}` | {kind(hints[name])} | `{default}` | {text} |")
    return parts


def page() -> str:
    """The text of the page."""
    return "\n".join([
        INTRODUCTION,
        "## Targets\n\nOther sizes are written alike (`h100:16x8`: 16 hosts of 8).\n",
        "| chip | targets | memory, GiB |\n| --- | --- | --- |", *targets(),
        "\n## Models\n\n`--model MODULE:PRESET`, or a folder with a `config.json` ([models](guide/models.md)).\n",
        "| module | presets |\n| --- | --- |", *models(),
        "\n## Options of `zero-jax train`\n\n`zero-jax train --help-all` has the whole texts; "
        "[what does not go together](combinations.md).", *options(), ""])


if __name__ == "__main__":
    PAGE.write_text(page())
