"""Whether an optimizer can run in a train step: the arguments of its update, and a state of constant shapes."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.errors import UsageError
from zero_jax.tree import merge, named_leaves

_ADVICE = (
    (("value_fn", "grad_fn", "obj_fn"),
     "It evaluates the loss again within its update, and a step has one gradient for each batch: leave that out, as "
     "do optax.lbfgs(linesearch=None), optax.contrib.sam(opaque_mode=False) and a hessian_diagonal_fn of gradients"),
    (("per_example", "batch dimension"),
     "A step gives one gradient of the whole batch, and not one for each example: bound its norm with "
     "optax.clip_by_global_norm and add noise with optax.add_noise, or reduce per-example gradients in the loss"),
    (("attribute 'fast'",),
     "optax.lookahead keeps two sets of parameters, where a step has one: leave it out, or give ema=, the average of "
     "one set"),
    (("required keyword", "required positional"),
     "Compute what it lacks within a transform of your own around it, and pass it on to its update"),
)


def takes_value(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """`optimizer` with an update that takes any extra keyword, `value` among them, and drops unknown ones.

    The signature decides, since some of optax's transforms claim to take any extra argument and do not (`contrib.sam`).
    """
    parameters = inspect.signature(optimizer.update).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return optimizer

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return optimizer.update(updates, state, params, **{name: extra[name] for name in extra if name in parameters})

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def traced_once(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """`optimizer` with a jitted update: the step has the trace of `check_optimizer`, where shapes are the same.

    It raises ValueError where it fails without the loss, with which `check_optimizer` has run it.
    """
    @functools.wraps(optimizer.update)
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        try:
            return optimizer.update(updates, state, params, **extra)
        except Exception as error:
            if extra.get("value", 0) is not None:
                raise
            raise UsageError("apply_gradients without loss: this step's optimizer looks at it: give "
                             f"loss=metrics[\"loss\"]. It says: {type(error).__name__}: {error}") from error

    return optax.GradientTransformationExtraArgs(optimizer.init, jax.jit(update))


def check_optimizer(optimizer: optax.GradientTransformationExtraArgs, params: Any,
                    sharding: jax.sharding.Sharding | None = None, frozen: Any = None, *,
                    widen: Callable[[Any], Any] = lambda tree: tree) -> None:
    """Raises ValueError unless `optimizer` runs on what a step has, and its updates and state keep their shapes.

    params: a pytree of `jax.ShapeDtypeStruct`s, as stored; frozen: that of the parameters that are not trained, which
    the optimizer does not see. sharding: any over the mesh of the step, which is part of the types in its trace.
    widen: what the step makes of stored parameters and state before an update, as float32 of bfloat16.
    """
    try:
        before, updates, after = _run(optimizer, params, sharding, widen)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if not (advice := _advice(message)):
            _check_run_without(optimizer, params, frozen, sharding, widen, error)
            raise  # an error of the optimizer's own
        raise UsageError(
            "The optimizer cannot run on what a train step gives its update, which is the gradients, its state, the "
            f"parameters and value=loss. It says: {message} {advice}.") from error
    if difference := _difference(jax.eval_shape(widen, params), updates):
        advice = _advice("per_example") if _difference(jax.eval_shape(widen, params), updates, dtypes=False) else (
            "Cast them to the dtype of the parameters, as the last transform of the chain")
        raise UsageError(f"The optimizer's updates of parameters change shape or dtype: {difference}. {advice}.")
    if difference := _difference(before, after):
        raise UsageError(
            f"The optimizer's state changes in its first step: {difference}. Each step would be compiled again, with "
            "other shardings: let its init make what its update returns.")


def _run(optimizer: optax.GradientTransformationExtraArgs, params: Any, sharding: jax.sharding.Sharding | None,
         widen: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """The state of `optimizer` as its update gets it, its first updates and the state after them, abstract."""
    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.update(sharding=sharding), tree)

    value = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    params, before = jax.eval_shape(lambda params: widen((params, optimizer.init(params))), params)
    updates, after = jax.eval_shape(
        lambda grads, state, params, value: widen(optimizer.update(grads, state, params, value=value)),
        *placed((params, before, params)), value)
    return before, updates, after


def _check_run_without(optimizer: optax.GradientTransformationExtraArgs, params: Any, frozen: Any,
                       sharding: jax.sharding.Sharding | None, widen: Callable[[Any], Any], error: Exception) -> None:
    """Raises UsageError where `optimizer`, which fails with `error` on `params` alone, runs on `frozen` besides."""
    names = [name for name, _ in named_leaves(frozen)]
    try:
        _run(optimizer, merge(params, frozen or {}), sharding, widen)
    except Exception:
        return
    raise UsageError(
        "The optimizer holds a tree of all parameters, as a mask or labels, and is given those alone that are trained, "
        f"without {', '.join(names[:3])}{' and so on' * (len(names) > 3)}, which frozen names. Give a function in "
        "place of the tree, as mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params), or leave the "
        f"frozen ones out of it. It says: {type(error).__name__}: {error}") from error


def _advice(message: str) -> str:
    return next((advice for words, advice in _ADVICE if any(word in message for word in words)), "")


def _difference(old: Any, new: Any, *, dtypes: bool = True) -> str:
    """The first leaf whose name, shape or dtype, if `dtypes` count, is another in `new`; empty if there is none."""
    old_types, new_types = ({name: f"{leaf.dtype if dtypes else ''}{list(leaf.shape)}"
                             for name, leaf in named_leaves(tree)} for tree in (old, new))
    for name in {**old_types, **new_types}:
        if old_types.get(name) != new_types.get(name):
            return f"{name} is {old_types.get(name, 'absent')} before and {new_types.get(name, 'absent')} after"
    return ""
