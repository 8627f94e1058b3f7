"""In which dtype parameters are stored, used and their gradients reduced."""

import re
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from zero_jax.guard import LossScale


@dataclass(frozen=True)
class Precision:
    """A mixed-precision policy; None leaves a dtype as it is found.

    params: stored parameters, the optimizer's view of them and its moments; None: as the model declares.
    compute: parameters as the model reads them and floating leaves of the batch; the cast happens on the
        shard, so that this dtype crosses the wire. None: as stored. Activations follow from Flax's own
        promotion of these two, and from a module's own `dtype` where it has one.
    reduce: gradients on the wire. None: the dtype in which the model reads the parameter.
    keep: patterns (`re.search` in a parameter's name, as `blocks/norm/scale`) of parameters that the model reads in
        the dtype in which they are stored.
    loss_scale: for a compute dtype of few exponents, float16.
    rounding: "stochastic": the update is computed in float32, and parameters and the optimizer's state rounded to the
        dtype in which they are stored at random, up or down, so that on average small updates are not lost.
    """

    params: Any = None
    compute: Any = None
    reduce: Any = None
    keep: tuple[str, ...] = ()
    loss_scale: LossScale | None = None
    rounding: str = "nearest"

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
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"Precision(rounding={self.rounding!r}): give \"nearest\" or \"stochastic\".")
        if self.rounding == "stochastic" and self.params != jnp.bfloat16:
            raise ValueError(f"Precision(params={self.params}, rounding=\"stochastic\"): only parameters stored in "
                             "bfloat16 are rounded so: give params=jnp.bfloat16.")
        keep = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        if keep and self.compute is None:
            raise ValueError(f"Precision(keep={keep}) without compute: every parameter is read as it is stored.")
        object.__setattr__(self, "keep", keep)

    def read_dtype(self, name: str, stored: Any) -> Any:
        """The dtype in which the model reads the parameter `name`, which is stored as `stored`."""
        kept = self.compute is None or any(re.search(pattern, name) for pattern in self.keep)
        return stored if kept else self.compute


POLICIES = {
    "fp32": Precision(params=jnp.float32, compute=jnp.float32),
    "bf16": Precision(params=jnp.float32, compute=jnp.bfloat16),
    "fp16": Precision(params=jnp.float32, compute=jnp.float16, loss_scale=LossScale()),
    "bf16-stochastic": Precision(params=jnp.bfloat16, compute=jnp.bfloat16, rounding="stochastic"),
}


def precision_of(policy: "Precision | str | None", *, platform: str) -> Precision:
    """A policy by name or as it is, for devices of JAX's `platform`; None keeps every dtype as the model declares it.

    Raises ValueError for a name that is unknown, and for float16 on a TPU.
    """
    if policy is not None and not isinstance(policy, Precision) and policy not in POLICIES:
        raise ValueError(f"precision={policy!r} is unknown: give one of {', '.join(POLICIES)}, or a Precision.")
    found = policy if isinstance(policy, Precision) else Precision() if policy is None else POLICIES[policy]
    if platform == "tpu" and jnp.float16 in (found.params, found.compute, found.reduce):
        raise ValueError(f"precision={policy!r}: a TPU has no float16, and would all-reduce gradients in it instead of "
                         "scattering them: give \"bf16\".")
    return found
