"""Whether an optimizer can run in a train step: what it asks for, and a state that keeps its shape."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.tree import named_leaves

_ADVICE = (
    (("value_fn", "grad_fn", "obj_fn"),
     "It evaluates the loss again within its update, and a step has one gradient for each batch: leave that out, as "
     "do optax.lbfgs(linesearch=None), optax.contrib.sam(opaque_mode=False) and a hessian_diagonal_fn of gradients"),
    (("per_example", "batch dimension"),
     "A step gives one gradient of the whole batch, and not one for each example: bound its norm with "
     "optax.clip_by_global_norm and add noise with optax.add_noise, or reduce per-example gradients in the loss"),
    (("required keyword", "required positional"),
     "Compute what it lacks within a transform of your own around it, and pass it on to its update"),
)


def takes_value(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, whose update takes `value` and whatever else a step tells: what it does not know is dropped.

    Some of optax's transforms claim to take any extra argument and do not (`contrib.sam`), so the signature decides.
    """
    known = inspect.signature(optimizer.update).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return optimizer

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return optimizer.update(updates, state, params, **{name: extra[name] for name in extra if name in known})

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def check_optimizer(optimizer: optax.GradientTransformationExtraArgs, params: Any) -> None:
    """Raises ValueError unless `optimizer` runs on what a step has, its updates and state shaped as before.

    params: abstract parameters, as stored.
    """
    value = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        before = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(
            lambda grads, state, params, value: optimizer.update(grads, state, params, value=value),
            params, before, params, value)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if not (advice := _advice(said)):
            raise  # a mistake of its own
        raise ValueError(
            "The optimizer cannot run on what a train step gives its update, which is the gradients, its state, the "
            f"parameters and value=loss. It says: {said} {advice}.") from error
    if found := _difference(params, updates):
        raise ValueError(f"The optimizer's updates of parameters change shape: {found}. {_advice('per_example')}.")
    if found := _difference(before, after):
        raise ValueError(
            f"The optimizer's state changes in its first step: {found}. Each step would be compiled anew and lie "
            "elsewhere: let its init make what its update returns.")


def _advice(said: str) -> str:
    return next((advice for words, advice in _ADVICE if any(word in said for word in words)), "")


def _difference(old: Any, new: Any) -> str:
    """The first leaf whose name, shape or dtype is another in `new`; empty if there is none."""
    known, found = (
        {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named_leaves(tree)} for tree in (old, new))
    for name in {**known, **found}:
        if known.get(name) != found.get(name):
            return f"{name} is {known.get(name, 'not there')} before and {found.get(name, 'not there')} after"
    return ""
