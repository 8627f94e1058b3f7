"""What the tests rest on: an oracle that knows nothing of the library, and rows that cover all pairs."""

import ast
import itertools
from pathlib import Path

from support.covering import pairs, pairwise

SUPPORT = Path(__file__).parents[1] / "support"


def imported(module: str) -> set[str]:
    """The top-level packages that a module of tests/support imports."""
    names = []
    for node in ast.walk(ast.parse((SUPPORT / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.split(".")[0] for name in names}


def test_the_oracle_knows_nothing_of_the_library():
    assert imported("plain_training") <= {"collections", "inspect", "typing", "flax", "jax", "optax"}
    assert "zero_jax" in imported("oracle")  # the control: an import is seen


def test_default_rows_cover_every_pair_and_the_others_are_slow():
    factors = ("a", "b"), (True, False), (1, 2), range(4)
    rows = pairwise(*factors)
    assert [row.values for row in rows] == [*itertools.product(*factors)]
    default = [row.values for row in rows if not row.marks]
    every = set().union(*map(pairs, itertools.product(*factors)))
    assert set().union(*map(pairs, default)) == every and len(default) == 8
    assert set().union(*map(pairs, default[:-1])) != every  # the control
