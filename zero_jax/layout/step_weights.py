"""Stage 3 with microbatches: the copy of the weights that a step gathers once, before the first of them, and drops.

Gathered where they are read, parameters are sent twice in every microbatch; from the copy, once in a step. It is in the
compute dtype, whole on each device as at stages 1 and 2, or sharded over the hpZ axes (ZeRO++), among which the
microbatches then gather. What is stored between steps stays sharded over all devices.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding

from zero_jax.errors import UsageError
from zero_jax.gather.gather import ParamUse, compute_spec, secondary_spec
from zero_jax.layout.compute_params import gather_copy
from zero_jax.layout.layout import Layout
from zero_jax.sharding.batch import Accumulation
from zero_jax.tree import leaf_bytes, merge, named_leaves, split_named
from zero_jax.typing import Params, Pytree
from zero_jax.xla.live_chip import chip_of_kind


def with_step_weights(layout: Layout, accumulation: Accumulation) -> Layout:
    """`layout` with what `accumulation.gather` adds to it, in words, too.

    Raises UsageError where "step" is asked for and state, copy and gradients alone exceed a device's memory.
    """
    if accumulation.gather == "use":
        return layout
    copy = _abstract_copy(layout)
    if accumulation.gather == "forward":
        uses = jax.tree.map(lambda use: dataclasses.replace(use, keep=True), layout.uses)
        return dataclasses.replace(layout, uses=uses, kept_bytes=_device_bytes(copy), gather_note=(
            f"in forward, and kept for backward: {_device_bytes(copy):,} bytes on each device"))
    total = layout.device_bytes + _device_bytes(copy) + _sum_bytes(layout, accumulation)
    kind = layout.axes.built_for.kind
    chip = chip_of_kind(kind)
    known = chip and chip.memory_bytes
    taken = (f"state, the gathered copy of {_device_bytes(copy):,} bytes and the sums of gradients take {total:,} "
             "bytes on each device")
    if known is not None and total > known:
        raise UsageError(f"gather=\"step\": {taken}, which has {known:,} ({kind}): give hpz_axes, among which the "
                         "copy stays sharded, reduce=\"every\", or leave gather out.")
    return dataclasses.replace(layout, step_weights=copy, gather_note=f"once a step: {taken}")


def microbatch_layout(layout: Layout) -> Layout:
    """`layout` as a microbatch sees it: with the copy in place of the weights, where the step gathers one."""
    if layout.step_weights is None:
        return layout
    trained = {name for name, _ in named_leaves(layout.state.params)}
    weights, frozen = split_named(layout.step_weights, lambda name, _: name in trained)
    uses = jax.tree.map(lambda like, use: dataclasses.replace(use, stored=like.sharding.spec, codes=None),
                        layout.step_weights, layout.uses)
    state = dataclasses.replace(layout.state, weights=weights, frozen=frozen)
    return dataclasses.replace(layout, state=state, uses=uses, step_weights=None)


def gather_step_weights(params: Params, frozen: Params, layout: Layout) -> tuple[Params, Params]:
    """What microbatches read of trainable and frozen parameters, which are as stored: the copies, if there are any."""
    if layout.step_weights is None:
        return params, frozen
    copies, shardings, shapes = microbatch_layout(layout).state, layout.shardings, layout.stored_shapes
    return (gather_copy(params, shardings.params, copies.weights, shapes.params, layout),
            gather_copy(frozen, shardings.frozen, copies.frozen, shapes.frozen, layout))


def step_weights_bytes(layout: Layout) -> int:
    """Bytes on each device of the copy, or of what forward keeps for backward; 0 where there is neither."""
    return _device_bytes(layout.step_weights) + layout.kept_bytes


def _abstract_copy(layout: Layout) -> Pytree:
    """The copy of every parameter, trainable or frozen, as `jax.ShapeDtypeStruct`s with shardings."""
    def like(leaf: Any, use: ParamUse) -> jax.ShapeDtypeStruct:
        spec = (secondary_spec(leaf.sharding.spec, use.axes, use.secondary) if use.secondary else
                compute_spec(leaf.sharding.spec, use.axes))
        return jax.ShapeDtypeStruct(leaf.shape, use.dtype, sharding=NamedSharding(layout.mesh, spec))

    return jax.tree.map(like, merge(layout.state.params, layout.state.frozen), layout.uses)


def _device_bytes(tree: Pytree) -> int:
    return sum(leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))


def _sum_bytes(layout: Layout, accumulation: Accumulation) -> int:
    """Of the float32 sums of gradients: shards, or with `reduce="once"` whole ones and a microbatch's own gradients."""
    if not accumulation.once:
        return sum(4 * leaf.size // layout.num_shards for leaf in jax.tree.leaves(layout.state.params))
    return sum((4 + leaf.dtype.itemsize) * leaf.size // layout.tensor_size
               for leaf in jax.tree.leaves(layout.state.params))
