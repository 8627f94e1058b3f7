"""From a stored parameter to the one that the model reads: cast on the shard, gather; transposed, reduce-scatter."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.jaxpr.equations import JaxprEqn
from zero_jax.jaxpr.primitives import checkpoint_names
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.stored_shape import StoredShape

GATHERED = "zero_gathered"
"""The `checkpoint_name` of gathered parameters, and of what is computed from them alone."""
SECONDARY = "zero_secondary"
"""The `checkpoint_name` of what is gathered over all but the secondary axes, from which backward gathers (hpZ)."""
REDUCED = "zero_reduced"
"""The `checkpoint_name` of gradients that are to be reduced."""
SCATTER = "zero_scatter"
"""The name of the jitted call that reduces and scatters a gradient."""
_SPLIT = "zero_tensor_"
"""With a number, the `checkpoint_name` of a parameter whose dim of that number `tensor` splits."""
GATHER_SCOPE = "zero_gather"
"""In the op_name of every collective that gathers parameters."""


@dataclasses.dataclass(frozen=True)
class ParamUse:
    """How one parameter gets from its storage layout into the model, and its gradient back.

    stored: spec of the parameter as it is stored; reduced: spec of its gradient, None where a read does not reduce it.
    Entries are None, an axis name or a tuple of axis names (major first). dtype: that in which the model reads it;
    reduce: that in which the gradient is reduced. stored_shape: how it and its gradient are padded or merged.
    secondary: mesh axes over which backward gathers once more, from a copy that the others gathered (hpZ).
    """

    axes: MeshAxes
    stored: P
    reduced: P | None
    dtype: Any
    reduce: Any
    stored_shape: StoredShape
    secondary: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.axes.mesh

    def drop_dim(self, index: int) -> "ParamUse":
        """This use inside a loop or map over dim `index`, where the array has one dim less."""
        return self._edit(lambda spec: P(*spec[:index], *spec[index + 1:]), self.stored_shape.drop_dim(index))

    def add_dim(self, index: int) -> "ParamUse":
        """The inverse of `drop_dim`."""
        return self._edit(lambda spec: P(*spec[:index], None, *spec[index:]), self.stored_shape.add_dim(index))

    def _edit(self, edit: Any, stored_shape: StoredShape) -> "ParamUse":
        reduced = None if self.reduced is None else edit(self.reduced)
        return dataclasses.replace(self, stored=edit(self.stored), reduced=reduced, stored_shape=stored_shape)

    def gather(self, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the stored array, the arguments of `read`: a carrier of gradients, and the array as the model reads it.

        The second is cast on the shard, then gathered, and has no derivative. Gradients of several reads are added at
        the carrier, in the dtype in which they are reduced.
        """
        carrier: Any = value if value.dtype == self.reduce else _carrier(value, self)
        shard: Any = jax.lax.stop_gradient(value)
        two_hops = self.secondary and secondary_spec(self.stored, self.axes, self.secondary) != self.stored
        return carrier, _gather(_gather_secondary(shard, self) if two_hops else shard, self)

    def read(self, carrier: jax.Array, gathered: jax.Array) -> jax.Array:
        """`gathered`, as a function of `carrier`: its transpose reduces and scatters the gradient of this read."""
        return _read(carrier, gathered, self)


def split_dim(eqn: JaxprEqn) -> int | None:
    """The dim that `tensor` splits of the parameter that `eqn` reads; None where it reads none, or one not split."""
    return next((int(name.removeprefix(_SPLIT)) for name in checkpoint_names(eqn) if name.startswith(_SPLIT)), None)


