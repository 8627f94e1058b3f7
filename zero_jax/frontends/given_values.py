"""Values that a user already has, of Linen, NNX or plain trees, by the names that a state has for them."""

from collections.abc import Container, Mapping
from typing import Any

import flax.linen as nn
from flax import nnx
from flax.core import meta, unfreeze

from zero_jax.errors import UsageError
from zero_jax.frontends.composition import name_of
from zero_jax.tree import named_leaves


def own_values(model: Any) -> dict[str, Any] | None:
    """The values of a bound Linen module, or of an object around a module with `params` (as Hugging Face's); else None.

    An NNX module's are found by its own path (`ModelFunctions.given`).
    """
    if isinstance(model, nn.Module):
        return None if model.scope is None else named_values(model)
    if not isinstance(model, nnx.Module) and isinstance(getattr(model, "module", None), nn.Module):
        try:
            params = model.params
        except (AttributeError, ValueError):  # made without values
            return None
        return named_values(params) if isinstance(params, Mapping) and params else None
    return None


def named_values(given: Any, variables: Any = None) -> dict[str, Any]:
    """The arrays of `given` by name, as `blocks/attention/kernel`, without random streams.

    given: a tree of parameters or of Linen's collections (`{"params": ..., "batch_stats": ...}`), boxed or not, a bound
    Linen module, an NNX module or state, or an object with `params`, as a `TrainState`. variables: of the step, a tree
    of the same names: those that are in other fields of such an object are taken, too. Raises ValueError for anything
    else.
    """
    if isinstance(given, nn.Module):
        if given.scope is None:
            raise UsageError(f"{type(given).__name__} is not bound to variables: give its parameters.")
        given = given.variables
    elif isinstance(given, nnx.Module):
        given = nnx.state(given)
    elif not isinstance(given, (Mapping, nnx.State)):
        params = getattr(given, "params", given)
        if isinstance(params, (Mapping, nnx.State)):
            return {**_in_fields(given, {name for name, _ in named_leaves(variables)}), **named_values(params)}
        given = params
    if isinstance(given, nnx.State):
        flat = [(path, variable) for path, variable in nnx.to_flat_state(given)
                if not isinstance(variable, nnx.RngState)]
        return {name_of(path): variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable
                for path, variable in flat}
    if not isinstance(given, Mapping):
        raise UsageError(f"params is a {type(given).__name__}: give a tree of arrays, a bound Linen module, or an NNX "
                         "module or state.")
    return dict(named_leaves(meta.unbox(unfreeze(dict(given)))))


def _in_fields(holder: Any, known: Container[str]) -> dict[str, Any]:
    """The values of `known` variables in fields of `holder`: collections of Linen by name, or states of NNX."""
    found = {}
    for field, tree in getattr(holder, "__dict__", {}).items():
        if field not in ("params", "opt_state") and isinstance(tree, (Mapping, nnx.State)):
            found |= {each: value for name, value in named_values(tree).items()
                      for each in (f"{field}/{name}", name) if each in known}
    return found
