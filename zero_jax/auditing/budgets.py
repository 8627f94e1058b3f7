"""Budgets of steps: `budgets.toml` read and updated, and compared with audits. Nothing here imports JAX.

Each step is audited by `zero-jax audit` in a process of its own, since its target says how many devices are simulated.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_jax.auditing.compare import MIB, changes
from zero_jax.errors import UsageError, named
from zero_jax.files import read_regular, write_text
from zero_jax.xla.targets import target_of

LIMITS = {"sent_mib": ("sent_bytes", MIB), "memory_gib": ("device_bytes", 2**30),
          "exposed_ms": ("exposed_seconds", 1e-3),
          "recomputed_gflop": ("recomputed_flops", 1e9), "gflop": ("flops", 1e9)}
"""What a budget may limit, for a device and step: key of the report, and unit."""
TEXTS = ("target", "args", "params")
"""The keys that are options of `zero-jax audit`."""
TOLERANCE = 0.02
SMALLEST = 1e-3
"""Of each unit: by less a limit of 0 is not exceeded. Others are exceeded by 1e-5 of them, since files are rounded."""
MAX_BYTES = MIB


@dataclasses.dataclass(frozen=True)
class Budget:
    """A section of `budgets.toml`.

    Attributes:
        file: the path of `budgets.toml`; paths of steps are relative to its folder.
        step: FILE.py:NAME.
        options: of `zero-jax audit`: `TEXTS`.
        limits: by the keys of `LIMITS`.
        tolerance: share by which a step may exceed a limit, or stay below it without a word.
    """

    file: Path
    step: str
    options: Mapping[str, str]
    limits: Mapping[str, float]
    tolerance: float = TOLERANCE

    @property
    def reports(self) -> Path:
        """The file of the reports that the limits were taken from, which says why a limit is exceeded."""
        return self.file.with_suffix(".json")


def read_budgets(file: Path) -> list[Budget]:
    """The sections of a file; raises UsageError for what is wrong in it."""
    try:
        sections = tomllib.loads(read_regular(file, MAX_BYTES).decode())
    except FileNotFoundError as error:
        raise UsageError(f"there is no {file}: write one, with a section [\"FILE.py:NAME\"] for each step.") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is no TOML that can be read ({error}).") from error
    if not sections:
        raise UsageError(f"{file} has no section: write one for each step, as [\"train.py:train_step\"].")
    return [_budget(file, step, values) for step, values in sections.items()]


def _budget(file: Path, step: str, values: Any) -> Budget:
    known = (*TEXTS, "tolerance", *LIMITS)
    if not isinstance(values, dict) or ":" not in step:
        raise UsageError(f"{file}: {named(step)} names no step: write a section [\"FILE.py:NAME\"], in quotes.")
    for key, value in values.items():
        if key not in known:
            raise UsageError(f"{file}, {step}: there is no key {named(key)}: write {', '.join(known)}.")
        if key in TEXTS and not isinstance(value, str):
            raise UsageError(f"{file}, {step}: {key} = {value!r} is no text: write it in quotes.")
        if key not in TEXTS and not (isinstance(value, int | float) and value is not True and 0 <= value < math.inf):
            raise UsageError(f"{file}, {step}: {key} = {value!r} is no number from 0 on.")
    if "target" in values:
        target_of(values["target"])
    return Budget(file, step, {key: values[key] for key in TEXTS if key in values},
                  {key: float(values[key]) for key in LIMITS if key in values}, values.get("tolerance", TOLERANCE))


def audited(budget: Budget, cache: Path | None = None) -> dict[str, Any]:
    """The report on the step as it is now; raises UsageError for what `zero-jax audit` refuses.

    cache: folder of reports by program, see `audit.cached_report`.
    """
    options = dict(budget.options) | ({} if cache is None else {"cache": str(cache.absolute())})
    folder = budget.file.absolute().parent
    done = subprocess.run(
        [sys.executable, "-m", "zero_jax", "audit", budget.step, "--json", *(f"--{k}={v}" for k, v in options.items())],
        cwd=folder, text=True, capture_output=True)
    printed = done.stdout.strip().rpartition("\n")[2]  # after what the file itself prints
    if done.returncode not in (0, 1) or not printed.startswith("{"):
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"it ended with {done.returncode}"]
        reason = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
        raise UsageError(f"{budget.file}, {budget.step}: {reason.removeprefix('error: ')}")
    return json.loads(printed.replace(f"{folder}/", ""))  # lines of source are relative to budgets.toml


def compared(budget: Budget, report: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What exceeds its limit or is newly found, then all that changed and why; and the limits that could be tightened.

    Lines of changes are those of `zero-jax diff` between the report that the budget was written from and `report`.
    """
    over, below = [], []
    for key, limit in budget.limits.items():
        value = _measured(report, key)
        if value is None:
            continue
        text = f"{key}: {value:,.6g}, and its budget is {limit:,.6g}"
        slack = 1e-5 * limit or SMALLEST
        if value > limit * (1 + budget.tolerance) + slack:
            over.append(f"{text} (tolerance {100 * budget.tolerance:g} %)")
        elif value < limit * (1 - budget.tolerance) - slack:
            below.append(f"{text}: it could be tightened")
    before = _reports(budget).get(budget.step)
    known = {each["code"] for each in (before or report)["findings"]}
    over += [f"finding {each['code']}, which was not there when the budget was written" for each in report["findings"]
             if each["code"] not in known]
    if not over:
        return [], below
    limits = {LIMITS[key][0]: limit * LIMITS[key][1] for key, limit in budget.limits.items()}
    old = before or {**report, "findings": []}
    return [*over, *(f"  {line}" for line in changes({**old, **limits}, report, tolerance=budget.tolerance))], below


