"""The functions of a DiLoCo step that JAX traces: a step of every slice, the outer step, and into and out of slices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax import combinations
from zero_jax.diloco.fragments import Fragment, fragments_of, num_parts
from zero_jax.diloco.options import OuterOptions
from zero_jax.diloco.outer import (
    Store,
    apply_movement,
    mean_movement,
    mean_of_parts,
    movement_parts,
    stored_as,
    sum_part,
)
from zero_jax.errors import UsageError
from zero_jax.jaxpr.equations import trace_flat
from zero_jax.layout.compute_params import gather_compute_params
from zero_jax.layout.layout import Layout
from zero_jax.layout.make_layout import LayoutPolicy, make_layout
from zero_jax.layout.slices import OUTER_SCOPE, mean_of_slices, stacked_layout
from zero_jax.precision import wide_dtype
from zero_jax.sharding.partition import OWNED, names_of
from zero_jax.stages import STAGES
from zero_jax.state import ZeroState
from zero_jax.step.accumulate import folded
from zero_jax.step.step import ZeroTrainStep
from zero_jax.transforms.loop_iterations import iterations_with_products, run_in_iterations
from zero_jax.tree import is_key, map_named, named_leaves
from zero_jax.typing import Batch, Metrics, Pytree
from zero_jax.xla.overlap import blocks

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
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, wide_dtype(leaf.dtype), sharding=sharding),
        sharded.state.params, sharded.gradients)
    outer_shapes = sharded.stored_shapes.params

    def both(inner: Any, outer: Any) -> dict[str, Any]:
        return {INNER: inner, OUTER: {"params": outer, "momentum": outer}}

    return dataclasses.replace(
        stacked, state=dataclasses.replace(stacked.state, opt_state=both(stacked.state.opt_state, outer)),
        stored_shapes=dataclasses.replace(
            stacked.stored_shapes, opt_state=both(stacked.stored_shapes.opt_state, outer_shapes)))


class DiLoCoFunctions:
    """What `DiLoCoStep` compiles. Nothing here runs on devices by itself."""

    def __init__(self, step: ZeroTrainStep, outer: OuterOptions, num_slices: int | None = None):
        """As `make_diloco_step` calls it; raises ValueError for a step that slices cannot take.

        num_slices: of a state that is only stored and not trained; default: those of the mesh.
        """
        combinations.check({**step.options.values(step.axes), "diloco.every": outer.every})
        replica = step.axes.replica
        if crossing := [rule for rule in step.options.parallelism.batch_specs if replica in names_of(rule[1] or P())]:
            raise UsageError(f"batch_specs: {crossing[0]!r} splits a leaf over the slices, {replica!r}, between which "
                             "nothing is sent: give None, or axes of a slice.")
        self.step, self.outer = step, outer
        self.inner = step.of_slices()
        self.axes = self.inner.axes
        self.num_slices = self.axes.size(self.axes.slices) if num_slices is None else num_slices
        self._layout: Layout | None = None
        self.fragments: tuple[Fragment, ...] = ()
        self._stores: Any = None
        self._batch: Batch = None
        self._iterations: int | None = None

    def layout(self, batch: Batch = None) -> Layout:
        """How every leaf of the state is stored; `batch` may be left out once known."""
        if self._layout is None:
            self.step.layout(batch)
            one = self.inner.layout(None if batch is None else self.batch_of_one(batch))
            sharded = sharded_layout(one)
            self.fragments = fragments_of(sharded, self.outer.fragments)
            self._stores = stored_as(one.stored_shapes.params, sharded.stored_shapes.params)
            self._layout = diloco_layout(one, self.num_slices)
        if batch is not None and self._batch is None:
            self._batch = self.step.abstract_batch(batch)
        return self._layout

    def num_parts(self, fragment: int | None, batch: Batch = None) -> int:
        """As `DiLoCoStep.num_parts`."""
        overlap = self.step.options.communication.overlap
        if fragment is None or not self.outer.overlap or blocks(self.axes.built_for, overlap):
            return 1
        layout = self.layout(batch)
        if self._iterations is None:
            closed, _ = trace_flat(self._steps, *jax.tree.flatten((layout.state, self._batch)))
            self._iterations = iterations_with_products(closed.jaxpr)
        return num_parts(self._iterations, self.fragments[fragment])

    def batch_of_one(self, batch: Batch) -> Batch:
        """A slice's part of `batch`, as `jax.ShapeDtypeStruct`s."""
        batches = self.step.batches
        return batches.resized(batch, batches.size(batch) // self.axes.size(self.axes.slices))

    def _slices_of(self, batch: Batch) -> tuple[Batch, Pytree]:
        """(`batch` with a leading dim of the slices for its examples, what of it has one, as `jax.vmap` takes it)."""
        batches, num_slices = self.inner.batches, self.axes.size(self.axes.slices)

        def split(name: str, leaf: jax.Array) -> jax.Array:
            if not batches.is_example(name, leaf):
                return leaf
            leaf_sharding = NamedSharding(self.axes.mesh, P(self.axes.slices, *batches.spec(name, leaf)))
            return constrain(leaf.reshape(num_slices, -1, *leaf.shape[1:]), leaf_sharding)

        dims = map_named(lambda name, leaf: 0 if batches.is_example(name, leaf) else None, batch)
        return map_named(split, batch), dims

    def step_and_outer(self, fragment: int | None, state: ZeroState, batch: Batch) -> tuple[ZeroState, Metrics]:
        """A step of every slice; fragment: what is averaged after it, or with `overlap` beside it."""
        if fragment is None:
            return self._steps(state, batch)
        if self.outer.overlap:
            state, metrics, movement = self._steps_beside(fragment, state, batch)
            # Else XLA waits for the sum where the first result of it could be used, before the backward pass.
            movement, params = jax.lax.optimization_barrier((movement, state.params))
            return self._moved(fragment, dataclasses.replace(state, params=params), metrics, movement)
        state, metrics = self._steps(state, batch)
        return self._moved(fragment, state, metrics, self._movement(fragment, state))

    def _steps(self, state: ZeroState, batch: Batch) -> tuple[ZeroState, Metrics]:
        """A step of every slice by itself."""
        slices, batch_dims = self._slices_of(batch)
        each_own: Any = 0
        shared: Any = None
        state_dims = ZeroState(step=shared, params=each_own, weights=each_own, frozen=shared, opt_state=each_own,
                               variables=each_own, ema=each_own, guard=each_own, rng=each_own)
        each = jax.vmap(self.inner.functions.constrained_step, in_axes=(state_dims, batch_dims),
                        out_axes=(dataclasses.replace(state_dims, step=0), 0), spmd_axis_name=self.axes.slices)
        new, metrics = each(dataclasses.replace(state, opt_state=state.opt_state[INNER]), slices)
        return dataclasses.replace(
            new, step=state.step + 1, frozen=state.frozen,
            opt_state={INNER: new.opt_state, OUTER: state.opt_state[OUTER]}), metrics

    def _steps_beside(self, fragment: int, state: ZeroState, batch: Batch
                      ) -> tuple[ZeroState, Metrics, dict[str, jax.Array]]:
        """`_steps`, and the outer gradient of a fragment from before them, sent beside them in `num_parts`."""
        number = self.num_parts(fragment)
        if number == 1:
            return *self._steps(state, batch), self._movement(fragment, state)
        leaves, treedef = jax.tree.flatten((state, batch))
        closed, out_treedef = trace_flat(self._steps, leaves, treedef)
        outer, chunk = state.opt_state[OUTER]["params"], self.fragments[fragment]
        parts = movement_parts(state.params, outer, chunk, self.axes, self.outer.dtype, self._stores[0], number)
        outs, summed = run_in_iterations(closed, leaves, parts, lambda part: sum_part(part, self.axes))
        return *jax.tree.unflatten(out_treedef, outs), mean_of_parts(summed, outer, chunk, self.axes)

    def _movement(self, fragment: int, state: ZeroState) -> dict[str, jax.Array]:
        return mean_movement(state.params, state.opt_state[OUTER]["params"], self.fragments[fragment], self.axes,
                             self.outer.dtype, self._stores[0])

    @jax.named_scope(OUTER_SCOPE)
    def _moved(self, fragment: int, state: ZeroState, metrics: Metrics, movement: dict[str, jax.Array]
               ) -> tuple[ZeroState, Metrics]:
        """The state after the outer step of a fragment; what the model reads is gathered again."""
        params, outer = apply_movement(state.params, state.opt_state[OUTER], movement, self.fragments[fragment],
                                       self.axes, self.outer, self._stores)
        layout, weights = self.layout(), None
        if state.weights is not None:
            weights = gather_compute_params(jax.tree.map(constrain, params, layout.gradients), layout, state.weights)
        return dataclasses.replace(
            state, params=jax.tree.map(constrain, params, layout.shardings.params), weights=weights,
            opt_state={**state.opt_state, OUTER: outer}), metrics

    def from_synchronous(self, state: ZeroState) -> ZeroState:
        """The state of slices that are alike, but for their random keys."""
        layout, num_slices = self.layout(), self.num_slices

        def copies(leaf: jax.Array) -> jax.Array:
            if is_key(leaf):
                return jax.vmap(folded, in_axes=(None, 0))(leaf, jnp.arange(num_slices))
            return jnp.broadcast_to(leaf, (num_slices, *leaf.shape))

        stacked = jax.tree.map(copies, state)
        store: Store = self._stores[0]
        start = map_named(lambda name, leaf, like: store(name, leaf)[0].astype(like.dtype), stacked.params,
                          layout.state.opt_state[OUTER]["params"])
        zeros = jax.tree.map(jnp.zeros_like, start)
        return dataclasses.replace(
            stacked, step=state.step, frozen=state.frozen,
            opt_state={INNER: stacked.opt_state, OUTER: {"params": start, "momentum": zeros}})

    def synchronous(self, state: ZeroState) -> ZeroState:
        """The state of `step`: outer parameters, and means over the slices of what else there is."""
        like = self.step.layout()
        back: Store = self._stores[1]
        params = map_named(lambda name, outer, leaf: back(name, outer[None])[0].astype(leaf.dtype),
                           state.opt_state[OUTER]["params"], like.state.params)
        fields = {name: jax.tree.map(mean_of_slices, getattr(state, name))
                  for name in ("variables", "guard", "rng")}
        masters = jax.tree.map(constrain, params, like.gradients)
        return dataclasses.replace(
            state, params=params, weights=gather_compute_params(masters, like),
            opt_state=jax.tree.map(mean_of_slices, state.opt_state[INNER]), **fields)

    def resized(self, state: ZeroState, before: "DiLoCoFunctions") -> ZeroState:
        """A state of another number of slices, in true shapes, as one of as many as here; weights are left out."""
        here, there = jnp.arange(self.num_slices), before.num_slices

        def pick(name: str, leaf: jax.Array) -> jax.Array:
            if name.startswith(("step", "frozen/", f"opt_state/{OUTER}/")):  # what all slices share
                return leaf
            leaf = leaf[here % there]
            # The first `there` keep their keys.
            return jnp.where((here < there).reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jax.vmap(
                folded)(leaf, here)) if is_key(leaf) else leaf

        return map_named(pick, dataclasses.replace(state, weights=None))
