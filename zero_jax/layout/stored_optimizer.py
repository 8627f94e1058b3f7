"""Runs an optimizer on padded or merged arrays: it is traced on true shapes, and its trace is run on stored arrays.

Elementwise ops act on the stored array, full reductions mask the padding, anything else restores the true shape first:
for merged dims that gathers the leaf, so that the layout asks `needs_shape` beforehand.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from zero_jax.jaxpr.equations import (
    ClosedJaxpr,
    JaxprEqn,
    bind_eqn,
    primitive_of,
    run_jaxpr,
    scope_of,
    trace_flat,
)
from zero_jax.jaxpr.primitives import CALLS, COND, ELEMENTWISE, branches, call_jaxpr, reduce_all, reduced_axes
from zero_jax.layout.layout import Layout
from zero_jax.sharding.stored_shape import StoredShape, identity_shape
from zero_jax.typing import Gradients, OptState, Params


@dataclasses.dataclass(frozen=True)
class StoredPlacement:
    """How an array of a stored tree is stored: its shape (`stored_shape`), and its sharding where there is one."""

    stored_shape: StoredShape
    sharding: NamedSharding | None = None


@dataclasses.dataclass(frozen=True)
class _StoredArray:
    """A stored array, in place of the true array that the traced function takes."""

    value: Any
    placement: StoredPlacement

    def load(self) -> Any:
        """The array in its true shape. With padded dims it keeps its sharding: inside a jit, layouts may be uneven."""
        value, sharding = self.placement.stored_shape.load(self.value), self.placement.sharding
        if sharding is None or self.placement.stored_shape.merges:
            return value
        return jax.lax.with_sharding_constraint(value, sharding)


def run_on_stored(fun: Callable[..., Any], placements: Any, out_placements: Any,
                  needed: set[StoredShape] | None = None) -> Callable[..., Any]:
    """`fun`, a function of pytrees of true arrays, as one of trees of stored arrays.

    Args:
      fun: what is traced on true shapes.
      placements: a `StoredPlacement` for each leaf of the tuple of arguments.
      out_placements: the same for what `fun` returns, whose padding is zeros.
      needed: collects the stored shapes of which some equation needed the true shape.
    """

    def stored(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        leaf_placements = jax.tree.leaves(placements)
        true = [jax.ShapeDtypeStruct(place.stored_shape.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
                for leaf, place in zip(leaves, leaf_placements, strict=True)]
        closed, out_treedef = trace_flat(fun, true, treedef)
        values = [leaf if place.stored_shape.is_identity else _StoredArray(leaf, place)
                  for leaf, place in zip(leaves, leaf_placements, strict=True)]
        outs = _Interpreter(set() if needed is None else needed).run(closed, values)
        outs = [_at_placement(out, place) for out, place in zip(outs, jax.tree.leaves(out_placements), strict=True)]
        return jax.tree.unflatten(out_treedef, outs)

    return stored


def needs_shape(fun: Callable[..., Any], placements: Any, out_placements: Any, *args: Any) -> set[StoredShape]:
    """The stored shapes of which `fun` needs the true shape, not being elementwise; `args` are abstract, as stored."""
    needed: set[StoredShape] = set()
    jax.eval_shape(run_on_stored(fun, placements, out_placements, needed), *args)
    return needed


def _at_placement(value: Any, placement: StoredPlacement) -> Any:
    """`value` stored by `placement`."""
    if isinstance(value, _StoredArray):
        if value.placement.stored_shape == placement.stored_shape:
            return placement.stored_shape.filled(value.value, 0)
        value = value.load()
    return placement.stored_shape.store(value)


def _broadcast(value: Any, placement: StoredPlacement) -> Any:
    """`value`, a scalar or of a shape that broadcasts to the leaf's, as an operand beside a stored array."""
    if isinstance(value, _StoredArray):
        if value.placement.stored_shape == placement.stored_shape:
            return value.value
        value = value.load()
    if jnp.ndim(value) == 0:
        return value
    return placement.stored_shape.store(jnp.broadcast_to(value, placement.stored_shape.shape))


