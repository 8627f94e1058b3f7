"""Options by their names of version 0.1: accepted with a warning, and removed in the next release. No JAX."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from zero_jax.cli.model_lookup import saved_name

NEW_NAMES = {"length": "seq_len", "clip": "grad_clip_norm", "keep": "max_to_keep", "skip": "max_bad_steps",
             "recompute": "remat"}
"""Fields of the configs, and without `--` the options of the command line: the old name to the new one."""

REMAT_VALUES = {"True": "yes", "False": "no", "None": "model"}
"""What `plan --remat` took while --recompute stood beside it."""

C = TypeVar("C", bound=type)


def takes_old_names(cls: C) -> C:
    """A class decorator: a config's constructor and attributes by their old names too, with a DeprecationWarning."""
    init, names = cls.__init__, {old: new for old, new in NEW_NAMES.items() if hasattr(cls, new)}

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        for old in names.keys() & fields.keys():  # dataclasses.replace gives the new name, too
            warnings.warn(f"{cls.__name__}({old}=...) is now {names[old]}=....", DeprecationWarning, 2)
            fields[names[old]] = fields.pop(old)
        init(self, *args, **fields)

    cls.__init__ = __init__
    for old, new in names.items():
        setattr(cls, old, property(functools.partial(_old_attribute, old=old, new=new)))
    return cls


def _old_attribute(config: Any, *, old: str, new: str) -> Any:
    warnings.warn(f"{type(config).__name__}.{old} is now .{new}.", DeprecationWarning, 2)
    return getattr(config, new)


def current_args(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the arguments of a command by their new names, a line for each that had its old one)."""
    new_args, messages = [], []
    for number, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        new = NEW_NAMES.get(flag.removeprefix("--")) if flag.startswith("--") else None
        if new is not None:
            new_args.append(f"--{new.replace('_', '-')}{equals}{value}")
            messages.append(f"{flag} is now --{new.replace('_', '-')}; the next release takes the new name only.")
        elif flag == "--remat" and value in REMAT_VALUES:
            new_args.append(f"--remat={REMAT_VALUES[value]}")
            messages.append(f"{arg} is now --remat {REMAT_VALUES[value]}; the next release takes the new value only.")
        elif number and args[number - 1] == "--remat" and arg in REMAT_VALUES:
            new_args.append(REMAT_VALUES[arg])
            messages.append(f"--remat {arg} is now --remat {REMAT_VALUES[arg]}; the next release takes the new value "
                            "only.")
        else:
            new_args.append(arg)
    return new_args, messages


def current_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a saved run by the names that they have now."""
    options = {NEW_NAMES.get(name, name): value for name, value in saved.items()}
    if isinstance(options.get("model"), str):
        options["model"] = saved_name(options["model"])
    return options
