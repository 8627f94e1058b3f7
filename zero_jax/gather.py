"""The use of a stored parameter: cast on the shard, gather, and the reduce-scatter that is its transpose."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

GATHERED = "zero_gathered"


@dataclasses.dataclass(frozen=True)
class Use:
    """How one parameter gets from its storage layout into the model, and its gradient back.

    stored: spec of the parameter where it is stored; reduced: spec of its gradient. Entries are None, an
    axis name or a tuple of axis names (major first). `dtype`: what the model reads; `reduce`: what the
    gradient is reduced in. Calling it maps the stored array to the one that the model reads.
    """

    mesh: Mesh
    stored: P
    reduced: P
    dtype: Any
    reduce: Any

    def drop_dim(self, index: int) -> "Use":
        """This use inside a loop or map over dim `index`, where the array has one dim less."""
        return self._edit(lambda spec: P(*spec[:index], *spec[index + 1:]))

    def add_dim(self, index: int) -> "Use":
        """The inverse of `drop_dim`."""
        return self._edit(lambda spec: P(*spec[:index], None, *spec[index:]))

    def _edit(self, edit: Any) -> "Use":
        return dataclasses.replace(self, stored=edit(self.stored), reduced=edit(self.reduced))

    def __call__(self, value: jax.Array) -> jax.Array:
        return checkpoint_name(_use(value, self), GATHERED)


def constrain(value: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`value` laid out by `spec`, under jit."""
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def between(spec: P) -> list[P]:
    """The layouts from `spec` to whole, one mesh axis less each time and the minor-most first.

    >>> between(P(None, ("x", "y")))
    [PartitionSpec(None, ('x', 'y')), PartitionSpec(None, 'x'), PartitionSpec(None, None)]
    """
    specs = [spec]
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    while any(entries):
        last = max(dim for dim, entry in enumerate(entries) if entry)
        entries[last] = entries[last][:-1]
        specs.append(P(*[None if not e else e[0] if len(e) == 1 else e for e in entries]))
    return specs


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _use(value: jax.Array, use: Use) -> jax.Array:
    # The first constraint matters: under jax.checkpoint the residual passes an optimization barrier, and without it
    # sharding propagation gathers before the barrier, so that forward and backward share one gather and the whole
    # weight stays alive between them. The second keeps the cast on the shard: the wire carries use.dtype.
    value = constrain(value, use.mesh, use.stored).astype(use.dtype)
    for spec in between(use.stored):
        value = constrain(value, use.mesh, spec)
    return value


def _use_forward(value: jax.Array, use: Use) -> tuple[jax.Array, jax.Array]:
    return _use(value, use), jnp.zeros((0,), value.dtype)


def _use_backward(use: Use, like: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    gradient = gradient.astype(use.reduce)
    # Whole first: a partial sum, which the next constraint turns into a reduce-scatter. Without it the target layout
    # propagates into what computes the gradient, and an embedding's updates are exchanged instead of its gradient.
    for spec in reversed(between(use.reduced)):
        gradient = constrain(gradient, use.mesh, spec)
    return (gradient.astype(like.dtype),)


_use.defvjp(_use_forward, _use_backward)


def keep_all_but_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """A checkpoint policy: everything may be saved for the backward pass except what a `Use` gathered.

    The name alone is not enough: the `custom_vjp` beneath it is itself an equation whose output could be saved.
    """
    if prim.name == "name":
        return params["name"] != GATHERED
    if prim.name == "custom_vjp_call":
        return not any(eqn.primitive.name == "sharding_constraint" for eqn in params["call_jaxpr"].jaxpr.eqns)
    return True
