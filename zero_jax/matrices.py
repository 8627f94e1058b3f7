"""Optimizers of whole matrices (Muon, Shampoo): which device holds a matrix while its update is computed."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.extend import core
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from zero_jax.choose import OWNED, choose_spec
from zero_jax.gather import constrain
from zero_jax.layout import Layout
from zero_jax.mesh import on_torus, zero_axes
from zero_jax.transform import takes_value
from zero_jax.tree import named_leaves

MATRICES_SCOPE = "zero_matrices"
"""In the op_name of every collective by which matrices become whole, and their updates return."""


def whole_matrices(inner: optax.GradientTransformation, mesh: Mesh, placement: Literal["owner", "gather"] = "owner", *,
                   axis: str | Sequence[str] | None = None) -> optax.GradientTransformationExtraArgs:
    """`inner` on whole matrices, each by itself, in a step whose gradients lie sharded.

    Left alone, the partitioner splits each product inside of `inner` and reduces each of their sums. Here matrices of
    equal shape are stacked, whether a leaf holds one, (D, F), or a loop's many, (L, D, F), and `inner` sees one at a
    time: what it computes over several (a global norm) belongs around this transform, and what it keeps counts
    for each matrix.

    - `owner`: each device has an equal share of every stack and computes only that; its optimizer state lies there
      and never moves. Gradients go there and updates come back: 2 psi/N on the wire, psi the matrices' elements.
      Stacks are filled up with zero matrices to a multiple of N, which cost their share of state and FLOPs.
    - `gather`: each device has every stack and computes all of it: psi for the gradients and psi for each moment,
      which lie sharded between steps, and N times the FLOPs.

    Args:
      inner: any optax transform that runs on a single matrix: `optax.contrib.muon(1e-2)`, say.
      mesh: that of the train step.
      placement: "owner" or "gather".
      axis: as for `make_zero_train_step`.

    Raises ValueError, when the state is made, for a leaf that is no matrix: `optax.partition` gives those to another.

    >>> import optax, zero_jax
    >>> mesh = zero_jax.make_mesh()
    >>> muon = zero_jax.whole_matrices(optax.contrib.muon(1e-2), mesh)
    >>> optimizer = optax.partition({True: muon, False: optax.adamw(1e-3)}, lambda params: jax.tree.map(
    ...     lambda leaf: leaf.ndim > 1, params))
    """
    if placement not in ("owner", "gather"):
        raise ValueError(f"placement={placement!r} is unknown: give 'owner' (each device computes its own matrices) or "
                         "'gather' (each computes all of them).")
    axes, run = zero_axes(mesh, axis), takes_value(inner)
    sizes = {name: mesh.shape[name] for name in axes}
    parts = math.prod(sizes.values()) if placement == "owner" else 1
    held = P(axes) if placement == "owner" else P()
    key = OWNED if placement == "owner" else MATRICES_SCOPE  # a gather of it may bear the name of the state alone

    def shards(stack: jax.Array) -> P:
        """As the matrices lie in storage, so that a stack is made, and taken apart, within each device."""
        return P(None, *choose_spec(stack.shape[1:], sizes, tiled=on_torus(mesh)))

    def init(params: Any) -> Any:
        labels = _labels(params)
        return {key: {labels[shape]: jax.vmap(inner.init)(stack) for shape, stack in _stacks(params, parts).items()}}

    @jax.named_scope(MATRICES_SCOPE)
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        each = jax.shard_map(
            jax.vmap(lambda grad, state, param, extra: run.update(grad, state, param, **extra), (0, 0, 0, None)),
            mesh=mesh, in_specs=(held, held, held, P()), out_specs=held, axis_names=set(axes), check_vma=False)
        whole = {} if params is None else _stacks(params, parts, lambda stack: constrain(stack, mesh, shards(stack)))
        new, kept, labels = {}, {}, _labels(updates)
        for shape, grads in _stacks(updates, parts, lambda stack: constrain(stack, mesh, shards(stack))).items():
            label = labels[shape]
            new[shape], kept[label] = each(grads, state[key][label], whole.get(shape), extra)
            new[shape] = constrain(new[shape], mesh, shards(grads))
        return _unstack(new, updates), {key: kept}

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class OwnedStack:
    """The state of `number` matrices that lies in a stack which is filled up to `stored`: its view in a checkpoint.

    What fills it up depends on the number of devices and no update comes of it: it takes the state of the last matrix.
    """

    number: int
    stored: tuple[int, ...]
    natural = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Without what fills it up."""
        return (self.number, *self.stored[1:])

    def load(self, value: Any) -> Any:
        """The state of the matrices; traceable."""
        return value[: self.number]

    def store(self, value: jax.Array) -> jax.Array:
        """As it lies in the stack; traceable."""
        last = jnp.broadcast_to(value[-1:], (self.stored[0] - self.number, *value.shape[1:]))
        return jnp.concatenate([value, last])