class _Interpreter:
    """Evaluates a jaxpr of true arrays, for some of which there are stored ones."""

    def __init__(self, needed: set[StoredShape]):
        self.needed = needed

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        return run_jaxpr(closed, args, self._scoped)

    def _scoped(self, eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        with jax.named_scope(scope_of(eqn)):
            return self._equation(eqn, args)

    def _equation(self, eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        stored = [arg for arg in args if isinstance(arg, _StoredArray)]
        primitive = primitive_of(eqn)
        if primitive in CALLS:
            return self.run(call_jaxpr(eqn), args)
        if not stored:
            return bind_eqn(eqn, args)
        if primitive == COND and not isinstance(args[0], _StoredArray):
            return self._cond(eqn, args)
        shape = getattr(eqn.outvars[0].aval, "shape", ())
        placements = [arg.placement for arg in stored]
        placement = next((each for each in placements if each.stored_shape.shape == shape), placements[0])
        stored_shape = placement.stored_shape
        if primitive in ELEMENTWISE and stored_shape.shape == shape:
            values = bind_eqn(eqn, [_broadcast(arg, placement) for arg in args])
            return [_StoredArray(value, placement) for value in values]
        if primitive in _NEUTRAL and len(reduced_axes(eqn)) == len(stored_shape.shape):
            return reduce_all(eqn, stored_shape.filled(stored[0].value, _NEUTRAL[primitive](stored[0].value.dtype)))
        self.needed.update(arg.placement.stored_shape for arg in stored)
        return bind_eqn(eqn, [arg.load() if isinstance(arg, _StoredArray) else arg for arg in args])

    def _cond(self, eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        """Branches on stored arrays: a result is a stored array if it is one in any branch."""
        placements: list[StoredPlacement | None] = [None] * len(eqn.outvars)
        arrays = [arg.value if isinstance(arg, _StoredArray) else arg for arg in args[1:]]

        def run_branch(closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
            return self.run(closed, [dataclasses.replace(arg, value=value) if isinstance(arg, _StoredArray) else value
                                     for arg, value in zip(args[1:], values, strict=True)])

        def note_placements(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
            def branch(*values: Any) -> list[Any]:
                outs = run_branch(closed, values)
                placements[:] = [out.placement if isinstance(out, _StoredArray) else known
                                 for out, known in zip(outs, placements, strict=True)]
                return [out.value if isinstance(out, _StoredArray) else out for out in outs]

            return branch

        def at_placements(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
            return lambda *values: [
                out if place is None else _at_placement(out, place)
                for out, place in zip(run_branch(closed, values), placements, strict=True)]

        for closed in branches(eqn):
            jax.eval_shape(note_placements(closed), *arrays)
        outs = jax.lax.switch(args[0], [at_placements(closed) for closed in branches(eqn)], *arrays)
        return [out if place is None else _StoredArray(out, place) for out, place in zip(outs, placements, strict=True)]


def _lowest(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0, "reduce_prod": lambda dtype: 1, "reduce_and": lambda dtype: True,
    "reduce_or": lambda dtype: False, "reduce_max": _lowest, "reduce_min": _highest}
"""By primitive, the value of the padding in a full reduction."""


UPDATE_SCOPE = "zero_update"
"""In the op_name of all that the optimizer computes."""


def init_stored(layout: Layout, optimizer: optax.GradientTransformationExtraArgs, params: Params) -> OptState:
    """`optimizer.init(params)`, of parameters as they are stored."""
    placements = _placements(layout)
    if placements is None:
        return optimizer.init(params)
    param_placements, state_placements = placements
    return run_on_stored(optimizer.init, (param_placements,), state_placements)(params)


@jax.named_scope(UPDATE_SCOPE)
def update_stored(layout: Layout, optimizer: optax.GradientTransformationExtraArgs, grads: Gradients,
                  opt_state: OptState, params: Params, **extra: Any) -> tuple[Any, OptState]:
    """`optimizer.update(grads, opt_state, params, **extra)`, of trees as they are stored: (updates, new state)."""
    placements = _placements(layout)
    if placements is None:
        return optimizer.update(grads, opt_state, params, **extra)
    param_placements, state_placements = placements
    extra_placements = jax.tree.map(lambda value: StoredPlacement(identity_shape(jnp.shape(value))), extra)

    def update(grads: Any, state: Any, params: Any, extra: Any) -> Any:
        return optimizer.update(grads, state, params, **extra)

    return run_on_stored(
        update, (param_placements, state_placements, param_placements, extra_placements),
        (param_placements, state_placements))(grads, opt_state, params, extra)


def _placements(layout: Layout) -> tuple[Any, Any] | None:
    """A `StoredPlacement` for each gradient and leaf of the optimizer's state; None where all is stored as it is."""
    shapes = layout.stored_shapes
    if all(stored_shape.is_identity for stored_shape in jax.tree.leaves((shapes.params, shapes.opt_state))):
        return None
    return (jax.tree.map(StoredPlacement, shapes.params, layout.gradients),
            jax.tree.map(lambda stored_shape, leaf: StoredPlacement(stored_shape, leaf.sharding), shapes.opt_state,
                         layout.state.opt_state))
