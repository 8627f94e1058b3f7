"""Gradient accumulation: one step's gradient from a loop over microbatches.

A compiled loop cannot carry a sum over devices that is yet to be reduced: the partitioner reduces it in every round.
Either that is wanted, and the loop carries shards of the sum (`reduce="every"`, the memory of ZeRO-2). Or each device's
rows are a microbatch of their own, mapped over a leading dim that is sharded over the devices: the loop carries each
device's own sum, as large as all parameters, which is reduced once (`reduce="once"`, the communication of one batch).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.jaxpr.equations import ClosedJaxpr, needed_eqns, structure_of, trace, variables
from zero_jax.jaxpr.passes import without_calls
from zero_jax.jaxpr.primitives import empty_on_host
from zero_jax.sharding.batch import Accumulation, add_weighted, sum_dtype
from zero_jax.sharding.gather import compute_spec
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.reduce_scatter import reduce_parts
from zero_jax.sharding.slices import on_one_slice
from zero_jax.step.gradients import ForwardInputs, ForwardOutput, GradientFunction, HostSums
from zero_jax.step.metrics import combine
from zero_jax.step.microbatches import Microbatches, is_key
from zero_jax.tree import map_named, named_leaves, with_dtypes_of
from zero_jax.typing import Batch, Gradients, Params, PRNGKey, Pytree, Scalar, Variables


def accumulate_gradients(
    gradient: GradientFunction, accumulation: Accumulation, layout: Layout, weights: Params, inputs: ForwardInputs,
    microbatches: Microbatches, scale: Scalar, *, prefetch: bool = False, by_device: bool = True
) -> tuple[ForwardOutput, Gradients]:
    """The output and gradient of a whole batch as the weighted mean over its microbatches.

    A microbatch of weight 0 adds nothing, whatever its loss is. Gradients are summed in float32, or what is wider, and
    sharded as `layout.gradients`. Those in host memory are the sums: `weight_divisor(output.weight, output.loss)` makes
    a mean of them, which the update takes block by block. prefetch: whether XLA moves the gathers of a round of a loop
    to the round before. by_device: with `reduce="once"`, each device has microbatches of its own; else (in the local
    view) sums that are not reduced yet are ordinary values, which are reduced where they leave.
    """
    run = _reduce_once if accumulation.once and by_device else _reduce_every
    output, grads = run(gradient, microbatches, layout, weights, inputs, scale,
                        _in_this_round if prefetch else _as_they_are)
    if accumulation.once and not by_device:
        uses = dict(named_leaves(layout.uses))
        grads = map_named(lambda name, grad: grad.astype(uses[name].reduce) if name in uses else grad, grads)
    return output, grads


_Tie = Callable[[Params, Any, Mapping[str, int]], tuple[Params, Any]]


def _in_this_round(weights: Params, grad_sum: Any, on_host: Mapping[str, int]) -> tuple[Params, Any]:
    """(`weights`, `grad_sum`) such that what is gathered of the first depends on the microbatch before.

    Else the pipeliner moves the gathers of the first layers of a microbatch, which it has moved out of the loop over
    layers, to the microbatch before as well. For GPT-2 of 4 layers of width 512 on v5p all four layers are then in
    memory at one time, of 588 MiB of temporaries in place of 356.
    """
    here = {name: leaf for name, leaf in named_leaves(grad_sum) if name not in on_host}
    weights, here = jax.lax.optimization_barrier((weights, here))
    return weights, map_named(lambda name, leaf: here.get(name, leaf), grad_sum)


def _as_they_are(weights: Params, grad_sum: Any, on_host: Mapping[str, int]) -> tuple[Params, Any]:
    return weights, grad_sum


def _reduce_every(
    gradient: GradientFunction, microbatches: Microbatches, layout: Layout, weights: Params, inputs: ForwardInputs,
    scale: Scalar, tie: _Tie
) -> tuple[ForwardOutput, Gradients]:
    on_host = layout.host_gradients

    def body(carry: Any, xs: Any) -> Any:
        grad_sum, variables = carry
        index, examples = xs
        own, grad_sum = tie(weights, grad_sum, layout.host_gradients)
        round_inputs = inputs._replace(variables=variables, rng=jax.random.fold_in(inputs.rng, index))
        stacks = {name: leaf for name, leaf in named_leaves(grad_sum) if name in on_host}
        output, grads = gradient(own, round_inputs, microbatches.one(examples, index), scale,
                                 HostSums(stacks, index == 0) if stacks else None)
        # Else XLA:TPU moves sums over devices out of the loop, which then carries whole gradients; libtpu 0.0.48 adds
        # an embedding's rows wrongly when it does (openxla/xla issue 49143).
        grads = _barrier(grads, on_host)
        grad_sum = map_named(
            lambda name, total, grad, sharding: grad if name in on_host else constrain(
                add_weighted(total, grad.astype(total.dtype), output.weight), sharding),
            grad_sum, grads, layout.gradients)
        return (grad_sum, with_dtypes_of(output.variables, variables)), output._replace(variables=None)

    def zeros(name: str, leaf: Any, sharding: NamedSharding) -> Any:
        make = empty_on_host if name in on_host else jnp.zeros
        total = make(leaf.shape, sum_dtype(leaf.dtype))
        return total if name in on_host else constrain(total, sharding)

    (grad_sum, variables), outputs = jax.lax.scan(
        body, (map_named(zeros, weights, layout.gradients), inputs.variables),
        (jnp.arange(microbatches.number), microbatches.examples(by_device=False)))
    output, weight = _weighted_mean(outputs)
    return output._replace(variables=variables), map_named(
        lambda name, total: total if name in on_host else total / weight, grad_sum)


def _barrier(grads: Gradients, on_host: Mapping[str, int]) -> Gradients:
    """An optimization barrier around the gradients in device memory."""
    here = jax.lax.optimization_barrier({name: leaf for name, leaf in named_leaves(grads) if name not in on_host})
    return map_named(lambda name, leaf: here.get(name, leaf), grads)


def _reduce_once(
    gradient: GradientFunction, microbatches: Microbatches, layout: Layout, weights: Params, inputs: ForwardInputs,
    scale: Scalar, tie: _Tie
) -> tuple[ForwardOutput, Gradients]:
    mesh, axes, num_devices = layout.mesh, layout.axes.batch, layout.axes.batch_shards

    def by_device(sharding: NamedSharding) -> NamedSharding:
        """Of an array with a leading dim of the devices, each of which has a whole gradient."""
        return NamedSharding(mesh, P(axes, *compute_spec(sharding.spec, layout.axes)))

    def device_key(device: Any) -> jax.Array:
        return jax.random.fold_in(inputs.rng, device)

    devices = jnp.arange(num_devices)
    in_axes = None, ForwardInputs._make((None, 0, 0)), microbatches.device_dims, None
    gradient_of_each = jax.vmap(gradient, in_axes=in_axes, spmd_axis_name=axes)
    device_keys = jax.vmap(device_key)(devices)

    def body(carry: Any, xs: Any) -> Any:
        grad_sum, variables = carry
        index, examples = xs
        own, grad_sum = tie(weights, grad_sum, layout.host_gradients)
        keys = jax.vmap(jax.random.fold_in, (0, None))(device_keys, index)
        batch = microbatches.one(examples, index, devices)
        try:
            output, grads = gradient_of_each(own, ForwardInputs(inputs.frozen, variables, keys), batch, scale)
        except UsageError:
            raise
        except Exception as error:  # of the map alone: the loss by itself was traced for the layout
            raise UsageError(
                "reduce=\"once\" maps the model and the loss over the devices, as jax.vmap does, and something in them "
                "cannot be mapped: a sharding constraint or a shard_map of their own over the same axes, a callback, "
                f"a primitive without a rule for it. Give reduce=\"every\". JAX says: {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}") from error
        grad_sum = jax.tree.map(lambda total, grad, sharding: constrain(
            add_weighted(total, grad.astype(total.dtype), jnp.reshape(output.weight, (-1, *[1] * (grad.ndim - 1)))),
            by_device(sharding)), grad_sum, grads, layout.gradients)
        return (grad_sum, with_dtypes_of(output.variables, variables)), output._replace(variables=None)

    def zeros(leaf: Any, sharding: NamedSharding) -> Any:
        return constrain(jnp.zeros((num_devices, *leaf.shape), sum_dtype(leaf.dtype)), by_device(sharding))

    device_variables = jax.tree.map(lambda leaf: _copy_to_devices(leaf, num_devices), inputs.variables)
    carry = jax.tree.map(zeros, weights, layout.gradients), device_variables
    (grad_sum, variables), outputs = jax.lax.scan(
        body, carry, (jnp.arange(microbatches.number), microbatches.examples(by_device=True)))
    if num_devices > 1:  # after the map, whose errors are explained
        _check_variables(gradient, microbatches, weights, inputs, scale)
    output, weight = _weighted_mean(outputs)

    def reduce(name: str, total: Any, like: Any, sharding: NamedSharding) -> Any:
        dtype = uses[name].reduce if name in uses else like.dtype
        hops = layout.quantized.hops if layout.quantized and name in layout.quantized.gradients else ()
        reduce_scatter = jax.shard_map(
            on_one_slice(lambda part, weight: reduce_parts(
                (part[0] / weight).astype(dtype), layout.axes, sharding.spec, hops,
                in_tiles=not layout.gathers_at_use), layout.axes),
            mesh=mesh, in_specs=(P(axes, *compute_spec(sharding.spec, layout.axes)), P()), out_specs=sharding.spec,
            check_vma=False)
        return reduce_scatter(total, weight).astype(total.dtype)

    uses = dict(named_leaves(layout.uses))  # no entry where a parameter is read as it is stored
    grads = map_named(reduce, grad_sum, weights, layout.gradients)
    return output._replace(variables=jax.tree.map(_join_devices, variables, inputs.variables)), grads


def _check_variables(gradient: GradientFunction, microbatches: Microbatches, weights: Params, inputs: ForwardInputs,
                     scale: Scalar) -> None:
    """Raises UsageError for a variable that the model computes from what devices have apart: rows, or their number.

    What they make of it together, a sum or a mean, is not known; of `mean` and `var`, as BatchNorm's, it is the mean.
    """
    leaves = named_leaves(inputs.variables)
    asked = [number for number, (name, leaf) in enumerate(leaves) if not is_key(leaf) and not (
        name.split("/")[-1] in ("mean", "var") and jnp.issubdtype(leaf.dtype, jnp.floating))]
    if not asked:
        return

    def written(by_device: bool) -> ClosedJaxpr:
        def new(variables: Variables, batch: Batch, rng: PRNGKey) -> Variables:
            output, _ = gradient(weights, inputs._replace(variables=variables, rng=rng), batch, scale)
            return with_dtypes_of(output.variables, variables)

        batch = jax.eval_shape(lambda: microbatches.one(
            [leaf[0, 0] if by_device else leaf[0] for leaf in microbatches.examples(by_device=by_device)], 0))
        return without_calls(trace(new, inputs.variables, batch, inputs.rng))

    apart, together = written(True), written(False)
    for number in asked:
        made = []
        for closed in (apart, together):
            result, invars = closed.jaxpr.outvars[number], closed.jaxpr.invars
            eqns = needed_eqns(closed, [result])
            read = {var for eqn in eqns for var in variables(eqn.invars)}
            differ = [var for place, var in enumerate(invars) if place >= len(leaves) or is_key(leaves[place][1])]
            made.append(None if read.intersection(differ) else structure_of(eqns, invars[:len(leaves)], [result]))
        if None in made or made[0] != made[1]:
            raise UsageError(
                f"reduce=\"once\" and the variable {leaves[number][0]}, which the model computes from the batch: each "
                "device would make one of its own rows, and whether a sum or a mean of them is meant is not known (but "
                "for the mean and var that BatchNorm keeps). Give reduce=\"every\".")


def _weighted_mean(outputs: ForwardOutput) -> tuple[ForwardOutput, Scalar]:
    """The outputs of all microbatches as one, metrics as declared, and their `weight_divisor`."""
    weights = jnp.broadcast_to(outputs.weight, outputs.loss.shape)
    total = jnp.sum(weights)
    divisor = weight_divisor(total, outputs.loss)
    loss = jnp.sum(add_weighted(0, outputs.loss, weights)) / divisor
    return ForwardOutput(loss, combine(outputs.metrics, weights, divisor), total, None), divisor


def weight_divisor(weight: Scalar, loss: jax.Array) -> Scalar:
    """What a sum over microbatches whose weights are `weight` together is divided by for its mean.

    loss: that of each, or that mean. Where the weight is 0: 1, or NaN for a loss that is not finite, as 0 / 0, which
    that of the large batch then is, too.
    """
    return jnp.where(weight == 0, jnp.where(jnp.all(jnp.isfinite(loss)), 1, jnp.nan), weight)


def _copy_to_devices(leaf: Any, num_devices: int) -> Pytree:
    """A variable for each device. Random streams must differ, or devices drop the same units."""
    copies = jnp.broadcast_to(leaf, (num_devices, *leaf.shape))
    if not is_key(leaf):
        return copies
    flat = jax.vmap(lambda keys, i: jax.vmap(lambda key: jax.random.fold_in(key, i))(keys.reshape(-1)))
    return flat(copies, jnp.arange(num_devices)).reshape(copies.shape)


def _join_devices(leaf: Any, before: Any) -> Any:
    """The devices' variables as one: means of statistics, the first of counters and of keys that the model wrote.

    Other keys are as they were, not folded with the number of a device.
    """
    if is_key(before):
        kept = jax.random.key_data(leaf[0]) == jax.random.key_data(_copy_to_devices(before, 1)[0])
        return jnp.where(jnp.all(kept), before, leaf[0])
    return leaf.mean(0).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf[0]
