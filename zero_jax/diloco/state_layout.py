"""The layout of a DiLoCo state: a `ZeroState` with a leading dim of the slices, and the outer state beside theirs."""

import dataclasses
from typing import Any

import jax
import optax

from zero_jax.diloco.outer import outer_dtype
from zero_jax.errors import UsageError
from zero_jax.layout.layout import Layout
from zero_jax.layout.make_layout import LayoutPolicy, make_layout
from zero_jax.layout.slices import stacked_layout
from zero_jax.sharding.partition import OWNED
from zero_jax.stages import STAGES
from zero_jax.tree import named_leaves

INNER, OUTER = "inner", "outer"
"""The two parts of `opt_state`."""


def sharded_layout(layout: Layout) -> Layout:
    """The layout of one slice in which parameters' gradients are sharded: `layout`, at stage 0 one of stage 1."""
    if layout.stage.shards_optimizer:
        return layout
    true = jax.tree.map(lambda leaf, shape: jax.ShapeDtypeStruct(shape.shape, leaf.dtype), layout.state.params,
                        layout.stored_shapes.params)
    state = dataclasses.replace(layout.state, params=true, frozen=None, ema=None, variables={}, guard=None)
    split = {name: sharding.spec for name, sharding in named_leaves(layout.gradients)
             if layout.axes.tensor in sharding.spec}
    return make_layout(state, layout.axes, LayoutPolicy(STAGES[1]), reads=layout.reads,
                       optimizer=optax.with_extra_args_support(optax.identity()), tensor_specs=split)


def diloco_layout(layout: Layout, num_slices: int) -> Layout:
    """The layout of the state of `num_slices` slices, from that of one: `opt_state` is {"inner", "outer"}.

    The outer state is {"params", "momentum"}, sharded as gradients are from stage 1 on, in float32. Raises ValueError
    for an optimizer whose state cannot be stacked.
    """
    if owned := [name for name, _ in named_leaves(layout.state.opt_state) if OWNED in name.split("/")]:
        raise UsageError(f"whole_matrices(..., \"owner\") spreads {owned[0]} over devices, which slices cannot stack "
                         "yet: give whole_matrices(..., \"gather\"), or another optimizer.")
    stacked, sharded = stacked_layout(layout, num_slices), sharded_layout(layout)
    outer = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, outer_dtype(leaf.dtype), sharding=sharding),
        sharded.state.params, sharded.gradients)
    outer_shapes = sharded.stored_shapes.params

    def both(inner: Any, outer: Any) -> dict[str, Any]:
        return {INNER: inner, OUTER: {"params": outer, "momentum": outer}}

    return dataclasses.replace(
        stacked, state=dataclasses.replace(stacked.state, opt_state=both(stacked.state.opt_state, outer)),
        stored_shapes=dataclasses.replace(
            stacked.stored_shapes, opt_state=both(stacked.stored_shapes.opt_state, outer_shapes)))


def is_stacked(name: str) -> bool:
    """Whether the leaf `name` of a state has a leading dim of the slices."""
    return name.split("/")[0] not in ("step", "frozen") and not name.startswith(f"opt_state/{OUTER}/")
