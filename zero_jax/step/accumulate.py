"""Gradient accumulation: one step's gradient from a loop over microbatches.

The loop carries shards of the sum (`reduce="every"`, the memory of ZeRO-2), or each device's own sum,
as large as all parameters, which is reduced once behind it (`reduce="once"`, the communication of one batch).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding

from zero_jax.jaxpr.primitives import empty_on_host
from zero_jax.layout.batch_layout import BatchLayout
from zero_jax.layout.layout import Layout
from zero_jax.sharding.batch import Accumulation, add_weighted, sum_dtype
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.step.gradients import ForwardInputs, ForwardOutput, GradientFunction, HostSums
from zero_jax.step.metrics import combine
from zero_jax.tree import is_key, map_named, named_leaves, with_dtypes_of
from zero_jax.typing import Batch, Gradients, Params, PRNGKey, Scalar


class Microbatches:
    """The leaves of a batch, of tracers, by what microbatches make of them.

    Examples are cut so that each microbatch takes rows of every device. A typed key is folded with the microbatch's
    number. Everything else is the same for all.
    """

    def __init__(self, number: int, axes: MeshAxes, layout: BatchLayout, batch: Batch):
        self.number, self._axes = number, axes
        self._structure = jax.tree.structure(batch)
        self._leaves = [leaf for _, leaf in named_leaves(batch)]
        self._split = [layout.is_example(name, leaf) for name, leaf in named_leaves(batch)]

    def examples(self) -> list[Any]:
        """The examples, as (microbatches, rows, ...)."""
        def cut(leaf: jax.Array) -> jax.Array:
            by_device = leaf.reshape(self._axes.batch_shards, self.number, -1, *leaf.shape[1:]).swapaxes(0, 1)
            return by_device.reshape(self.number, -1, *leaf.shape[1:])

        return [cut(leaf) for leaf, split in zip(self._leaves, self._split, strict=True) if split]

    def one(self, examples: list[Any], index: Any) -> Batch:
        """The microbatch `index` of these `examples`."""
        parts = iter(examples)
        return self._structure.unflatten([
            next(parts) if split else folded(leaf, index) if is_key(leaf) else leaf
            for leaf, split in zip(self._leaves, self._split, strict=True)])


def folded(keys: PRNGKey, number: Any) -> PRNGKey:
    """Keys of any shape, each folded with `number`: as those of that microbatch or slice."""
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1)).reshape(keys.shape)


def accumulate_gradients(
    gradient: GradientFunction, accumulation: Accumulation, layout: Layout, weights: Params, inputs: ForwardInputs,
    microbatches: Microbatches, scale: Scalar
) -> tuple[ForwardOutput, Gradients]:
    """The output and gradient of a whole batch as the weighted mean over its microbatches.

    A microbatch of weight 0 adds nothing, whatever its loss is. Gradients are summed in float32, or what is wider, and
    sharded as `layout.gradients`. Those in host memory are the sums: `weight_divisor(output.weight, output.loss)` makes
    a mean of them, which the update takes block by block. With `reduce="once"` they are sums over devices that are yet
    to be taken, which the local view takes where they leave.
    """
    on_host = layout.host_gradients

    def body(carry: Any, xs: Any) -> Any:
        grad_sum, variables = carry
        index, examples = xs
        own_inputs = inputs._replace(variables=variables, rng=jax.random.fold_in(inputs.rng, index))
        stacks = {name: leaf for name, leaf in named_leaves(grad_sum) if name in on_host}
        output, grads = gradient(weights, own_inputs, microbatches.one(examples, index), scale,
                                 HostSums(stacks, index == 0) if stacks else None)
        # Else XLA:TPU moves sums over devices out of the loop, which then carries whole gradients; libtpu 0.0.48 adds
        # an embedding's rows wrongly when it does (openxla/xla issue 49143).
        here = jax.lax.optimization_barrier({name: leaf for name, leaf in named_leaves(grads) if name not in on_host})
        grads = map_named(lambda name, leaf: here.get(name, leaf), grads)
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
        (jnp.arange(microbatches.number), microbatches.examples()))
    output, weight = _weighted_mean(outputs)
    grads = map_named(lambda name, total: total if name in on_host else total / weight, grad_sum)
    if accumulation.once:
        uses = dict(named_leaves(layout.uses))
        grads = map_named(lambda name, grad: grad.astype(uses[name].reduce) if name in uses else grad, grads)
    return output._replace(variables=variables), grads


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
