"""What a loop of the user's own gives back to a step: gradients, parameters and variables of its making."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.sharding.layout import Layout
from zero_jax.step.call_checks import dtype_of, some
from zero_jax.step.guard import Guard
from zero_jax.step.metrics import is_array
from zero_jax.tree import named_leaves
from zero_jax.typing import Gradients, Params, Pytree, Variables


def check_params(params: Params | None, layout: Layout) -> None:
    """Raises ValueError unless `params`, in place of a state's, has a leaf for each of its stored shape; None: none."""
    if params is not None:
        _check_stored("params", params, layout.state.params, "a tree as state.params is")


def check_update(gradients: Gradients, loss: Any, variables: Variables | None, layout: Layout, guard: Guard | None
                 ) -> None:
    """Raises ValueError for what `apply_gradients` cannot take, or would take for something else."""
    _check_stored("gradients", gradients, layout.state.params, "a tree as step.gradients returns it")
    known, given = ({name: (np.shape(leaf), dtype_of(leaf)) for name, leaf in named_leaves(tree)}
                    for tree in (layout.state.variables, layout.state.variables if variables is None else variables))
    if wrong := [name for name in {**known, **given} if known.get(name) != given.get(name)]:
        raise UsageError(f"variables differ from those of the state in {some(wrong)}: give a tree as step.gradients "
                         "returns it.")
    if loss is None and guard is not None and guard.spike is not None:
        raise UsageError("apply_gradients without loss: this step's guard looks for spikes of it: give "
                         "loss=metrics[\"loss\"].")
    if loss is not None and not (
            is_array(loss) and np.shape(loss) == () and np.can_cast(dtype_of(loss), jnp.float32, "same_kind")):
        raise UsageError(f"apply_gradients(loss={shown(loss)}): give a real scalar, as metrics[\"loss\"].")


def _check_stored(what: str, given: Pytree, like: Pytree, todo: str) -> None:
    """`given` must have a leaf for each trainable parameter, `like`, of its stored shape.

    No complex number or integer becomes a floating one.
    """
    wanted, leaves = dict(named_leaves(like)), dict(named_leaves(given))
    if wrong := sorted(wanted.keys() ^ leaves.keys()) or [
            name for name, leaf in wanted.items() if np.shape(leaves[name]) != leaf.shape]:
        raise UsageError(f"{what} differ from the parameters as they are stored in {some(wrong)}: give {todo}.")
    for name, leaf in wanted.items():
        if not _keeps_values(dtype := dtype_of(leaves[name]), leaf.dtype):
            raise UsageError(f"{what}: {name} has dtype {dtype}, and the parameter has {leaf.dtype}: give {todo}.")


def _keeps_values(given: Any, stored: Any) -> bool:
    """Whether a leaf of dtype `given` is one of `stored` but for rounding; no complex number becomes a real one."""
    if not jnp.issubdtype(stored, jnp.inexact):
        return given == stored
    return jnp.issubdtype(given, jnp.floating) or jnp.issubdtype(given, jnp.inexact) and jnp.issubdtype(
        stored, jnp.complexfloating)
