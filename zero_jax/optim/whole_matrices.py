"""Optimizers of whole matrices (Muon, Shampoo) on sharded gradients: which device computes the update of which."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero_jax.errors import UsageError
from zero_jax.jaxpr.equations import all_eqns, primitive_of, scope_of, trace, variables
from zero_jax.jaxpr.primitives import SHARD_MAP, call_jaxpr, in_specs
from zero_jax.layout.layout import Layout
from zero_jax.layout.stored_optimizer import update_stored
from zero_jax.optim.compatibility import takes_value
from zero_jax.sharding.host_arrays import fetch
from zero_jax.sharding.mesh import constrain
from zero_jax.sharding.mesh_axes import AxisRoles, MeshAxes
from zero_jax.sharding.partition import OWNED, choose_spec
from zero_jax.tree import named_leaves

MATRICES_SCOPE = "zero_matrices"
"""In the op_name of every collective that gathers matrices for their update, or returns updates."""


def whole_matrices(inner: optax.GradientTransformation, mesh: Mesh, placement: Literal["owner", "gather"] = "owner", *,
                   axis: str | Sequence[str] | None = None, axis_roles: AxisRoles | None = None
                   ) -> optax.GradientTransformationExtraArgs:
    """`inner` on whole matrices, one at a time, in a step whose gradients are sharded.

    Left alone, the partitioner splits each product inside of `inner` and reduces each of their sums. Here matrices of
    equal shape are stacked, whether a leaf is one, (D, F), or a loop's many, (L, D, F), and `inner` sees one at a
    time: what it computes over several (a global norm) belongs around this transform, and its state is per matrix.
    With N devices and matrices of P elements together, each device sends per step:

    - `owner`: 2 P/N elements. Each device computes an equal share of every stack and stores the optimizer state of
      that, which is never sent; gradients are sent to it and updates back. Stacks are padded with zero matrices to a
      multiple of N, which cost their share of state and FLOPs.
    - `gather`: P elements for the gradients and P for each moment, which is stored sharded. Each device computes every
      stack: N times the FLOPs.

    Args:
      inner: any optax transform that runs on a single matrix: `optax.contrib.muon(1e-2)`, say.
      mesh: that of the train step.
      placement: "owner" or "gather".
      axis: as in `zero_jax.Parallelism`.
      axis_roles: as in `zero_jax.Parallelism`.

    Raises ValueError for another placement and, in `init`, for a leaf that is no matrix: give those to another
    optimizer with `optax.partition`.

    >>> import optax, zero_jax
    >>> mesh = zero_jax.make_mesh()
    >>> muon = zero_jax.whole_matrices(optax.contrib.muon(1e-2), mesh)
    >>> optimizer = optax.partition({True: muon, False: optax.adamw(1e-3)}, lambda params: jax.tree.map(
    ...     lambda leaf: leaf.ndim > 1, params))
    """
    if placement not in ("owner", "gather"):
        raise UsageError(f"placement={placement!r} is unknown: give 'owner' (each device computes its own matrices) or "
                         "'gather' (each computes all of them).")
    mesh_axes, run = MeshAxes.of(mesh, axis, axis_roles), takes_value(inner)
    mesh, axes = mesh_axes.mesh, mesh_axes.zero
    sizes = {name: mesh.shape[name] for name in axes}
    parts = math.prod(sizes.values()) if placement == "owner" else 1
    stack_spec = P(axes) if placement == "owner" else P()
    key = OWNED if placement == "owner" else MATRICES_SCOPE  # a gather of it may be named by the state alone

    def shards(stack: jax.Array) -> P:
        """The spec of the stored matrices, so that stacking and unstacking them sends nothing."""
        return P(None, *choose_spec(stack.shape[1:], sizes, tiled=mesh_axes.is_tpu))

    def init(params: Any) -> Any:
        labels = _labels(params)
        return {key: {labels[shape]: jax.vmap(inner.init)(stack) for shape, stack in _stacks(params, parts).items()}}

    @jax.named_scope(MATRICES_SCOPE)
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        each = jax.shard_map(
            jax.vmap(lambda grad, state, param, extra: run.update(grad, state, param, **extra), (0, 0, 0, None)),
            mesh=mesh, in_specs=(stack_spec, stack_spec, stack_spec, P()), out_specs=stack_spec,
            axis_names=set(axes), check_vma=False)

        def stacks(tree: Any) -> dict[str, jax.Array]:
            return _stacks(tree, parts, lambda stack: constrain(stack, mesh, shards(stack)))

        param_stacks = {} if params is None else stacks(params)
        new_updates, new_state, labels = {}, {}, _labels(updates)
        for shape, grads in stacks(updates).items():
            label = labels[shape]
            new_updates[shape], new_state[label] = each(grads, state[key][label], param_stacks.get(shape), extra)
            new_updates[shape] = constrain(new_updates[shape], mesh, shards(grads))
        return _unstack(new_updates, updates), {key: new_state}

    return optax.GradientTransformationExtraArgs(init, update)


def moved(layout: Layout, optimizer: Any) -> list[tuple[Any, float]]:
    """The avals of all that is sent for `whole_matrices` in `optimizer`, and the share of each that a device sends.

    Read from the trace of the optimizer's update; of one step.
    """
    state = layout.state
    traced = trace(
        lambda value, *args: update_stored(layout, optimizer, *fetch(args), value=value),
        jax.ShapeDtypeStruct((), jnp.float32), state.params, state.opt_state, state.params)
    share = 1 - 1 / layout.num_shards
    sent: list[tuple[Any, float]] = []
    for eqn in all_eqns(traced.jaxpr):
        if primitive_of(eqn) != SHARD_MAP or MATRICES_SCOPE not in scope_of(eqn):
            continue
        body = call_jaxpr(eqn).jaxpr
        used = {var for inner in body.eqns for var in variables(inner.invars)}
        operands = [(outer.aval, inner in used) for outer, inner in zip(eqn.invars, body.invars, strict=True)]
        if in_specs(eqn)[0] == P():
            sent += [(aval, share) for aval, is_used in operands if is_used]
        else:  # operands: gradients, state, parameters; results: updates, state. The owner's state is not sent.
            arrays = (operands[0], *operands[len(eqn.outvars):], (eqn.outvars[0].aval, True))
            sent += [(aval, share / layout.num_shards) for aval, is_used in arrays if is_used]
    return sent


def _stacks(tree: Any, parts: int, lay: Callable[[jax.Array], jax.Array] = lambda stack: stack) -> dict[str, jax.Array]:
    """Shape -> all matrices of that shape, (number, D, F), padded with zeros to a multiple of `parts`."""
    matrices: dict[str, list[jax.Array]] = {}
    for name, leaf in named_leaves(tree):
        if leaf.ndim < 2:
            raise UsageError(
                f"whole_matrices got {name or 'a leaf'} of shape {leaf.shape}, which is no matrix: give it to another "
                "optimizer with optax.partition.")
        matrices.setdefault(_shape(leaf), []).append(leaf.reshape(-1, *leaf.shape[-2:]))

    def stack(leaves: list[jax.Array]) -> jax.Array:
        missing = -sum(map(len, leaves)) % parts
        return lay(jnp.concatenate([*leaves, jnp.zeros((missing, *leaves[0].shape[1:]), leaves[0].dtype)]))

    return {shape: stack(leaves) for shape, leaves in matrices.items()}


def _unstack(stacks: dict[str, jax.Array], like: Any) -> Any:
    """The inverse of `_stacks`: a tree of the shapes of `like`."""
    next_index = dict.fromkeys(stacks, 0)

    def take(leaf: jax.Array) -> jax.Array:
        shape, start = _shape(leaf), next_index[_shape(leaf)]
        next_index[shape] += math.prod(leaf.shape[:-2])
        return stacks[shape][start : next_index[shape]].reshape(leaf.shape)

    return jax.tree.map(take, like)


def _labels(tree: Any) -> dict[str, str]:
    """Shape -> the name of its stack's state, which begins with the number of matrices: 3x16x24 for 3 of 16 x 24."""
    numbers: dict[str, int] = {}
    for leaf in jax.tree.leaves(tree):
        numbers[_shape(leaf)] = numbers.get(_shape(leaf), 0) + math.prod(leaf.shape[:-2])
    return {shape: f"{number}x{shape}" for shape, number in numbers.items()}


def _shape(leaf: jax.Array) -> str:
    return "x".join(map(str, leaf.shape[-2:]))
