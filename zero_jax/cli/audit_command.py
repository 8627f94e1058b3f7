"""`zero-jax audit`, `budgets` and `diff`: audits of steps that files define, their budgets, and what changed."""

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

from zero_jax.auditing.budgets import checked, read_budgets, update
from zero_jax.errors import UsageError, named
from zero_jax.xla.targets import Target, target_of

FOUND = 1
"""Exit status where something was found, so that a script can tell."""


@dataclasses.dataclass(frozen=True)
class AuditConfig:
    """Compile any jitted train step, and say what it sends, holds and waits for that it need not. Nothing runs."""

    step: str
    """FILE.py:NAME of the jitted function, as train.py:train_step."""
    args: str = ""
    """NAME in the same file, or FILE.py:NAME, of its arguments: a tuple of arrays or jax.ShapeDtypeStructs with
    shardings, or a function without arguments that returns it. Empty: NAME_args or example_args in the step's file."""
    target: str | None = None
    """A topology that need not be here, as h100:8: its number of devices is simulated while the file is imported.
    Without it the devices that are here."""
    params: str | None = None
    """How the labels of parameters begin, as state.params, where they are not found."""
    loss: str = ""
    """NAME in the step's file of loss(params, batch), without shardings: the same at stage 3 is compiled beside it."""
    json: bool = False
    """Print the report as JSON."""
    cache: Path | None = None
    """With --json: folder of reports, so that a program which is in it is not compiled again."""
    html: Path | None = None
    """Write the report as a page."""

    def check(self) -> Target | None:
        """The target; raises UsageError for what is wrong and can be known before JAX is imported."""
        _split(self.step)
        if self.args.count(":") or self.args.endswith(".py"):
            _split(self.args)
        if self.cache is not None and (self.html is not None or not self.json):
            raise UsageError(f"cache={self.cache} has reports as JSON alone: give --json, and no --html.")
        if self.html is not None and not self.html.parent.is_dir():
            raise UsageError(f"html={self.html}: there is no folder {self.html.parent}: make it.")
        return None if self.target is None else target_of(self.target)


@dataclasses.dataclass(frozen=True)
class BudgetsConfig:
    """Audit the steps of budgets.toml, and compare them with their budgets, or write these anew. Nothing runs."""

    action: Literal["check", "update"]
    """check: status 1 where a step exceeds its budget. update: writes the limits of the steps as they are now."""
    file: Path = Path("budgets.toml")
    """The file; paths of steps are relative to its folder."""
    cache: Path | None = None
    """Folder for reports, so that a program which is in it is not compiled again."""


@dataclasses.dataclass(frozen=True)
class DiffConfig:
    """Compare two reports of `zero-jax audit --json`: bytes, memory, FLOPs, time, and findings that came or went."""

    old: Path
    """The report before."""
    new: Path
    """The report after."""
    tolerance: float = 0.01
    """Share by which a number may change without a line."""


def audit_command(config: AuditConfig) -> int:
    """Prints the audit, and returns 0 where nothing was found, else 1."""
    target = config.check()
    if target is not None:
        from zero_jax.sharding.mesh import simulate_devices

        simulate_devices(target.num_devices)
    path, name = _split(config.step)
    module = _module(path)
    step = _value(module, path, name)
    args = _arguments(config, module, path, name)
    from zero_jax.auditing.audit import audit, cached_report

    if config.cache is not None:
        data = cached_report(config.cache, step, args, target=config.target, params=config.params)
        print(json.dumps(data))
        return FOUND if data["findings"] else 0
    report = audit(step, *args, target=config.target, params=config.params,
                   loss=_value(module, path, config.loss) if config.loss else None)
    if config.html is not None:
        report.to_html(config.html)
    print(json.dumps(report.to_json()) if config.json else report)
    return FOUND if report.findings else 0


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


def diff_command(config: DiffConfig) -> int:
    """Prints a line for each change, and returns 0 where there is none, else 1."""
    from zero_jax.auditing.compare import changes

    lines = changes(_report(config.old), _report(config.new), tolerance=config.tolerance)
    print(*(lines or ["nothing changed"]), sep="\n")
    return FOUND if lines else 0


def _split(text: str) -> tuple[Path, str]:
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"{named(text)} names no step: write FILE.py:NAME, as train.py:train_step.")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError(f"there is no file {path}: give the path of the file that defines {name}.")
    return path, name


def _module(path: Path) -> Any:
    """The module of a file, imported under its own name; its folder is on the path, as when Python runs it."""
    folder = os.fspath(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _value(module: Any, path: Path, name: str) -> Any:
    if not hasattr(module, name):
        raise UsageError(f"{path} has no {name}: give the name of what it defines at its top.")
    return getattr(module, name)


def _arguments(config: AuditConfig, module: Any, path: Path, step: str) -> tuple[Any, ...]:
    if ":" in config.args:
        other, name = _split(config.args)
        value = _value(module if other.resolve() == path.resolve() else _module(other), other, name)
    else:
        names = [config.args] if config.args else [f"{step}_args", "example_args"]
        name = next((each for each in names if hasattr(module, each)), None)
        if name is None:
            raise UsageError(f"{path} has no {' or '.join(names)}: define the step's arguments there, as a tuple of "
                             "jax.ShapeDtypeStructs with shardings or a function that returns it, or give --args.")
        value = getattr(module, name)
    value = value() if callable(value) else value
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _report(path: Path) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no report that can be read ({error}): give a file of zero-jax audit --json."
                         ) from error
    if not isinstance(data, dict) or "findings" not in data:
        raise UsageError(f"{path} is no report of an audit: give a file of zero-jax audit --json.")
    return data
