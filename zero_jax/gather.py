"""The use of a stored parameter: cast on the shard, gather, and the reduce-scatter that is its transpose."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.mesh import TENSOR, on_torus
from zero_jax.view import View

GATHERED = "zero_gathered"
SECONDARY = "zero_secondary"
REDUCED = "zero_reduced"
SCATTER = "zero_scatter"
_SPLIT = "zero_tensor_"
GATHER_SCOPE = "zero_gather"
"""In the op_name of every collective that gathers parameters."""


@dataclasses.dataclass(frozen=True)
class Use:
    """How one parameter gets from its storage layout into the model, and its gradient back.

    stored: spec of the parameter where it is stored; reduced: spec of its gradient, None where reading does not reduce
    it. Entries are None, an axis name or a tuple of axis names (major first). dtype: what the model reads; reduce: what
    the gradient is reduced in. view: of which shape it is, and in which both are stored.
    """

    mesh: Mesh
    stored: P
    reduced: P | None
    dtype: Any
    reduce: Any
    view: View
    secondary: tuple[str, ...] = ()

    def drop_dim(self, index: int) -> "Use":
        """This use inside a loop or map over dim `index`, where the array has one dim less."""
        return self._edit(lambda spec: P(*spec[:index], *spec[index + 1:]), self.view.drop_dim(index))

    def add_dim(self, index: int) -> "Use":
        """The inverse of `drop_dim`."""
        return self._edit(lambda spec: P(*spec[:index], None, *spec[index:]), self.view.add_dim(index))

    def _edit(self, edit: Any, view: View) -> "Use":
        reduced = None if self.reduced is None else edit(self.reduced)
        return dataclasses.replace(self, stored=edit(self.stored), reduced=reduced, view=view)

    def gather(self, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The stored array (as a carrier of gradients, the array as the model reads it): the arguments of `read`.

        The second is cast on the shard, then gathered, and has no derivative. Gradients of several readings
        meet at the carrier, in the dtype in which they are reduced.
        """
        return _carrier(value, self), _gather(_gather_secondary(value, self) if self.secondary else value, self)

    def read(self, carrier: jax.Array, gathered: jax.Array) -> jax.Array:
        """`gathered`, as a function of `carrier`: its transpose reduces and scatters the gradient of this reading."""
        return _read(carrier, gathered, self)


def split_dim(eqn: core.JaxprEqn) -> int | None:
    """The dim that `tensor` splits of the parameter that `eqn` reads; None where it reads none, or a whole one."""
    if eqn.primitive is not primitives.custom_vjp_call_p:
        return None
    names = [inner.params["name"] for inner in eqn.params["call_jaxpr"].jaxpr.eqns if inner.primitive.name == "name"]
    return next((int(name.removeprefix(_SPLIT)) for name in names if name.startswith(_SPLIT)), None)


def constrain(value: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`value` laid out by `spec`, under jit."""
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def between(spec: P, mesh: Mesh, last: Sequence[str] = ()) -> list[P]:
    """The layouts from `spec` to `used(spec)`, one mesh axis less each time, the minor-most first and those of `last`.

    A TPU gathers along one axis of its torus after another; where there is no torus all axes of a dim go at once.
    """
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    specs = [spec]
    for axis in sorted(reversed(mesh.axis_names), key=lambda axis: axis in last):
        dim = next((dim for dim, entry in enumerate(entries) if axis in entry), None)
        if axis != TENSOR and dim is not None:
            gone = {axis} if on_torus(mesh) else {
                name for name in entries[dim] if name != TENSOR and (name in last) == (axis in last)}
            entries[dim] = tuple(name for name in entries[dim] if name not in gone)
            specs.append(P(*[None if not e else e[0] if len(e) == 1 else e for e in entries]))
    return specs


def used(spec: P) -> P:
    """How a parameter that is stored as `spec` says lies where the model reads it: split over `tensor` alone."""
    return P(*[TENSOR if entry == TENSOR or isinstance(entry, tuple) and TENSOR in entry else None for entry in spec])


def gather(value: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`value`, which lies as `spec` says, as it is used: whole on every device, or split over `tensor` alone."""
    with jax.named_scope(GATHER_SCOPE):
        for step in between(spec, mesh):
            value = constrain(value, mesh, step)
    return value


def _secondary(use: Use) -> P:
    """How what the other axes gathered lies over the secondary ones, and over `tensor`."""
    kept = {TENSOR, *use.secondary}
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in use.stored]
    return P(*[tuple(name for name in entry if name in kept) or None for entry in entries])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_secondary(value: jax.Array, use: Use) -> jax.Array:
    value, target = constrain(value, use.mesh, use.stored).astype(use.dtype), _secondary(use)
    with jax.named_scope(GATHER_SCOPE):
        for step in between(use.stored, use.mesh, use.secondary):
            if set(names_of(step)) >= set(names_of(target)):
                value = constrain(value, use.mesh, step)
    return checkpoint_name(value, SECONDARY)


