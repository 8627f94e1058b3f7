"""The inputs of a model in its compute dtype, and nothing else of a batch: targets and weights keep theirs.

Flax promotes inputs and parameters to one dtype, so that a float32 input turns bfloat16 parameters into float32
products. What is cast is what the model is called with, wherever the loss took it from.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta


def casting_inputs(fun: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """`fun(model, batch)` with a model that casts floating arguments to `dtype` where `fun` calls it.

    A Linen model does so in every method that `fun` calls, its submodules' too; an NNX model in its `__call__`.
    """
    def with_casts(model: Any, batch: Any, **key: Any) -> Any:
        if isinstance(model, nn.Module):
            with nn.intercept_methods(_outermost_casts(model, dtype)):
                return fun(model, batch, **key)
        if isinstance(model, nnx.Module) and callable(model):
            object.__setattr__(model, "__class__", _casting_class(type(model), dtype))
        return fun(model, batch, **key)

    return with_casts


def _outermost_casts(model: Any, dtype: Any) -> Callable[..., Any]:
    """A Linen interceptor that casts the arguments of those calls of `model` that none of its modules makes."""
    depth = 0

    def interceptor(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        nonlocal depth
        scope = context.module.scope
        if not depth and scope is not None and scope.root is model.scope.root:  # and no module of the loss's own
            args, kwargs = _cast((args, kwargs), dtype)
        depth += 1
        try:
            return method(*args, **kwargs)
        finally:
            depth -= 1

    return interceptor


@functools.lru_cache
def _casting_class(cls: Any, dtype: Any) -> Any:
    """The NNX class `cls` whose calls cast their arguments."""
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), dtype)
        return cls.__call__(self, *args, **kwargs)

    names = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls)(cls.__name__, (cls,), names)


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, (jax.Array, np.ndarray)) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree, is_leaf=lambda leaf: isinstance(leaf, (meta.AxisMetadata, nn.Module, nnx.Module)))
