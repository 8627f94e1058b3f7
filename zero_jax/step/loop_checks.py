"""What a loop of the user's own gives back to a step: gradients, parameters and variables of its making."""

import contextlib
from collections.abc import Iterator

import numpy as np

from zero_jax.errors import UsageError
from zero_jax.sharding.layout import Layout
from zero_jax.step.call_checks import some
from zero_jax.step.guard import Guard
from zero_jax.tree import named_leaves
from zero_jax.typing import Gradients, Params, Pytree, Scalar, Variables


def check_params(params: Params | None, layout: Layout) -> None:
    """Raises ValueError unless `params`, in place of a state's, has a leaf for each of its stored shape; None: none."""
    if params is not None:
        _check_like(params, layout.state.params, "params differ from state.params", "a tree as state.params is")


def check_update(gradients: Gradients, loss: Scalar | None, variables: Variables | None, layout: Layout,
                 guard: Guard | None) -> None:
    """Raises ValueError for what `apply_gradients` cannot take."""
    _check_like(gradients, layout.state.params, "gradients differ from the parameters as they are stored",
                "a tree as step.gradients returns it")
    if variables is not None:
        _check_like(variables, layout.state.variables, "variables differ from state.variables",
                    "what step.gradients returned")
    if loss is None and guard is not None and guard.spike is not None:
        raise UsageError("apply_gradients without loss: this step's guard looks for spikes of it: give "
                         "loss=metrics[\"loss\"].")


@contextlib.contextmanager
def missing_loss_explained(loss: Scalar | None) -> Iterator[None]:
    """Explains a TypeError within where `loss` is None: of an optimizer that computes with it."""
    try:
        yield
    except TypeError as error:
        if loss is not None:
            raise
        raise UsageError("apply_gradients without loss, and the update fails: where the optimizer looks at the loss, "
                         f"give loss=metrics[\"loss\"]. It says: {type(error).__name__}: {error}") from error


def _check_like(given: Pytree, wanted: Pytree, what: str, todo: str) -> None:
    leaves, likes = dict(named_leaves(given)), dict(named_leaves(wanted))
    wrong = sorted(likes.keys() ^ leaves.keys()) or [
        name for name, like in likes.items() if np.shape(leaves[name]) != like.shape]
    if wrong:
        raise UsageError(f"{what} in {some(wrong)}: give {todo}.")