def owned_stack(name: str, stored: tuple[int, ...]) -> OwnedStack | None:
    """The view of the state's leaf `name` if it lies in a stack that is filled up."""
    _, owned, rest = name.partition(f"/{OWNED}/")
    number = int(rest.split("x")[0]) if owned else 0
    return OwnedStack(number, stored) if owned and number < stored[0] else None


def moved(layout: Layout, optimizer: Any) -> list[tuple[Any, float]]:
    """The avals of all that travels for `whole_matrices` in `optimizer`, and the share that each device sends per step.

    Read from the trace of the optimizer's update.
    """
    state, found = layout.state, []
    traced = jax.make_jaxpr(lambda grads, state, params, value: layout.update(
        optimizer, grads, state, params, value=value))(
            state.params, state.opt_state, state.params, jax.ShapeDtypeStruct((), jnp.float32))
    share = 1 - 1 / layout.num_shards
    for eqn in _equations(traced.jaxpr):
        if eqn.primitive.name != "shard_map" or MATRICES_SCOPE not in str(eqn.source_info.name_stack):
            continue
        body = eqn.params["jaxpr"]
        read = {var for inner in body.eqns for var in inner.invars if not isinstance(var, core.Literal)}
        given = [(outer.aval, inner in read) for outer, inner in zip(eqn.invars, body.invars, strict=True)]
        if eqn.params["in_specs"][0] == P():
            found += [(value, share) for value, is_read in given if is_read]
        else:  # gradients, state and parameters go in, updates and state come out: its owner keeps the state
            travel = (given[0], *given[len(eqn.outvars):], (eqn.outvars[0].aval, True))
            found += [(value, share / layout.num_shards) for value, is_read in travel if is_read]
    return found


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def _stacks(tree: Any, parts: int, lay: Callable[[jax.Array], jax.Array] = lambda stack: stack) -> dict[str, jax.Array]:
    """Shape -> all matrices of that shape, (number, D, F), with zeros up to a multiple of `parts`."""
    found: dict[str, list[jax.Array]] = {}
    for name, leaf in named_leaves(tree):
        if leaf.ndim < 2:
            raise ValueError(
                f"whole_matrices got {name or 'a leaf'} of shape {leaf.shape}, which is no matrix: give it to another "
                "optimizer with optax.partition.")
        found.setdefault(_shape(leaf), []).append(leaf.reshape(-1, *leaf.shape[-2:]))

    def stack(leaves: list[jax.Array]) -> jax.Array:
        missing = -sum(map(len, leaves)) % parts
        return lay(jnp.concatenate([*leaves, jnp.zeros((missing, *leaves[0].shape[1:]), leaves[0].dtype)]))

    return {shape: stack(leaves) for shape, leaves in found.items()}


def _unstack(stacks: dict[str, jax.Array], like: Any) -> Any:
    taken = dict.fromkeys(stacks, 0)

    def take(leaf: jax.Array) -> jax.Array:
        shape, start = _shape(leaf), taken[_shape(leaf)]
        taken[shape] += math.prod(leaf.shape[:-2])
        return stacks[shape][start : taken[shape]].reshape(leaf.shape)

    return jax.tree.map(take, like)


def _labels(tree: Any) -> dict[str, str]:
    """Shape -> the name of its stack's state, which begins with the number of matrices: 3x16x24 for 3 of 16 x 24."""
    numbers: dict[str, int] = {}
    for leaf in jax.tree.leaves(tree):
        numbers[_shape(leaf)] = numbers.get(_shape(leaf), 0) + math.prod(leaf.shape[:-2])
    return {shape: f"{number}x{shape}" for shape, number in numbers.items()}


def _shape(leaf: jax.Array) -> str:
    return "x".join(map(str, leaf.shape[-2:]))