def constrain(value: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`value` laid out by `spec`, under jit."""
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def gather_sequence(spec: P, axes: MeshAxes, last: Sequence[str] = ()) -> list[P]:
    """The specs from `spec` to `compute_spec(spec, axes)`, each with one mesh axis less, minor-most first, then `last`.

    A TPU gathers along one axis of its torus after another; where there is no torus, all axes of a dim go at once.
    """
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    specs = [spec]
    for axis in sorted(reversed(axes.mesh.axis_names), key=lambda axis: axis in last):
        dim = next((dim for dim, entry in enumerate(entries) if axis in entry), None)
        if axis != axes.tensor and dim is not None:
            gone = {axis} if axes.is_tpu else {
                name for name in entries[dim] if name != axes.tensor and (name in last) == (axis in last)}
            entries[dim] = tuple(name for name in entries[dim] if name not in gone)
            specs.append(P(*[None if not e else e[0] if len(e) == 1 else e for e in entries]))
    return specs


def compute_spec(spec: P, axes: MeshAxes) -> P:
    """The spec with which the model reads a parameter that is stored with `spec`: split over `tensor` alone."""
    return P(*[axes.tensor if axes.tensor in names_of(P(entry)) else None for entry in spec])


def gather(value: jax.Array, axes: MeshAxes, spec: P, target: P | None = None) -> jax.Array:
    """`value`, which is laid out by `spec`, as it is used: replicated, or split over `tensor` alone; or by `target`."""
    remaining = set() if target is None else set(names_of(target)) - {axes.tensor}
    with jax.named_scope(GATHER_SCOPE):
        for step in gather_sequence(spec, axes, tuple(remaining)):
            if set(names_of(step)) >= remaining:
                value = constrain(value, axes.mesh, step)
    return value


def secondary_spec(spec: P, axes: MeshAxes, secondary: Sequence[str]) -> P:
    """The spec of what is gathered from `spec` over all axes but the secondary ones and `tensor`."""
    remaining = {axes.tensor, *secondary}
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec]
    kept = [tuple(name for name in entry if name in remaining) for entry in entries]
    return P(*[None if not names else names[0] if len(names) == 1 else names for names in kept])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_secondary(value: jax.Array, use: ParamUse) -> jax.Array:
    value = constrain(value, use.mesh, use.stored).astype(use.dtype)
    target = secondary_spec(use.stored, use.axes, use.secondary)
    return checkpoint_name(gather(value, use.axes, use.stored, target), SECONDARY)


def names_of(spec: P) -> list[str]:
    """The mesh axes of a spec, the major first."""
    return [name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(value: jax.Array, use: ParamUse) -> jax.Array:
    # The first constraint matters: under jax.checkpoint the residual passes an optimization barrier, and without it
    # sharding propagation gathers before the barrier, so that forward and backward share one gather and the whole
    # weight stays alive between them. The second keeps the cast on the shard: what is sent is of use.dtype.
    spec = secondary_spec(use.stored, use.axes, use.secondary) if use.secondary else use.stored
    value = constrain(value, use.mesh, spec).astype(use.dtype)
    value = use.stored_shape.load(gather(value, use.axes, spec))
    if use.stored_shape.merges:  # XLA:GPU cannot tile a product that takes a slice of a merged weight as its operand
        value = jax.lax.optimization_barrier(value)
    return checkpoint_name(value, GATHERED)


# What these two gather has no derivative (`ParamUse.gather`), so that their rules never run. They are such calls for
# the passes and the checkpoint policy, which know a gather by its form.
_gather.defvjp(lambda value, use: (_gather(value, use), value), lambda use, value, _: (jnp.zeros_like(value),))
_gather_secondary.defvjp(
    lambda value, use: (_gather_secondary(value, use), jnp.zeros((0,), value.dtype)),
    lambda use, like, cotangent: (jnp.zeros(cotangent.shape, like.dtype),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _carrier(value: jax.Array, use: ParamUse) -> jax.Array:
    # Nothing reads its value. It is named so that backward does not save it either.
    return checkpoint_name(value.astype(use.reduce), GATHERED)


_carrier.defvjp(
    lambda value, use: (_carrier(value, use), jnp.zeros((0,), value.dtype)),
    lambda use, like, gradient: (gradient.astype(like.dtype),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _read(carrier: jax.Array, gathered: jax.Array, use: ParamUse) -> jax.Array:
    for dim, entry in enumerate(compute_spec(use.stored, use.axes)):
        if entry is not None:
            gathered = checkpoint_name(gathered, f"{_SPLIT}{dim}")
    return checkpoint_name(gathered, GATHERED)


def _read_backward(use: ParamUse, _: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Unsharded first: a partial sum, which the next constraint turns into a reduce-scatter. Else the target layout
    # propagates into what computes the gradient: a dot becomes a ring that sends 1.29 times the bytes (v5e), and an
    # embedding's updates, as large as the batch, are exchanged instead of its gradient.
    reduced = checkpoint_name(gradient.astype(use.reduce), REDUCED)
    stored = use.stored_shape.store(reduced) if use.reduced is None else _scatter(reduced, use)
    return stored, jnp.zeros_like(gradient)


def _scatter(gradient: jax.Array, use: ParamUse) -> jax.Array:
    """The gradient as it is stored, reduced and scattered: one call, which `transforms` find by its name `SCATTER`."""
    spec: Any = use.reduced

    def zero_scatter(value: jax.Array) -> jax.Array:
        value = use.stored_shape.store(value)
        for step in reversed(gather_sequence(spec, use.axes, use.secondary)):
            value = constrain(value, use.mesh, step)
        return value

    return jax.jit(zero_scatter, out_shardings=NamedSharding(use.mesh, spec))(gradient)


_read.defvjp(lambda carrier, gathered, use: (_read(carrier, gathered, use), None), _read_backward)
