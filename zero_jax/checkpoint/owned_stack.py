"""Optimizer state of `whole_matrices` as a checkpoint stores it: without padding, which depends on the mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.sharding.partition import OWNED


@dataclasses.dataclass(frozen=True)
class OwnedStack:
    """The state of `number` matrices, stored as a stack padded to shape `stored`: what `StoredShape` is for parameters.

    The padding depends on the number of devices and no update reads it: on restore it repeats the last matrix's state.
    """

    number: int
    stored: tuple[int, ...]
    is_identity = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the padding."""
        return (self.number, *self.stored[1:])

    def load(self, value: Any) -> Any:
        """The state of the matrices, of `shape`, from the stored stack; traceable."""
        return value[: self.number]

    def store(self, value: jax.Array) -> jax.Array:
        """The stack, of shape `stored`, from the state of the matrices; traceable."""
        last = jnp.broadcast_to(value[-1:], (self.stored[0] - self.number, *value.shape[1:]))
        return jnp.concatenate([value, last])


def owned_stack(name: str, stored: tuple[int, ...]) -> OwnedStack | None:
    """The `OwnedStack` of the state's leaf `name` of shape `stored`; None where the leaf is not a padded stack."""
    _, owned, rest = name.partition(f"/{OWNED}/")
    number = int(rest.split("x")[0]) if owned else 0
    return OwnedStack(number, stored) if owned and number < stored[0] else None
