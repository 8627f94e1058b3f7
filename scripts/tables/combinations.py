"""Writes docs/combinations.md: what does not go together, from the tables of the library and the command line.

    python scripts/tables/combinations.py

tests/test_combinations.py compares the page with what this makes.
"""

from pathlib import Path

from zero_jax.cli.options.combinations import RUN, Flags
from zero_jax.cli.train_config import TrainConfig
from zero_jax.combinations import AXES, SLICES, STEP, Arguments, told

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
ALONE = {"shards": "one device to shard over", "one_hop": "gradients sent in one hop", "float16": "float16",
         "fp8": "products in float8",
         "copy": "a model that reads the master weights", "every_stage": "`--search fit`",
         "other_steps": "`--search`", "simulated": "simulated devices"}
HEADER = "| what | reason | what to do |\n| --- | --- | --- |"
INTRODUCTION = """# What goes with what

Options that do not go together, why, and what to do. `python scripts/tables/combinations.py` makes this page from the
tables that `make_zero_train_step`, `make_diloco_step` and the command line read (`zero_jax/combinations.py`,
`zero_jax/cli/options/combinations.py`), and from which the tests are made: what is not here goes together, as far as
mesh, model and batch allow. The command line refuses the same before JAX starts, in the names of its flags.
"""


def written(term, names):
    """A term as the page has it."""
    def option(name):
        if name in ALONE or name == "lora" and type(names) is Arguments:
            return ALONE.get(name, "adapters")
        if name in ("stage", "platform"):
            where = [str(value) for value in term.values]
            return f"{name} {' or '.join(where)}" if not term.negated else f"another {name} than {', '.join(where)}"
        if type(names) is Arguments and name in AXES:
            return f"a mesh axis `{name}`"
        if term.values:
            return " or ".join(f"`{names.option(name, names.value(value))}`" for value in term.values)
        whole = type(names) is Arguments and "." in name
        return f"`{names.option(name, '...') if whole else names.option(name)}`"

    if term.negated and term.names[0] not in ("shards", "copy", "platform"):
        return f"without {' or '.join(map(option, term.names))}"
    return " or ".join(map(option, term.names))


def line(row, names):
    """A row of the page."""
    first, *rest = (written(term, names) for term in row.terms)
    what = " ".join([first, *(text if text.startswith("without ") else f"with {text}" for text in rest)])
    cells = what, told(row.reason, names), told(row.remedy, names)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page():
    """The text of the page."""
    arguments, flags = Arguments(), Flags(TrainConfig())
    parts = ((f"## A step\n\n{HEADER}", STEP, arguments),
             (f"## Slices that train by themselves\n\n{HEADER}", SLICES, arguments),
             (f"## The command line\n\nThese beside those above:\n\n{HEADER}", RUN, flags))
    return "\n\n".join([INTRODUCTION.rstrip(), *("\n".join([head, *(line(row, names) for row in rows)])
                                                 for head, rows, names in parts)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
