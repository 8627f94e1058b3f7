"""Forward and backward: the loss of a batch, or of one microbatch, and the gradient of each trainable parameter."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from zero_jax.errors import UsageError
from zero_jax.frontends.model_functions import ModelFunctions
from zero_jax.gather.gather import HostParam
from zero_jax.jaxpr.equations import trace
from zero_jax.jaxpr.passes import with_jaxpr_passes
from zero_jax.jaxpr.random_keys import raw_keys
from zero_jax.jaxpr.shared_calls import with_shared_calls
from zero_jax.layout.layout import Layout
from zero_jax.sharding.host_arrays import carrier_of, is_on_host
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.step.losses import loss_and_metrics, with_key
from zero_jax.step.options import StepOptions
from zero_jax.transforms.activation_partitioning import Activations
from zero_jax.transforms.fp8_products import fp8_products
from zero_jax.transforms.gather_again import (
    gather_again,
    gather_again_in_loops,
    mark_last_reads,
    value_and_grad,
)
from zero_jax.transforms.host_gradients import (
    add_on_host,
    check_on_host,
    order_stacked_gradients,
    stack_on_host,
    wait_for_reads,
)
from zero_jax.transforms.remat import checkpoint_blocks, has_checkpoints, isolate_inner_remat
from zero_jax.transforms.tiled_products import tile_products
from zero_jax.tree import map_named, merge, named_leaves, with_dtypes_of
from zero_jax.typing import Batch, Gradients, Loss, Metrics, Params, Scalar, Variables
from zero_jax.views.loops import read_before_loops, stack_narrow


class ForwardOutput(NamedTuple):
    """What a forward pass returns.

    weight: what the loss is a mean over, such as a number of tokens. variables: the model's new ones. written: the
    parameters that the model overwrote, by name, in their true shapes.
    """

    loss: Scalar
    metrics: Metrics
    weight: Scalar
    variables: Variables
    written: Any = None


class ForwardInputs(NamedTuple):
    """What a forward pass reads beside its batch and the weights in which it is differentiated.

    rng: a key; None in evaluation without one.
    """

    frozen: Params
    variables: Variables
    rng: Any


class HostSums(NamedTuple):
    """Sums over microbatches in host memory, to which one of them adds.

    stacks: by the name of the parameter, of all layers. is_first: whether nothing was added yet: what they have is then
    not read, whatever it is.
    """

    stacks: dict[str, jax.Array]
    is_first: Scalar


class GradientFunction(Protocol):
    """`(weights, inputs, batch, scale) -> (output, gradients)`.

    scale: multiplies the loss before it is differentiated; None: nothing does. sums: to which the gradients of their
    names are added, times `output.weight`; these sums are then in the place of the gradients.
    """

    def __call__(self, weights: Params, inputs: ForwardInputs, batch: Batch, scale: Scalar,
                 sums: HostSums | None = None) -> tuple[ForwardOutput, Gradients]:
        """As the class says."""
        ...


def gradient_function(model: ModelFunctions, loss: Loss, layout: Layout, options: StepOptions,
                      activations: Activations, reads: Mapping[str, ParamAccess]) -> GradientFunction:
    """The gradient of `loss`, which backward reduces and scatters.

    activations: how those of the batches that it will get are sharded. reads: how `loss` reads parameters. With
    `options.accumulation.once` gradients are left as sums over what the function sees.
    """
    remat, reduced = options.remat, not options.accumulation.once

    def loss_of(weights: Params, stored: dict[str, Any], by_gradient: Any, inputs: ForwardInputs, batch: Batch,
                scale: Scalar) -> tuple[Scalar, ForwardOutput]:
        weights = map_named(lambda name, leaf: HostParam(leaf, stored[name]) if name in stored else leaf, weights)
        params, before = merge(weights, inputs.frozen), {**inputs.variables, **by_gradient}
        out, variables, written = model.run(
            with_key(loss, inputs.rng), params, before, inputs.rng, batch, layout.uses, reads=reads)
        variables = with_dtypes_of(variables, before)
        value, metrics, weight = loss_and_metrics(out)
        return value if scale is None else value * scale, ForwardOutput(value, metrics, weight, variables, written)

    names = [name for name, _ in named_leaves(layout.state.params)]
    names += sorted(layout.host_weights)

    def remat_blocks(closed: Any) -> Any:
        closed = checkpoint_blocks(closed, names, remat) if remat else closed
        activations.check(closed.jaxpr, checkpoints=has_checkpoints(closed.jaxpr))
        return closed

    gathers = layout.gathers_at_use
    again = gathers and not layout.kept_bytes
    on_loss = [
        (True, read_before_loops),
        (True, mark_last_reads),
        (bool(layout.tiles), tile_products),
        (bool(layout.fp8), fp8_products),
        (activations.sequence, activations.split_sequence),
        (gathers or activations.stashes, functools.partial(
            isolate_inner_remat, activations=activations if activations.stashes else None,
            host_in_barriers=not layout.axes.is_tpu)),
        (gathers, gather_again_in_loops),
    ]
    on_gradients = [
        (again, functools.partial(
            gather_again, host_in_barriers=not (layout.host_params and layout.axes.is_tpu))),
        (not layout.host_gradients, stack_narrow),
        (reduced and layout.host and (bool(layout.host_gradients) or not layout.axes.is_tpu),
         functools.partial(order_stacked_gradients, tiled=layout.axes.is_tpu)),
    ]
    loss_of = with_jaxpr_passes(loss_of, *(each for enabled, each in on_loss if enabled),
                                first=remat_blocks, last=with_shared_calls)
    backward = value_and_grad(loss_of, argnums=(0, 2), barrier=again)
    shardings = dict(named_leaves(layout.gradients))
    on_host = {name: i for i, name in enumerate(shardings) if name in layout.host_gradients}

    def gradients_first(_: Any, *args: Any) -> Any:
        (value, output), (grads, new) = backward(*args)
        return grads, output.weight, new, value, output

    # Beside loops over layers XLA:GPU copies nothing without it, and needs more memory with it: 36.1 instead of 31.0
    # GiB (LLaMA-3 70B on 8 H100). XLA:TPU copies nothing either (a product of 8k x 8k on four v5p).
    in_order = layout.axes.is_tpu or any(reads[name].stacked for name in layout.host_weights)
    whole = {} if in_order else {
        number: [*shardings].index(name) for number, name in enumerate(sorted(layout.host_weights))}

    def to_host(closed: Any, *, added: bool) -> Any:
        sums = len(on_host) * added  # the first inputs
        closed = wait_for_reads(closed, {sums + number: result for number, result in whole.items()},
                                len(shardings))
        if not added:
            return stack_on_host(closed, on_host.values())
        return add_on_host(closed, list(on_host.values()), weight=len(shardings),
                           shardings=[shardings[name] for name in on_host])

    gradient_of, gradient_added = (with_jaxpr_passes(
        gradients_first, *(each for enabled, each in on_gradients if enabled),
        last=functools.partial(to_host, added=added) if on_host or whole else None,
        as_call="" if layout.host_params else "gradient") for added in (False, True))

    def gradient(weights: Params, inputs: ForwardInputs, batch: Batch, scale: Scalar, sums: HostSums | None = None
                 ) -> tuple[ForwardOutput, Gradients]:
        by_gradient = {name: tree for name, tree in inputs.variables.items() if name in model.set_by_gradient}
        stored = {name: leaf for name, leaf in named_leaves(weights) if is_on_host(leaf)}
        run = gradient_of if sums is None else gradient_added
        carried = None if sums is None else ([sums.stacks[name] for name in on_host], sums.is_first)
        if layout.axes.slices:
            check_no_raw_keys(lambda variables: gradient_of(
                None, jax.tree.map(carrier_of, weights), stored, by_gradient, inputs._replace(variables=variables),
                batch, scale), inputs.variables)
        grads, _, new, _, output = run(
            carried, jax.tree.map(carrier_of, weights), stored, by_gradient, inputs, batch, scale)
        check_on_host(grads, layout.host_gradients)
        return output._replace(variables={**output.variables, **new}), grads

    return gradient


def check_no_raw_keys(fun: Callable[[Variables], Any], variables: Variables) -> None:
    """Raises UsageError where `fun` draws from one of `variables` that is a raw key, as of `jax.random.PRNGKey`.

    For parts of a batch that are computed apart, and should not draw the same.
    """
    leaves = named_leaves(variables)
    if not any(leaf.dtype == jnp.uint32 and leaf.ndim for _, leaf in leaves):
        return
    drawn = raw_keys(trace(fun, variables))
    raw = [name for number, (name, leaf) in enumerate(leaves) if number in drawn and leaf.dtype == jnp.uint32]
    if raw:
        raise UsageError(
            f"The variable {raw[0]} is a raw random key, an array of uint32 as jax.random.PRNGKey makes it, from which "
            "all slices would draw the same noise: make it with jax.random.key, of which each gets its own.")
