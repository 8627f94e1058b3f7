"""What a train step needs of an optimizer: the arguments of its update, a state of constant shapes, safe scatters."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zero_jax.errors import UsageError, few
from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    in_scope_of,
    jaxpr_to_fun,
    primitive_of,
    replace_eqn,
    shape_of,
)
from zero_jax.jaxpr.passes import with_jaxpr_passes
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


def with_safe_scatters(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """`optimizer` for a mesh of CPU devices, on which it may write a part of a leaf: scatters of one window by masks.

    XLA's partitioner gives each device the index less the offset of its shard, and has those out of bounds dropped.
    XLA:CPU still reads at that index. Where the operand is itself a slice (the shard of a reduced gradient), its
    simplifier adds both offsets, reads another shard's row, and writes that (jaxlib 0.10.2). Of several windows it
    makes a loop, which is right; XLA:GPU and XLA:TPU first select an index that is in bounds.
    """
    def safe(fun: Callable[..., Any]) -> Callable[..., Any]:
        run = with_jaxpr_passes(lambda args, extra: fun(*args, **extra), _write_by_masks)
        return functools.wraps(fun)(lambda *args, **extra: run(args, extra))

    return optax.GradientTransformationExtraArgs(safe(optimizer.init), safe(optimizer.update))


def _write_by_masks(jaxpr: Jaxpr) -> Jaxpr:
    return jaxpr.replace(eqns=[in_scope_of(replace_eqn(eqn, functools.partial(_written_by_mask, eqn)), eqn)
                               if _is_of_one_window(eqn) else eqn for eqn in jaxpr.eqns])


def _is_of_one_window(eqn: JaxprEqn) -> bool:
    return primitive_of(eqn).startswith("scatter") and math.prod(shape_of(eqn.invars[1]).shape[:-1]) == 1


def _written_by_mask(scatter: JaxprEqn, operand: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    """What `scatter`, of one window, returns, as an elementwise choice between `operand` and the new values."""
    params, shape = scatter.params, operand.shape
    numbers, combine = params["dimension_numbers"], params["update_jaxpr"]
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter([updates.shape[dim] for dim in numbers.update_window_dims])
    window = [1 if dim in single else next(sizes) for dim in range(len(shape))]
    starts = [jnp.zeros((), indices.dtype)] * len(shape)
    for place, dim in enumerate(numbers.scatter_dims_to_operand_dims):
        starts[dim] = indices.ravel()[place]
    last = [size - part for size, part in zip(shape, window, strict=True)]
    inside = [jnp.clip(start, 0, end) for start, end in zip(starts, last, strict=True)]
    written = jnp.ones(shape, bool)
    for dim, (start, near, part) in enumerate(zip(starts, inside, window, strict=True)):
        places = jax.lax.broadcasted_iota(indices.dtype, shape, dim)
        written &= (near <= places) & (places < near + part)
        if params["mode"] != jax.lax.GatherScatterMode.CLIP:
            written &= start == near
    new = jax.lax.dynamic_update_slice(jnp.zeros(shape, updates.dtype), updates.reshape(window), inside)
    if combine is not None:  # of two scalars; None: the second
        each = jaxpr_to_fun(ClosedJaxpr(combine, params["update_consts"]))
        for _ in shape:
            each = jax.vmap(each)
        (new,) = each(operand, new)
    return jnp.where(written, new, operand)


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
    try:
        _run(optimizer, merge(params, frozen or {}), sharding, widen)
    except Exception:
        return
    raise UsageError(
        "The optimizer holds a tree of all parameters, as a mask or labels, and is given those alone that are trained, "
        f"without {few((name for name, _ in named_leaves(frozen)), 3)}, which frozen names. Give a function in "
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
