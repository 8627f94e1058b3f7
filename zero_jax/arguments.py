"""Checks of arguments: texts, patterns and numbers of the wrong type are one clear UsageError each."""

import math
import operator
import os
import re
from collections.abc import Collection, Iterable
from typing import Any

from zero_jax.errors import UsageError, cut, printable


def texts(name: str, value: Any, example: str) -> tuple[str, ...]:
    """The argument `name` as a tuple of different texts: one text, or several. Raises UsageError for anything else."""
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, (tuple, list)) or not all(isinstance(each, str) for each in given):
        raise UsageError(f"{name}={shown(value)}: give a text or a tuple of texts, as {example}.")
    if len(set(given)) < len(given):
        raise UsageError(f"{name}={shown(value)}: one of these is given twice: leave it out.")
    return tuple(given)


def patterns(name: str, value: Any, example: str) -> tuple[str, ...]:
    """`texts`, each a regular expression."""
    given = texts(name, value, example)
    for pattern in given:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"{name}: {shown(pattern)} is no regular expression ({error}): give a pattern that "
                             f"re.search takes, as {example}; re.escape(name) matches a name itself.") from error
    return given


def check_matched(name: str, given: Iterable[str], names: Collection[str]) -> None:
    """Raises UsageError for a pattern of the argument `name` that `re.search` finds in none of `names`, parameters'."""
    for pattern in given:
        if not any(re.search(pattern, each) for each in names):
            raise UsageError(f"{name}: {pattern!r} matches no parameter. There are: {', '.join(names)}.")


def whole(name: str, value: Any, least: int) -> int:
    """The argument `name`, an integer of at least `least`; of any type that counts as one, but for booleans."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name}={shown(value)}: give a whole number of at least {least}.") from None
    if number < least:
        raise UsageError(f"{name}={number}: give at least {least}.")
    return number


def is_one_of(value: Any, *choices: str | bool) -> bool:
    """Whether `value`, of any type, is one of some texts and booleans. Arrays have no truth value to compare by."""
    return isinstance(value, (str, bool)) and value in choices


def is_number(value: Any) -> bool:
    """Whether `value` is a real number and finite; not a boolean, nor a text."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_path(name: str, value: Any) -> None:
    """Raises UsageError unless the argument `name` is the path of a file or folder."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise UsageError(f"{name}={shown(value)}: give the path of a file or folder, a text or a pathlib.Path.")
    if not os.fspath(value):
        raise UsageError(f"{name} is an empty text: give the path of a file or folder.")
    if "\0" in os.fspath(value):
        raise UsageError(f"{name}={shown(value)}: a path has no character of code 0.")


def shown(value: Any) -> str:
    """`value` for a message: its `repr` on one line, cut; only its type where that fails."""
    try:
        return printable(" ".join(cut(repr(value), 10_000).split()))
    except Exception:
        return f"<{type(value).__name__}>"
