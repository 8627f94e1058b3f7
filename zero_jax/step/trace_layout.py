"""The layout of a step's state, found by tracing the model's initialisation and its loss: nothing is computed."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.arguments import check_matched
from zero_jax.errors import UsageError
from zero_jax.frontends.composition import model_tree, part_specs
from zero_jax.frontends.model_functions import ModelFunctions
from zero_jax.layout.layout import Layout
from zero_jax.layout.make_layout import make_layout
from zero_jax.layout.step_weights import with_step_weights
from zero_jax.offload.offload import with_offload
from zero_jax.optim.compatibility import check_optimizer
from zero_jax.precision import Precision, wide_dtype
from zero_jax.sharding.batch import Accumulation, abstract_batch
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.param_access import ParamAccess
from zero_jax.sharding.tensor_rules import tensor_specs
from zero_jax.sharding.tiling import with_tiles
from zero_jax.state import ZeroState
from zero_jax.step.losses import checked, with_key
from zero_jax.step.options import StepOptions
from zero_jax.step.update import widened
from zero_jax.tree import cast_floating, map_named, merge, named_leaves, split_named
from zero_jax.typing import Batch, Loss, Params, Pattern


def trace_layout(model: ModelFunctions, init: Callable[..., Any], loss: Loss,
                 optimizer: optax.GradientTransformationExtraArgs, axes: MeshAxes, options: StepOptions,
                 guard_state: Any, batch: Batch) -> Layout:
    """The layout, for `batch`, abstract or not.

    init: `init(rng, batch, given)`, the model's values; loss: as steps call it; guard_state: an abstract `GuardState`,
    or None. Raises ValueError for options and an optimizer that do not fit the model.
    """
    precision, batch = options.precision, abstract_batch(batch)
    rng, given = jax.eval_shape(lambda: jax.random.key(0)), jax.eval_shape(lambda: model.given)

    # First, the model's values.
    replicated = NamedSharding(axes.mesh, P())  # with a mesh in its type, as in the programs that share the trace
    placed = jax.tree.map(lambda leaf: leaf.update(sharding=replicated), batch)
    values, variables = jax.eval_shape(init, rng, placed, given)
    _check_trainable(values, frozen=options.frozen, keep=precision.keep)
    params, frozen = split_trainable(values, options.frozen)
    params = jax.eval_shape(lambda tree: cast_floating(tree, precision.params), params)
    check_optimizer(optimizer, params, replicated, frozen,
                    **({"widen": widened} if precision.rounding == "stochastic" else {}))

    # Second, how the loss reads them.
    as_read = map_named(lambda name, leaf: leaf.update(dtype=precision.read_dtype(name, leaf.dtype)),
                        merge(params, frozen))
    read_batch = jax.eval_shape(lambda batch: cast_floating(batch, precision.compute), batch)
    reads = model.reads(checked(with_key(loss, None)), as_read, variables, rng,
                        read_batch if precision.cast_batch is True else batch)
    _check_read(params, reads)
    split = part_specs(tensor_specs(model_tree(values, model.composition), axes,
                                    options.parallelism.tensor_rules, model.metadata), model.composition)
    reads, not_tiled = with_tiles(reads, dict(named_leaves(as_read)), options.tiling, axes.zero_size, split)
    if options.remat is not None:  # in the place of what the model checkpoints
        reads = {name: dataclasses.replace(access, checkpointed=options.remat.policy != "dots")
                 for name, access in reads.items()}
    _check_written(params, reads, precision, options.accumulation)
    variables = model.lasting(variables)

    state = ZeroState(
        step=jax.ShapeDtypeStruct((), jnp.int32), params=params, weights=None, frozen=frozen, opt_state=None,
        variables=variables, guard=guard_state, rng=rng, ema=None if options.ema is None else jax.tree.map(
            lambda leaf: leaf.update(dtype=wide_dtype(leaf.dtype)), params))
    layout = make_layout(state, axes, options.layout_policy, optimizer=optimizer, reads=reads, tensor_specs=split)
    layout = with_offload(dataclasses.replace(
        layout, not_tiled=not_tiled, microbatches=options.accumulation.microbatches), options.offload)
    return with_step_weights(layout, options.accumulation)


def _check_read(params: Params, reads: Mapping[str, ParamAccess]) -> None:
    """Raises ValueError where the loss reads none of the parameters that are trained."""
    names = [name for name, _ in named_leaves(params)]
    if names and not any(name not in reads or reads[name].count for name in names):
        raise UsageError("The loss reads none of the parameters that are trained: it is called as loss(model, batch), "
                         "and must call this model, as in model(batch[\"inputs\"]), and not one of its own.")


def split_trainable(params: Params, frozen: Sequence[Pattern]) -> tuple[Params, Params]:
    """(the parameters that are trained, those whose name has one of the patterns `frozen`)."""
    others, trained = split_named(params, lambda name, _: any(re.search(pattern, name) for pattern in frozen))
    return trained, others


def _check_trainable(params: Params, *, frozen: Sequence[Pattern], keep: Sequence[Pattern]) -> None:
    """Raises ValueError for a pattern that no name matches, where nothing is trained, and for what cannot be."""
    leaves = named_leaves(params)
    for argument, patterns in (("frozen", frozen), ("keep", keep)):
        check_matched(argument, patterns, [name for name, _ in leaves])
    trained = named_leaves(split_trainable(params, frozen)[0])
    if leaves and not trained:
        raise UsageError(f"frozen={tuple(frozen)} matches every parameter: there is nothing to train.")
    for name, leaf in trained:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise UsageError(
                f"Parameter {name} has dtype {leaf.dtype} and shape {leaf.shape}, and only floating parameters can be "
                "trained: name it in frozen, or keep it in another collection (Linen) or another Variable type than "
                "nnx.Param (NNX).")


def _check_written(trained: Params, reads: Mapping[str, ParamAccess], precision: Precision,
                   accumulation: Accumulation) -> None:
    """Raises ValueError where the model overwrites a parameter in its forward pass and that cannot be carried on.

    trained: those that are trained, abstract, as they are stored.
    """
    dtypes = {name: leaf.dtype for name, leaf in named_leaves(trained)}
    for name in [name for name, read in reads.items() if read.written]:
        what = f"The model overwrites its parameter {name} in its forward pass"
        if name not in dtypes:
            raise UsageError(f"{what}, and frozen names it: leave it out of frozen.")
        if precision.read_dtype(name, dtypes[name]) != dtypes[name]:
            raise UsageError(
                f"{what}, and under this precision it sees it rounded to {precision.compute}: what it writes would "
                f"replace the {dtypes[name]} master copy. Give a Precision(..., keep=({name!r},)), or precision=None.")
        if accumulation.microbatches > 1:
            raise UsageError(f"{what}, and accumulate={accumulation.microbatches} would write it once for each "
                             "microbatch: give accumulate=1, or compute the value in the model without writing it.")
