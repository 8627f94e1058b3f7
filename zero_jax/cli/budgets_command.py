"""`zero-jax budgets check|update`: whether steps send, hold and wait for more than `budgets.toml` allows."""

import dataclasses
from pathlib import Path
from typing import Literal

from zero_jax.auditing.budgets import checked, read_budgets, update
from zero_jax.cli.audit_command import FOUND


@dataclasses.dataclass(frozen=True)
class BudgetsConfig:
    """Audit the steps of budgets.toml, and compare them with their budgets, or write these anew. Nothing runs."""

    action: Literal["check", "update"]
    """check: status 1 where a step exceeds its budget. update: writes the limits of the steps as they are now."""
    file: Path = Path("budgets.toml")
    """The file; paths of steps are relative to its folder."""
    cache: Path | None = None
    """Folder for reports, so that a program which is in it is not compiled again."""


def budgets_command(config: BudgetsConfig) -> int:
    """Prints a line for each step and what is the matter; returns 1 where a budget is exceeded, else 0."""
    exceeded = False
    for budget in read_budgets(config.file):
        if config.action == "update":
            print(f"{budget.step}: updated", *update(budget, config.cache), sep="\n  ")
            continue
        over, below = checked(budget, config.cache)
        exceeded |= bool(over)
        print(f"{budget.step}: {'exceeds' if over else 'within'} its budget", *over, *below, sep="\n  ")
    return FOUND if exceeded else 0
