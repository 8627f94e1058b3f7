"""From the gradient to the next state: each device updates its own shard of parameters, moments and averages."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding

from zero_jax.gather.gather import compute_spec
from zero_jax.layout.compute_params import cast_compute_params, gather_compute_params, gather_stored_params
from zero_jax.layout.layout import Layout
from zero_jax.layout.stored_optimizer import update_stored
from zero_jax.offload.host_update import Streams, stream
from zero_jax.offload.offload import Offload, as_placed
from zero_jax.optim.narrow_moments import to_bfloat16
from zero_jax.precision import wide_dtype
from zero_jax.sharding.host_arrays import is_on_host
from zero_jax.state import ZeroState
from zero_jax.step.accumulate import weight_divisor
from zero_jax.step.gradients import ForwardOutput
from zero_jax.step.guard import GuardLogic
from zero_jax.step.losses import learning_rates
from zero_jax.step.metrics import values
from zero_jax.tree import ending, map_named, named_leaves
from zero_jax.typing import Gradients, Metrics, OptState, Params, PRNGKey, Pytree, Scalar


class Updated(NamedTuple):
    """The fields of the state that an update replaces."""

    params: Params
    opt_state: OptState
    ema: Params | None
    weights: Params | None = None
    """At stage 3 the sharded copy that the model reads, where there is one; elsewhere it is gathered afterwards."""


ROUNDING = 0xB16
"""Folded into a step's key for the noise of stochastic rounding, which the model's streams must not share."""


def loss_scale(state: ZeroState, guard: GuardLogic) -> Scalar | None:
    """What the gradients of this step are multiplied by; None: by nothing."""
    return None if guard.loss_scale is None else state.guard.scale


def unscaled(grads: Gradients, params: Params, scale: Scalar | None, *, stochastic: bool) -> Gradients:
    """`grads`, multiplied by `scale`, in the dtype of the update of `params`, and divided by it."""
    grads = jax.tree.map(lambda grad, param: grad.astype(
        wide_dtype(param.dtype) if stochastic else param.dtype), grads, params)
    return grads if scale is None else jax.tree.map(lambda grad: grad / scale.astype(grad.dtype), grads)


def apply_update(
    state: ZeroState, output: ForwardOutput, grads: Gradients, *, key: PRNGKey,
    optimizer: optax.GradientTransformationExtraArgs, layout: Layout, guard: GuardLogic, stochastic: bool,
    ema: float | None, offload: Offload | None = None, scale: Scalar | None = None
) -> tuple[ZeroState, Metrics]:
    """(The state after a step, its metrics), from reduced gradients, `unscaled`.

    A step that `guard` finds bad leaves all but `state.guard` as it was. ema: decay of the parameters' moving average.
    `output.loss` may be None where gradients are the user's: then the norm alone is judged. With `offload` the
    update is computed in blocks, from and to host memory; `grads` are then as they were reduced, in any dtype and
    multiplied by `scale`: a block of them at a time is made wider. Widened before the loop they would all be stored in
    float32: 47.7 instead of 24.4 GiB of temporaries for 13B parameters on one H100.
    Those in host memory may be sums over microbatches, whose means are computed in blocks, too.
    """
    # First, the optimizer, and the guard: a bad step changes nothing. Of gradients in host memory the norm is streamed.
    def judge_by(grads: Gradients, params: Params, before: ZeroState, output: ForwardOutput, scale: Scalar | None,
                 written: Pytree = (), was: Pytree = ()) -> Judged:
        return judge(before, output, unscaled(grads, params, scale, stochastic=stochastic), guard, written, was)

    update = update_function(layout, optimizer, stochastic=stochastic, ema=ema, streamed=offload is not None)
    old = Updated(_constrained(state.params, layout), state.opt_state, state.ema,
                  state.weights if layout.stage.shards_params else None)
    given = given_values(output, grads, key if stochastic else None, scale)
    if offload and layout.host_gradients:
        new, cast, judged = _with_gradients_streamed(judge_by, update, old, given, state, output, layout, offload)
    elif offload:
        judged = judge_by(grads, state.params, state, output, scale)
        new, cast = stream(update, as_placed(old, layout), {**given, "is_good": judged.is_good},
                           _streams(old, layout, offload, gradients=False))
        new = new._replace(params=_constrained(new.params, layout))
    else:
        new, cast = update(old, given)
        judged = judge_by(grads, state.params, state, output, scale, new[:2], old[:2])
        if judged.is_good is not None:
            new, cast = _with_cast(_kept_if_bad(judged.is_good, new, old), layout)

    # Second, at stages 1 and 2 what the model reads is gathered anew.
    weights = gather_compute_params(cast, layout, state.weights) if old.weights is None else new.weights
    params = gather_stored_params(new.params, layout, state.params)
    new_state = ZeroState(
        step=judged.step, params=params, weights=weights, frozen=state.frozen, opt_state=new.opt_state,
        variables=judged.variables, ema=new.ema, guard=judged.guard, rng=state.rng)
    return new_state, update_metrics(judged, output, new.opt_state)


class Judged(NamedTuple):
    """What a step is before its update: see `judge`."""

    step: Scalar
    variables: Any
    guard: Any
    is_good: Scalar | None
    grad_norm: Scalar
    metrics: Metrics


def judge(state: ZeroState, output: ForwardOutput, grads: Gradients, guard: GuardLogic, written: Pytree = (),
          was: Pytree = ()) -> Judged:
    """The next number of steps, variables and state of the guard, which says whether the update is to be kept.

    written, was: what the update writes and replaces, where all of it is known by now.
    """
    grad_norm = optax.tree.norm(grads)
    step, variables, guard_state, metrics, is_good = state.step + 1, output.variables, state.guard, {}, None
    if guard.active:
        stays_finite = None if guard.guard is None else _stays_finite((written, variables), (was, state.variables))
        is_good, guard_state = guard.judge(
            state.guard, 0.0 if output.loss is None else output.loss, grad_norm, stays_finite)
        step, variables = _kept_if_bad(is_good, (step, variables), (state.step, state.variables))
        metrics = {"bad": guard_state.bad, "skipped": guard_state.skipped, "stopped": guard.stopped(guard_state)}
        if guard.loss_scale is not None:
            metrics["loss_scale"] = state.guard.scale
    return Judged(step, variables, guard_state, is_good, grad_norm, metrics)


def given_values(output: ForwardOutput, grads: Gradients, key: PRNGKey | None, scale: Scalar | None
                 ) -> dict[str, Any]:
    """What an update takes beside the arrays that it replaces; key: for stochastic rounding."""
    return {"grads": grads, "written": output.written or {}, "loss": output.loss, "key": key, "is_good": None,
            "scale": scale}


def update_function(layout: Layout, optimizer: optax.GradientTransformationExtraArgs, *, stochastic: bool,
                    ema: float | None, streamed: bool
                    ) -> Callable[["Updated", dict[str, Any]], tuple["Updated", Params | None]]:
    """(What an update replaces, `given_values`) -> (what replaces it, the shards of the copy to gather); traceable."""
    def update(old: Updated, given: dict[str, Any]) -> tuple[Updated, Params | None]:
        params = _with_written(old.params, given["written"], layout)
        before = widened((params, old.opt_state)) if stochastic else (params, old.opt_state)
        grads = unscaled(given["grads"], params, given["scale"], stochastic=stochastic)
        updates, opt_state = update_stored(layout, optimizer, grads, before[1], before[0], value=given["loss"])
        new_params = optax.apply_updates(before[0], updates)
        if stochastic:
            new_params, opt_state = round_stochastically(
                (new_params, opt_state), (params, old.opt_state), jax.random.fold_in(given["key"], ROUNDING))
        if not streamed:
            new_params = jax.tree.map(constrain, new_params, layout.gradients)
        average = None if ema is None else _averaged(ema, old.ema, new_params)
        new = Updated(new_params, opt_state, average, old.weights)  # type: ignore[arg-type]
        return _with_cast(new if given["is_good"] is None else _kept_if_bad(given["is_good"], new, old), layout)

    return update


def _with_cast(new: Updated, layout: Layout) -> tuple[Updated, Params | None]:
    """(`new`, the shards of the copy to gather): the copy is a part of `new` where that has one."""
    cast = cast_compute_params(new.params, layout)
    return (new, cast) if new.weights is None else (new._replace(weights=cast), None)


def update_metrics(judged: Judged, output: ForwardOutput, opt_state: OptState) -> Metrics:
    """The metrics of a step: its own, and those of the loss."""
    metrics = {"grad_norm": judged.grad_norm, **judged.metrics, **learning_rates(opt_state)}
    if output.loss is not None:
        metrics["loss"] = output.loss
    return {**step_metrics(metrics), **values(output.metrics)}


def _constrained(params: Params, layout: Layout) -> Params:
    """The parameters sharded as their gradients; what is in host memory is so already."""
    return map_named(lambda name, param, sharding: param if f"params/{name}" in layout.host else (
        constrain(param, sharding)), params, layout.gradients)


def _averaged(decay: float, old: Any, params: Any) -> Any:
    return jax.tree.map(
        lambda old, param: (decay * old + (1 - decay) * param.astype(old.dtype)).astype(old.dtype), old, params)


def _kept_if_bad(is_good: Scalar, new: Pytree, old: Pytree) -> Any:
    return jax.tree.map(lambda after, before: jnp.where(is_good, after, before), new, old)


def _stays_finite(new: Pytree, old: Pytree) -> Scalar:
    """Whether every floating number of `new` is finite that is so in `old` (a best loss begins at infinity)."""
    def lost(after: jax.Array, before: jax.Array) -> Scalar | float:
        inexact = jnp.issubdtype(after.dtype, jnp.inexact)
        return jnp.sum(jnp.isfinite(before) & ~jnp.isfinite(after), dtype=jnp.float32) if inexact else 0.0

    # A sum, since XLA makes one reduction over devices of the leaves' sums.
    return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(lost, new, old)))) == 0


def _with_gradients_streamed(
    judge_by: Callable[..., Judged], update: Callable[[Any, Any], Any], old: Updated, given: dict[str, Any],
    state: ZeroState, output: ForwardOutput, layout: Layout, offload: Offload
) -> tuple[Updated, Params | None, Judged]:
    """(What replaces `old`, the copy to gather, what was judged), of gradients that are read in blocks as `old` is."""
    sums = {name for name, leaf in named_leaves(given["grads"]) if layout.microbatches > 1 and is_on_host(leaf)}

    def judged_update(carried: Any, given: dict[str, Any]) -> Any:
        old, stored = carried
        grads = map_named(lambda name, leaf: leaf / given["divisor"] if name in sums else leaf, stored)
        judged = judge_by(grads, old.params, given["before"], given["output"], given["scale"])
        new, cast = update(old, {**given, "grads": grads, "is_good": judged.is_good})
        return (new, stored), (cast, judged)

    given = {**given, "divisor": weight_divisor(output.weight, output.loss) if sums else None,
             "output": output._replace(metrics={}, weight=None, written=None), "before": dataclasses.replace(
                 state, params=None, weights=None, frozen=None, opt_state=None, ema=None)}
    # Behind a barrier: XLA would bring the first iteration's layer up again from a copy of its own in host memory.
    grads = map_named(lambda name, leaf: jax.lax.optimization_barrier(leaf) if is_on_host(leaf) else leaf,
                      given.pop("grads"))
    carried, streams = (as_placed(old, layout), grads), _streams(old, layout, offload, gradients=True)
    (new, _), (cast, judged) = stream(judged_update, carried, given, streams)
    return new._replace(params=_constrained(new.params, layout)), cast, judged


def _streams(old: Updated, layout: Layout, offload: Offload, *, gradients: bool) -> Streams:
    """How what an update replaces is stored; gradients: and, behind it, the gradients that it reads."""
    shardings = Updated(layout.gradients, layout.shardings.opt_state, layout.shardings.ema,
                         None if old.weights is None else layout.shardings.weights)
    leaves = [(leaf.spec, name in layout.host) for leaf, (name, _) in zip(
        jax.tree.leaves(shardings), named_leaves(old), strict=True)]
    if gradients:
        leaves += [(leaf.spec, name in layout.host_gradients) for name, leaf in named_leaves(layout.gradients)]
    platform = layout.axes.built_for
    return Streams(layout.mesh, tuple(spec for spec, _ in leaves), tuple(host for _, host in leaves),
                   offload.block_bytes(platform), platform, sums_in_blocks=gradients)


def step_metrics(metrics: Metrics) -> Metrics:
    """The metrics that a step itself reports: scalars in float32, or float64 where they are."""
    return jax.tree.map(lambda metric: jnp.asarray(
        metric, jnp.float64 if jnp.result_type(metric) == jnp.float64 else jnp.float32), metrics)


def _with_written(params: Params, written: dict[str, Any], layout: Layout) -> Params:
    """`params` with what the model itself wrote into some of them in its forward pass, as an NNX module may."""
    def put(name: str, param: jax.Array, stored_shape: Any, sharding: Any) -> jax.Array:
        if name not in written:
            return param
        value = stored_shape.store(written[name].astype(param.dtype))
        # Unsharded first: else the layout propagates into what the model uses, which is gathered from the shards again.
        whole = NamedSharding(layout.mesh, compute_spec(sharding.spec, layout.axes))
        return constrain(constrain(value, whole), sharding)

    return map_named(put, params, layout.stored_shapes.params, layout.gradients) if written else params


def widened(tree: Any) -> Any:
    """`tree` with its bfloat16 leaves as float32."""
    def widen(leaf: Any) -> Any:  # which is a number where an optimizer's init makes one
        return leaf.astype(jnp.float32) if getattr(leaf, "dtype", None) == jnp.bfloat16 else leaf

    return jax.tree.map(widen, tree)


def with_wide_numbers(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """`optimizer` whose init narrows the moments of bfloat16 parameters alone: what has a parameter's name, and dims.

    optax.inject_hyperparams makes its numbers in the dtype of the parameters: a b2 of 0.999 is 1 in bfloat16.
    """
    def init(params: Any) -> Any:
        names = dict(named_leaves(params))
        narrow = dict(named_leaves(jax.eval_shape(optimizer.init, params)))
        return map_named(lambda name, leaf: leaf.astype(narrow[name].dtype) if jnp.ndim(leaf) and ending(name, names)
                         else leaf, optimizer.init(widened(params)))

    return optax.GradientTransformationExtraArgs(init, optimizer.update)


def round_stochastically(tree: Any, like: Any, key: jax.Array) -> Any:
    """The float32 leaves of `tree` that are bfloat16 in `like`, rounded at random by `key`; others as they are."""
    leaves, treedef = jax.tree.flatten(tree)

    def rounded(number: int, leaf: jax.Array) -> jax.Array:
        noise = jax.random.bits(jax.random.fold_in(key, number), leaf.shape, jnp.uint16)
        return to_bfloat16(leaf, noise.astype(jnp.uint32))

    return jax.tree.unflatten(treedef, [
        rounded(number, leaf) if known.dtype == jnp.bfloat16 else leaf.astype(known.dtype)
        for number, (leaf, known) in enumerate(zip(leaves, jax.tree.leaves(like), strict=True))])
