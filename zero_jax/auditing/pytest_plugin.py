"""`pytest --zero-jax-budgets`: a test for each section of the `budgets.toml` in pytest's root folder.

pytest imports this module in every run: without the flag nothing else is imported, and JAX never in its process.
"""

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the flag."""
    parser.getgroup("zero_jax").addoption(
        "--zero-jax-budgets", action="store_true", help="check what train steps send, hold and wait for: budgets.toml")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the tests."""
    if config.getoption("zero_jax_budgets"):
        from zero_jax.auditing.budgets import read_budgets
        from zero_jax.errors import UsageError

        try:
            budgets = read_budgets(config.rootpath / "budgets.toml")
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error
        items += [BudgetItem.from_parent(session, name=each.step, nodeid=f"budgets.toml::{each.step}", budget=each)
                  for each in budgets]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names the budgets that could be tightened."""
    below = [(report.nodeid, value) for report in terminalreporter.getreports("passed")
             for name, value in report.user_properties if name == "zero_jax_budget"]
    if below:
        terminalreporter.section("budgets")
        for nodeid, line in below:
            terminalreporter.line(f"{nodeid}: {line}")


class BudgetItem(pytest.Item):
    """The test of one budget."""

    def __init__(self, *, budget: Any, **arguments: Any):
        super().__init__(**arguments)
        self.budget = budget

    def runtest(self) -> None:
        """Fails where the step exceeds its budget."""
        from zero_jax.auditing.budgets import checked

        cache = getattr(self.config, "cache", None)
        over, below = checked(self.budget, cache and cache.mkdir("zero_jax_budgets"))
        self.user_properties += [("zero_jax_budget", line) for line in below]
        if over:
            pytest.fail("\n".join(over), pytrace=False)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """The lines, and no traceback of what a user gave."""
        return str(excinfo.value) if isinstance(excinfo.value, ValueError) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, int, str]:
        """Where the budget stands."""
        return self.budget.file, 0, self.name
