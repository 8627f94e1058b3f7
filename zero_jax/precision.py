"""In which dtype parameters are stored, used and their gradients reduced."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Precision:
    """A mixed-precision policy; None leaves a dtype as it is found.

    params: stored parameters, the optimizer's view of them and its moments; None: as the model declares.
    compute: parameters as the model reads them and floating leaves of the batch; the cast happens on the
        shard, so that this dtype crosses the wire. None: as stored. Activations follow from Flax's own
        promotion of these two, and from a module's own `dtype` where it has one.
    reduce: gradients on the wire. None: the dtype in which the model reads the parameter.
    """

    params: Any = None
    compute: Any = None
    reduce: Any = None

    def __post_init__(self) -> None:
        for name in ("params", "compute", "reduce"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            try:
                floating = jnp.issubdtype(dtype, jnp.floating)
            except TypeError:
                floating = False
            if not floating:
                raise ValueError(f"Precision({name}={dtype!r}): give a floating dtype such as jnp.bfloat16, or None.")
            object.__setattr__(self, name, jnp.dtype(dtype))


POLICIES = {
    "fp32": Precision(params=jnp.float32, compute=jnp.float32),
    "bf16": Precision(params=jnp.float32, compute=jnp.bfloat16),
}


def precision_of(policy: "Precision | str | None") -> Precision:
    """A policy by name or as it is; None keeps every dtype as the model declares it."""
    if policy is None:
        return Precision()
    if isinstance(policy, Precision):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"precision={policy!r} is unknown: give one of {', '.join(POLICIES)}, or a Precision.")
    return POLICIES[policy]
