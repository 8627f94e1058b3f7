"""Options of a step by the names of their fields, as tables of tests combine them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import zero_jax
from zero_jax.step.options import Communication, Parallelism


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `make_zero_train_step`: what `Communication` and `Parallelism` have as fields is put into them."""
    result = dict(options)
    for name, kind in (("communication", Communication), ("parallelism", Parallelism)):
        fields = {field.name: result.pop(field.name) for field in dataclasses.fields(kind) if field.name in result}
        if fields and isinstance(base := result.get(name) or kind(), kind):  # anything else is refused as it is
            result[name] = dataclasses.replace(base, **fields)
    return result


def flat_step(model: Any = None, stage: int = 3, **options: Any) -> zero_jax.ZeroTrainStep:
    """`make_zero_train_step` of such options."""
    return zero_jax.make_zero_train_step(model, stage, **nested(options))
