"""Random keys among a model's variables that are arrays of integers, of which nothing makes others for each device."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from zero_jax.errors import UsageError
from zero_jax.jaxpr.equations import trace
from zero_jax.jaxpr.random_keys import raw_keys
from zero_jax.tree import named_leaves
from zero_jax.typing import Variables


def check_no_raw_keys(fun: Callable[[Variables], Any], variables: Variables) -> None:
    """Raises UsageError where `fun` draws from one of `variables` that is a raw key, as of `jax.random.PRNGKey`.

    For parts of a batch that are computed apart, and should not draw the same.
    """
    leaves = named_leaves(variables)
    if not any(leaf.dtype == jnp.uint32 and leaf.ndim for _, leaf in leaves):
        return
    drawn = raw_keys(trace(fun, variables))
    raw = [name for number, (name, leaf) in enumerate(leaves) if number in drawn and leaf.dtype == jnp.uint32]
    if raw:
        raise UsageError(
            f"The variable {raw[0]} is a raw random key, an array of uint32 as jax.random.PRNGKey makes it, from which "
            "all slices would draw the same noise: make it with jax.random.key, of which each gets its own.")
