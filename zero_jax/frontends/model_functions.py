"""A Linen or NNX model, or a function of parameters, as pure functions: below this module all go one way."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.frontends.composition import Composition
from zero_jax.frontends.functional import Functional
from zero_jax.frontends.given_values import named_values
from zero_jax.frontends.linen import Linen
from zero_jax.frontends.lora import Lora, LoraModel
from zero_jax.frontends.nnx import Nnx
from zero_jax.precision import Precision
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.transforms.remat import Remat


class ModelFunctions(Protocol):
    """A model as pure functions. `fun(model, batch)` is the user's; `model` is a bound Linen or a merged NNX module."""

    given: Any
    """Arrays that `init` takes as its last argument: the values of a module that was given constructed."""
    metadata: dict[str, tuple[Any, ...]]
    """Flax's partitioning metadata: for parameters that have some, a name for each dim. Known once `init` is traced."""

    set_by_gradient: tuple[str, ...]
    """Collections of variables whose next value is their gradient, whatever the loss is multiplied by."""

    composition: Composition
    """The model's parameters that are computed from several stored leaves. Known once `init` is traced."""

    def init(self, fun: Callable[..., Any], rng: Any, batch: Any, given: Any) -> tuple[Any, Any]:
        """(params, variables), traceable."""
        ...

    def lasting(self, variables: Any) -> Any:
        """Those of `variables` that steps hand on. Known once `reads` has run."""
        ...

    def run(self, fun: Callable[..., Any], params: Any, variables: Any, rng: Any, batch: Any, uses: Any,
            *, train: bool = True, reads: Mapping[str, ParamAccess] | None = None
            ) -> tuple[Any, Any, dict[str, Any]]:
        """(`fun(model, batch)`, new variables, the parameters that it overwrote, by name, in their true shapes).

        Every parameter is read through its leaf of `uses`. reads: how `fun` does so; None: as `reads` found last.
        """
        ...

    def reads(self, fun: Callable[..., Any], params: Any, variables: Any,
              rng: Any, batch: Any) -> dict[str, ParamAccess]:
        """How `fun` reads each parameter, by its name."""
        ...


def to_model_functions(model: Any, streams: Sequence[str], precision: Precision | None = None) -> ModelFunctions:
    """`model`, a Linen module, an NNX module or a function of `rngs` that makes one, as pure functions.

    It may have adapters (`lora`). precision: in which dtype it reads its parameters. Raises ValueError for anything
    else.
    """
    if isinstance(model, Functional):
        return model
    if isinstance(model, LoraModel):
        return Lora(to_model_functions(model.model, streams), model, precision or Precision())
    if not isinstance(model, (nn.Module, nnx.Module)) and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # an object around a module and its parameters, as Hugging Face's Flax models are
    if isinstance(model, nn.Module):
        return Linen(model if model.scope is None else model.unbind()[0], streams)
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(f"model={model.__name__} is a Linen class: give an instance, {model.__name__}(...).")
    if isinstance(model, nnx.Module) or callable(model):
        return Nnx(model)
    raise UsageError(
        f"model={shown(model)} is a {type(model).__name__}, not a Flax module: give a flax.linen.Module, a "
        "flax.nnx.Module, or a function of rngs that makes an nnx.Module.")


def other_reads(model: ModelFunctions, fun: Callable[..., Any], *args: Any) -> dict[str, ParamAccess]:
    """`model.reads(fun, *args)` of another function than the loss, after which `model` is as it was before."""
    kept = dict(vars(model))
    try:
        return model.reads(fun, *args)
    finally:
        vars(model).update(kept)


def stored_values(model: ModelFunctions, given: Mapping[str, Any], rng: Any) -> Mapping[str, Any]:
    """Values of the stored leaves by name, from those of the model's parameters; `rng` draws new adapters."""
    return model.stored_values(given, rng) if isinstance(model, Lora) else given


def _without_adapters(model: ModelFunctions) -> Any:
    return model.base if isinstance(model, Lora) else model


def named(model: ModelFunctions, given: Any, variables: Any) -> dict[str, Any]:
    """The values that a user gives, by the names that the state has for them; variables: of the state."""
    base = _without_adapters(model)
    if isinstance(base, Functional) and (base is model or base.is_given(given)):
        return base.named(given)
    return named_values(given, variables)


def as_given(model: ModelFunctions, params: Any) -> Any:
    """All parameters, a dict tree, as the user has them."""
    return model.as_given(params) if isinstance(model, Functional) else params


def check_has_values(model: ModelFunctions) -> None:
    """Raises UsageError for a function of parameters of which shapes alone are known."""
    base = _without_adapters(model)
    if isinstance(base, Functional) and base.is_abstract:
        raise UsageError("init: this step was made of shapes alone: give values, as init(rng, batch, params=params).")


def is_function(model: ModelFunctions) -> bool:
    """Whether it is a function of parameters, with adapters or without."""
    return isinstance(_without_adapters(model), Functional)


def is_nnx(model: ModelFunctions) -> bool:
    """Whether it is an NNX module, with adapters or without."""
    return isinstance(_without_adapters(model), Nnx)


def reseeded(model: ModelFunctions, variables: Any, rng: Any) -> Any:
    """`variables` with the random streams that an NNX module owns derived from `rng`; traceable."""
    base = _without_adapters(model)
    return base.with_streams(variables, rng) if isinstance(base, Nnx) else variables


def remat(block: Any, policy: Any = "full", **options: Any) -> Any:
    """`block` checkpointed: a drop-in for `flax.linen.remat` and `flax.nnx.remat`.

    block: a Linen class, an NNX class (its `__call__` is checkpointed), or a function of NNX modules. policy: as
    `Remat.policy`. options: of the one or the other. Raises ValueError for anything else.
    """
    saveable = Remat(policy).saveable
    if isinstance(block, type) and issubclass(block, nn.Module):
        return nn.remat(block, policy=saveable, **options)
    if isinstance(block, type) and issubclass(block, nnx.Module):
        call: Any = nnx.remat(block.__call__, policy=saveable, **options)
        return type(block.__name__, (block,), {"__call__": call, "__module__": block.__module__})
    if callable(block) and not isinstance(block, (nn.Module, nnx.Module)):
        return nnx.remat(block, policy=saveable, **options)
    raise UsageError(f"remat({block!r}): give a Linen class, an NNX class or a function of NNX modules, and not a "
                     "module that is made already.")


def casting_inputs(fun: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    """`fun(model, batch)` with a model that casts floating arguments to `dtype` where `fun` calls it.

    Flax promotes inputs and parameters to one dtype, so that a float32 input turns bfloat16 parameters into float32
    products. Nothing else of a batch is cast: targets and weights keep their dtypes. A Linen model does so in every
    method that `fun` calls, its submodules' too; an NNX model in its `__call__`.
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
