"""Which parameters are trained, by patterns of their names."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from zero_jax.arguments import check_matched
from zero_jax.errors import UsageError
from zero_jax.precision import Precision
from zero_jax.sharding.batch import Accumulation
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.tree import named_leaves, split_named


def matches(patterns: Sequence[str], name: str) -> bool:
    """Whether `re.search` finds one of `patterns` in the name of a parameter, as `blocks/attention/kernel`."""
    return any(re.search(pattern, name) for pattern in patterns)


def split_trainable(params: dict[Any, Any], frozen: Sequence[str]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """(the parameters that are trained, those that are not) of a dict tree, both without the other's leaves."""
    others, trained = split_named(params, lambda name, _: matches(frozen, name))
    return trained, others


def check_trainable(params: dict[Any, Any], *, frozen: Sequence[str], keep: Sequence[str]) -> None:
    """Raises ValueError for a pattern that no name matches, where nothing is trained, and for what cannot be."""
    leaves = named_leaves(params)
    for argument, patterns in (("frozen", frozen), ("keep", keep)):
        check_matched(argument, patterns, [name for name, _ in leaves])
    trained = [(name, leaf) for name, leaf in leaves if not matches(frozen, name)]
    if leaves and not trained:
        raise UsageError(f"frozen={tuple(frozen)} matches every parameter: there is nothing to train.")
    for name, leaf in trained:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise UsageError(
                f"Parameter {name} has dtype {leaf.dtype} and shape {leaf.shape}, and only floating parameters can be "
                "trained: name it in frozen, or keep it in another collection (Linen) or another Variable type than "
                "nnx.Param (NNX).")


def check_written(trained: Any, reads: Mapping[str, ParamAccess], precision: Precision, accumulation: Accumulation
                  ) -> None:
    """Raises ValueError where the model overwrites a parameter in its forward pass and that cannot be carried on.

    trained: those that are trained, abstract, as they are stored.
    """
    dtypes = {name: leaf.dtype for name, leaf in named_leaves(trained)}
    for name in [name for name, read in reads.items() if read.written]:
        what = f"The model overwrites its parameter {name} in its forward pass"
        if name not in dtypes:
            raise UsageError(f"{what}, and frozen names it: leave it out of frozen.")
        if precision.read_dtype(name, dtypes[name]) != dtypes[name]:
            raise UsageError(
                f"{what}, and under this precision it sees it rounded to {precision.compute}: what it writes would "
                f"replace the {dtypes[name]} master copy. Give a Precision(..., keep=({name!r},)), or precision=None.")
        if accumulation.microbatches > 1:
            raise UsageError(f"{what}, and accumulate={accumulation.microbatches} would write it once for each "
                             "microbatch: give accumulate=1, or compute the value in the model without writing it.")
