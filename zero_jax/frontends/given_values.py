"""Values that a user already has, of Linen, NNX or plain trees, by the names that a state has for them."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from flax import nnx
from flax.core import meta, unfreeze

from zero_jax.errors import UsageError
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


def named_values(given: Any) -> dict[str, Any]:
    """The arrays of `given` by name, as `blocks/attention/kernel`, without random streams.

    given: a tree of parameters or of Linen's collections (`{"params": ..., "batch_stats": ...}`), boxed or not, a bound
    Linen module, an NNX module or state, or a Flax model object with `params`. Raises ValueError for anything else.
    """
    if isinstance(given, nn.Module):
        if given.scope is None:
            raise UsageError(f"{type(given).__name__} is not bound to variables: give its parameters.")
        given = given.variables
    elif isinstance(given, nnx.Module):
        given = nnx.state(given)
    elif not isinstance(given, (Mapping, nnx.State)):
        given = getattr(given, "params", given)
    if isinstance(given, nnx.State):
        flat = [(path, variable) for path, variable in nnx.to_flat_state(given)
                if not isinstance(variable, nnx.RngState)]
        return {"/".join(map(str, path)): variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable
                for path, variable in flat}
    if not isinstance(given, Mapping):
        raise UsageError(f"params is a {type(given).__name__}: give a tree of arrays, a bound Linen module, or an NNX "
                         "module or state.")
    return dict(named_leaves(meta.unbox(unfreeze(dict(given)))))