def checked(budget: Budget, cache: Path | None = None) -> tuple[list[str], list[str]]:
    """`compared` of the step as it is now. What exceeds is audited without the cache, so that its lines are of now."""
    result = compared(budget, audited(budget, cache))
    return compared(budget, audited(budget)) if cache and result[0] else result


def update(budget: Budget, cache: Path | None = None) -> list[str]:
    """Writes the limits of the step as it is now, with its report; returns a line for each limit.

    A section without limits gets all that can be measured. What else the file has stays, comments too.
    """
    report = audited(budget, cache)
    values = {key: value for key in budget.limits or LIMITS if (value := _measured(report, key)) is not None}
    text = budget.file.read_text(encoding="utf-8")
    header = re.search(rf"""(?m)^\s*\[\s*["']{re.escape(budget.step)}["']\s*\].*\n?""", text)
    if header is None:
        raise UsageError(f"{budget.file}: write the section of {budget.step} as [\"{budget.step}\"], and each "
                         "key in a line.")
    following = re.compile(r"(?m)^\s*\[").search(text, header.end())
    end = following.start() if following else len(text)
    body = text[header.end():end].strip()
    for key, value in values.items():
        line = f"{key} = {value:.6g}"
        body, found = re.subn(rf"(?m)^\s*{key}\s*=\s*[\w.+-]+", line, body)
        body = body if found else f"{body}\n{line}"
    body = f"{body.strip()}\n" + "\n" * bool(following)
    write_text(budget.file, f"{text[:header.end()].rstrip()}\n{body}{text[end:].lstrip()}")
    reports = json.dumps(_reports(budget) | {budget.step: report}, indent=1, sort_keys=True)
    write_text(budget.reports, reports + "\n")
    return [f"{key} = {value:,.6g}" + (f" (was {budget.limits[key]:,.6g})" if key in budget.limits else "")
            for key, value in values.items()]


def _measured(report: Mapping[str, Any], key: str) -> float | None:
    value, unit = report.get(LIMITS[key][0]), LIMITS[key][1]
    return None if value is None else value / unit


def _reports(budget: Budget) -> dict[str, Any]:
    try:
        return json.loads(budget.reports.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{budget.reports} is no JSON ({error}): write it anew by zero-jax budgets update.") from error