def names_of(spec: P) -> list[str]:
    """The mesh axes of a spec, the major first."""
    return [name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(value: jax.Array, use: Use) -> jax.Array:
    # The first constraint matters: under jax.checkpoint the residual passes an optimization barrier, and without it
    # sharding propagation gathers before the barrier, so that forward and backward share one gather and the whole
    # weight stays alive between them. The second keeps the cast on the shard: the wire carries use.dtype.
    spec = _secondary(use) if use.secondary else use.stored
    value = constrain(value, use.mesh, spec).astype(use.dtype)
    value = use.view.load(gather(value, use.mesh, spec))
    if use.view.merges:  # XLA:GPU cannot tile a product that takes a slice of a merged weight as its operand
        value = jax.lax.optimization_barrier(value)
    return checkpoint_name(value, GATHERED)


_gather.defvjp(lambda value, use: (_gather(value, use), value), lambda use, value, _: (jnp.zeros_like(value),))
_gather_secondary.defvjp(
    lambda value, use: (_gather_secondary(value, use), jnp.zeros((0,), value.dtype)),
    lambda use, like, cotangent: (jnp.zeros(cotangent.shape, like.dtype),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _carrier(value: jax.Array, use: Use) -> jax.Array:
    # Nothing reads its value. It bears the name so that backward does not keep it either.
    return checkpoint_name(value.astype(use.reduce), GATHERED)


_carrier.defvjp(
    lambda value, use: (_carrier(value, use), jnp.zeros((0,), value.dtype)),
    lambda use, like, gradient: (gradient.astype(like.dtype),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _read(carrier: jax.Array, gathered: jax.Array, use: Use) -> jax.Array:
    for dim, entry in enumerate(used(use.stored)):
        if entry == TENSOR:
            gathered = checkpoint_name(gathered, f"{_SPLIT}{dim}")
    return checkpoint_name(gathered, GATHERED)


def _read_backward(use: Use, _: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Whole first: a partial sum, which the next constraint turns into a reduce-scatter. Without it the target layout
    # propagates into what computes the gradient: a dot becomes a ring that sends 1.29 times the bytes (v5e), and an
    # embedding's updates, as large as the batch, are exchanged instead of its gradient.
    reduced = checkpoint_name(gradient.astype(use.reduce), REDUCED)
    stored = use.view.store(reduced) if use.reduced is None else _scatter(reduced, use)
    return stored, jnp.zeros_like(gradient)


def _scatter(gradient: jax.Array, use: Use) -> jax.Array:
    """The gradient stored and laid out as it is reduced: one call, which `partial.scatter_parts` finds by its name."""
    spec: Any = use.reduced

    def zero_scatter(value: jax.Array) -> jax.Array:
        value = use.view.store(value)
        for step in reversed(between(spec, use.mesh, use.secondary)):
            value = constrain(value, use.mesh, step)
        return value

    return jax.jit(zero_scatter, out_shardings=NamedSharding(use.mesh, spec))(gradient)


_read.defvjp(lambda carrier, gathered, use: (_read(carrier, gathered, use), None), _read_backward)
