"""Options of `train` in a TOML file: `--config run.toml` beside flags, and the file that a run leaves. No JAX."""

import dataclasses
import itertools
import json
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from zero_jax.arguments import shown
from zero_jax.cli.environment import in_folder_of_run
from zero_jax.cli.flags import OTHER_NAMES
from zero_jax.cli.model_lookup import nearest
from zero_jax.errors import UsageError, named, printable
from zero_jax.files import read_regular

MAX_BYTES = 1 << 16
"""Of such a file; that of a run has about 2 KiB."""

OF_ONE_START = ("resume", "dry_run")
"""What a run's own file leaves out: it is said of a start and not of a run."""


def expand_config(args: Sequence[str], configs: Mapping[str, type]) -> list[str]:
    """`args` with the options of `--config FILE` in its place before all others, so that flags win.

    configs: the config class of each command that takes a file. Raises ValueError where the file cannot be read, is no
    TOML, or has a key or value that the command does not have.
    """
    files, others, rest = [], [], iter(args)
    for arg in rest:
        if arg == "--config":
            if (name := next(rest, None)) is None:
                raise UsageError("--config: give a TOML file, as in --config run.toml.")
            files.append(name)
        elif arg.startswith("--config="):
            files.append(arg.partition("=")[2])
        else:
            others.append(arg)
    if not files:
        return list(args)
    command = others[0] if others else ""
    if command not in configs:
        raise UsageError(f"--config: it holds options of {' and '.join(configs)}; {named(command)} takes none.")
    if len(files) > 1:
        raise UsageError(f"--config is given {len(files)} times: give one file, and other options as flags.")
    options = read_options(files[0], configs[command])
    flags = {OTHER_NAMES.get(name, name) for name in (
        arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in others[1:])}
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in flags:
            options.pop(other, None)
    return [command, *as_args(options), *others[1:]]


def read_options(path: str | Path, config: type) -> dict[str, Any]:
    """The options in the TOML file at `path`, by the names of the fields of `config`; dashes may stand for underscores.

    Raises ValueError for what is no TOML, unknown keys (with the nearest), tables, and values of another type.
    """
    if Path(path).suffix in (".yaml", ".yml", ".json"):
        raise UsageError(f"config={path}: write it as TOML (NAME = VALUE, a line each) in a file that ends in .toml.")
    hints, options = get_type_hints(config), {}
    for key, value in read_toml("config", path).items():
        name = key.replace("-", "_")
        if name not in hints:
            raise UsageError(f"config={path}: there is no option {named(key)}{nearest(name, list(hints))}")
        if name in options:
            raise UsageError(f"config={path}: {name} stands there twice, once with dashes.")
        if isinstance(value, float) and value.is_integer() and not fits(value, hints[name]):
            value = int(value)  # 1e3
        if not fits(value, hints[name]):
            kind = re.sub(r"<class '(\w+)'>|\w+\.(?=\w)", r"\1", str(hints[name]))
            raise UsageError(f"config={path}: {name} = {shown(value)} is not of type {kind}.")
        options[name] = value
    return options


def read_toml(option: str, path: str | Path) -> dict[str, Any]:
    """What the TOML file at `path`, the value of an option, has; raises ValueError where it cannot be read."""
    try:
        return tomllib.loads(read_regular(path, MAX_BYTES).decode("utf-8-sig"))  # editors on Windows begin with a mark
    except OSError as error:
        raise UsageError(f"{option}={path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option}={path} is not TOML: {printable(str(error))}.") from error


def as_args(options: Mapping[str, Any]) -> list[str]:
    """Options by name as arguments of the command line."""
    def one(name: str, value: Any) -> Iterable[str]:
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            return (flag if value else flag.replace("--", "--no-", 1),)
        return (flag, *map(str, value)) if isinstance(value, list) else (f"{flag}={value}",)

    return list(itertools.chain.from_iterable(one(name, value) for name, value in options.items()))


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from TOML is one of the type `hint` of a field.

    >>> fits(3, float), fits(True, int), fits(["a"], tuple[str, ...]), fits("b", Literal["a"])
    (True, False, True, False)
    """
    kind = get_origin(hint)
    if kind is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if kind in (Union, types.UnionType):
        return any(fits(value, each) for each in get_args(hint))
    if kind is tuple:
        return isinstance(value, list) and all(fits(each, get_args(hint)[0]) for each in value)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, {float: (int, float), Path: str}.get(hint, hint))


def config_text(config: Any, *, only_changed: bool = False) -> str:
    """The fields of `config` as TOML, a line each, which `read_options` reads back; None is left out, as its default.

    only_changed: leave out what has its default. What is said of one start (`--resume`) is never there.
    """
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None:
            assert field.default is None, field.name  # TOML has no null
        elif field.name not in OF_ONE_START and not (only_changed and value == field.default):
            lines.append(f"{field.name} = {toml(value)}\n")
    return "".join(lines)


def toml(value: Any) -> str:
    """A value of a field as TOML.

    >>> toml(("a", "b")), toml(1e-05), toml(float("inf")), toml(True)
    ('["a", "b"]', '1e-05', 'inf', 'true')
    """
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, (str, Path)):  # JSON's text is TOML's, but for the codes of other planes and of delete
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def save_config(config: Any, folder: Path, versions: Mapping[str, str]) -> Path:
    """Writes config.toml into the folder of a run, from which `train --config` starts the same run; returns its path.

    Raises ValueError where it cannot be written.
    """
    path = folder / "config.toml"
    head = (f"# All options of this run ({', '.join(f'{name} {version}' for name, version in versions.items())}).\n"
            f"# The same run again: python -m zero_jax train --config {path} --out ANOTHER_FOLDER\n")
    with in_folder_of_run(path):
        path.write_text(head + config_text(config), encoding="utf-8")
    return path
