"""What the tests rest on: an oracle that knows nothing of the library, and how rows are chosen."""

import ast
import itertools
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis.internal.conjecture import providers
from support import slow_turn
from support.covering import covering, pairs, weekly
from support.short_random import draws_short, use

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


def test_rows_cover_every_pair():
    factors = ("a", "b"), (True, False), (1, 2), range(4)
    rows, every = covering(*factors), set().union(*map(pairs, itertools.product(*factors)))
    assert set().union(*map(pairs, rows)) == every and len(rows) == 8
    assert set().union(*map(pairs, rows[:-1])) != every  # the control


def test_after_the_first_rows_the_others_are_slow_rows_of_a_grid():
    def rows(**options):
        return weekly("a, b", [pytest.param(0, 1, marks=pytest.mark.slow), (2, 3), pytest.param(4, 5, id="x"), (6, 7)],
                      **options).args[1]

    def marks(rows):
        return [{mark.name for mark in row.marks} for row in rows]

    assert [row.values for row in rows()] == [(0, 1), (2, 3), (4, 5), (6, 7)] and rows()[2].id == "x"
    assert marks(rows()) == [{"slow"}, set(), {"slow", "grid"}, {"slow", "grid"}]
    assert marks(rows(default=3)) == [{"slow"}, set(), set(), set()]  # the control
    assert weekly("a", [(1, 2)]).args[1][0].values == ((1, 2),)


def drawn() -> np.ndarray:
    """Columns of normal numbers, of keys that are split off, folded in and given. Folding in 0 and 1 is splitting."""
    keys = [*jax.random.split(jax.random.key(0)), *[jax.random.fold_in(jax.random.key(0), i) for i in (2, 3, 7)],
            jax.random.key(0), jax.random.key(1)]
    return np.stack([jax.jit(lambda key: jax.random.normal(key, (64, 64)))(key).ravel() for key in keys], -1)


def test_short_random_numbers_are_spread_and_are_others(short_random):
    short = drawn()
    np.testing.assert_allclose(short.mean(0), 0, atol=0.06)
    np.testing.assert_allclose(np.corrcoef(short.T), np.eye(short.shape[1]), atol=0.06)
    np.testing.assert_allclose(short.std(0), 1, atol=0.06)
    assert all(len(np.unique(column)) > 4000 for column in short.T)
    use(short=False)
    assert not np.isclose(short, own := drawn(), atol=1e-3).all(-1).any()  # the control: JAX's own are back
    np.testing.assert_allclose(own[0, -2], jax.random.normal(jax.random.key(0), (64, 64))[0, 0])


@pytest.mark.parametrize(("folder", "marks", "short"), [
    ("step", set(), True), ("cli", set(), False), ("step", {"own_random"}, False), ("step", {"slow"}, False),
    ("step", {"slow", "short_random"}, True), ("cli", {"slow", "short_random"}, True)])
def test_which_tests_draw_short_random_numbers(folder, marks, short):
    item = types.SimpleNamespace(path=Path(f"tests/{folder}/test_a.py"), get_closest_marker=lambda name: name in marks)
    assert draws_short(item) == short


class Items(list):
    """In place of pytest's configuration, with what it has collected: two files, whose row 0 is not slow."""

    hook = property(lambda self: self)

    def __init__(self, turn):
        self.turn, self.left = turn, []
        names = [*(f"a.py::test_grid[{row}]" for row in range(100)), "b.py::test_pair[1]", "b.py::test_pair[2]",
                 *(f"a.py::test_{row}" for row in range(8))]
        super().__init__(types.SimpleNamespace(nodeid=name, get_closest_marker={
            "grid": "[" in name, "slow": "[0]" not in name}.get) for name in names)
        slow_turn.pytest_collection_modifyitems(self, self)

    def getoption(self, name):
        return {"--slow-turn": self.turn}[name]

    def pytest_deselected(self, items):
        self.left += items

    @property
    def names(self):
        return {item.nodeid for item in self}


def test_each_slow_row_has_its_turn_and_nothing_else_is_left_out():
    every = Items(None)
    assert len(every) == 110 and not every.left  # the control: without the option all run
    turns = [Items(str(turn)) for turn in range(slow_turn.GRIDS * slow_turn.OTHERS)]
    assert set().union(*(turn.names for turn in turns)) == every.names
    grids = [{name for name in turn.names if "[" in name and "[0]" not in name} for turn in turns[:slow_turn.GRIDS]]
    others = [{name for name in turn.names if "[" not in name} for turn in turns[:slow_turn.OTHERS]]
    for rows, number in (grids, 101), (others, 8):
        assert sum(map(len, rows)) == len(set().union(*rows)) == number  # each once
    assert all("a.py::test_grid[0]" in turn.names and len(turn) + len(turn.left) == 110 for turn in turns)
    assert turns[0].names == Items("0").names != turns[1].names
    for wrong in ("", "one", "-1"):
        with pytest.raises(pytest.UsageError, match="give the number of a turn"):
            Items(wrong)


def test_what_hypothesis_draws_does_not_depend_on_what_is_imported():
    """Without the change in conftest.py constants of all local modules, of this one, say, are drawn."""
    assert not len(providers._get_local_constants())
