"""Forward and backward: the loss of a batch, or of one microbatch, and the gradient of each trained parameter."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from zero_jax.activations import Activations
from zero_jax.blocks import Remat, checkpoint_blocks, has_checkpoints, name_carried
from zero_jax.functional import Functional
from zero_jax.layout import Layout
from zero_jax.losses import Loss, loss_and_metrics
from zero_jax.mesh import CONTEXT, DATA, TENSOR, on_torus
from zero_jax.partial import inline_calls, merge_scatters, scatter_parts
from zero_jax.passes import (
    checkpoint_loops,
    hide_checkpoints,
    keep_all_but_gathered,
    mark_derived,
    separate_reads,
)
from zero_jax.precision import Precision
from zero_jax.rewrite import rewritten
from zero_jax.tree import merge, named_leaves
from zero_jax.widen import widen_reductions


class Told(NamedTuple):
    """What a forward pass tells: scalars, and the model's new variables. weight: of what the loss is a mean."""

    loss: Any
    metrics: dict[str, Any]
    weight: Any
    variables: Any


class Reading(NamedTuple):
    """What a forward pass reads beside `weights`, in which it is differentiated, and its batch."""

    frozen: Any
    variables: Any
    rng: Any


def gradient_function(model: Functional, loss: Loss, layout: Layout, precision: Precision, activations: Activations, *,
                      remat: Remat | None = None, reduced: bool = True) -> Callable[..., tuple[Told, Any]]:
    """`fun(weights, reading, batch, scale) -> (Told, gradients)`, where backward reduces and scatters gradients.

    scale: multiplies the loss before it is differentiated; None: nothing does. activations: how those of the batch that
    `fun` will get lie. remat: what is kept of each block; None: what the model keeps. reduced: False leaves gradients
    as sums over what `fun` sees.
    """

    def loss_of(weights: Any, reading: Reading, batch: Any, scale: Any) -> tuple[Any, Told]:
        params = merge(weights, reading.frozen)
        out, variables = model.run(loss, params, reading.variables, reading.rng, batch, layout.uses)
        value, metrics, weight = loss_and_metrics(out)
        return value if scale is None else value * scale, Told(value, metrics, weight, variables)

    names = [name for name, _ in named_leaves(layout.state.params)]

    def blocks(closed: Any) -> Any:
        closed = checkpoint_blocks(closed, names, remat) if remat else closed
        activations.check(closed.jaxpr, checkpoints=has_checkpoints(closed.jaxpr))
        return closed

    hide = functools.partial(hide_checkpoints, activations=activations if activations.stashes else None)
    split = [activations.split_sequence] if activations.sequence else []
    if layout.stage.shards_params and layout.num_shards > 1:  # else nothing is gathered
        before = (separate_reads, *split, mark_derived, hide, checkpoint_loops, name_carried)
        loss_of = jax.checkpoint(rewritten(loss_of, *before, first=blocks), policy=keep_all_but_gathered)
    else:
        loss_of = rewritten(loss_of, separate_reads, *split, *([hide] if activations.stashes else []), first=blocks)
    edits: list[Any] = [inline_calls] if precision.reduce is None else [inline_calls, widen_reductions]
    # On a flat GPU mesh the partitioner's own reductions are asynchronous: there only what it cannot scatter is edited.
    uneven = not on_torus(layout.mesh) and {DATA, CONTEXT, TENSOR} >= set(layout.mesh.axis_names)
    if reduced and not (uneven and all(view.natural for view in jax.tree.leaves(layout.views.params))):
        edits = [functools.partial(merge_scatters, uneven=uneven), *edits, functools.partial(
            scatter_parts, batch_size=activations.batch_size, axes=activations.batch, uneven=uneven,
            split=activations.sequence)]
    gradient_of = rewritten(jax.value_and_grad(loss_of, has_aux=True), *edits)

    def fun(weights: Any, reading: Reading, batch: Any, scale: Any) -> tuple[Told, Any]:
        (_, told), grads = gradient_of(weights, reading, batch, scale)
        return told, grads

    return fun
