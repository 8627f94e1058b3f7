"""Values of options: choices, ranges, and the check of both. No JAX."""

import dataclasses
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from zero_jax.cli.model_lookup import nearest
from zero_jax.errors import UsageError

MAX_COUNT = 2**31 - 1
"""Steps and sizes are int32 on the devices."""


@dataclasses.dataclass(frozen=True)
class Within:
    """The range of an option, both ends included: `steps: Annotated[int, Within(1)]`."""

    low: float
    high: float = math.inf

    def check(self, name: str, value: Any) -> None:
        """Raises UsageError for a value beyond it, and for what is no number."""
        if self.low <= value <= self.high:
            return
        if self.high == MAX_COUNT:
            raise UsageError(f"{name}={value}: give at "
                             f"{f'least {self.low}' if value < self.low else f'most {MAX_COUNT}'}.")
        if self == FRACTION:
            raise UsageError(f"{name}={value}: give a fraction between 0 and 1, as 0.15.")
        if 0 < self.low < 1e-6:
            raise UsageError(f"{name}={value}: give a number above 0"
                             f"{f' and at most {self.high:g}' if self.high < math.inf else ''}.")
        if self.high == math.inf:
            raise UsageError(f"{name}={value}: give at least {self.low}.")
        raise UsageError(f"{name}={value} is not within {self.low} to {self.high}.")


FRACTION = Within(1e-9, 1 - 1e-9)
"""More than nothing and less than all."""

Count = Annotated[int, Within(1, MAX_COUNT)]
"""How many of something there are, at least one."""


def settle(config: Any) -> None:
    """Makes tuples and paths of what stands for them in a new config, and checks its choices and ranges.

    Raises UsageError for the first value that its type does not have.
    """
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        kinds, value = list(kinds_of(hint)), getattr(config, name)
        if any(get_origin(kind) is tuple for kind in kinds) and value is not None:
            value = (value,) if isinstance(value, str) else tuple(value)
        elif Path in kinds and isinstance(value, str) and value:
            value = Path(value)
        object.__setattr__(config, name, value)
        known = choices_of(hint)
        for each in value if isinstance(value, tuple) else () if value is None else (value,):
            if known and each not in known:
                raise UsageError(f"{name}={each!r} is unknown{nearest(str(each), [*map(str, known)])}")
            for kind in kinds:
                if isinstance(kind, Within):
                    kind.check(name, each)


def kinds_of(hint: Any) -> Iterator[Any]:
    """What a field's type is made of, the type itself among it: classes, choices, and ranges."""
    yield hint
    if get_origin(hint) in (Annotated, Union, types.UnionType, tuple):
        for part in (*get_args(hint), *getattr(hint, "__metadata__", ())):
            yield from kinds_of(part)


def choices_of(hint: Any) -> list[Any]:
    """The values of a type that has only some."""
    return [choice for kind in kinds_of(hint) if get_origin(kind) is Literal for choice in get_args(kind)]
