"""What `make_diloco_step` may be asked for, validated before anything is traced. Nothing here imports JAX by itself."""

import dataclasses
from typing import Any

from zero_jax import combinations
from zero_jax.arguments import is_number, shown, whole
from zero_jax.errors import UsageError

DTYPES = ("float32", "bfloat16")
"""In which outer gradients may be sent."""


@dataclasses.dataclass(frozen=True)
class OuterOptions:
    """The arguments of `make_diloco_step` of the same names; raises ValueError for what cannot take effect.

    mix: what remains of a slice's own parameters where an average that was sent behind a step arrives; 0 without
        `overlap`.
    """

    every: int
    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1
    overlap: bool = False
    mix: float | None = None
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        whole("every", self.every, 1)
        whole("fragments", self.fragments, 1)
        if not (is_number(self.learning_rate) and self.learning_rate > 0):
            raise UsageError(f"learning_rate={shown(self.learning_rate)}: give the outer optimizer's, a number above 0 "
                             "(0.7 in DiLoCo; 1 without momentum is the plain average of the slices).")
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise UsageError(f"momentum={shown(self.momentum)}: give the outer optimizer's, from 0 to below 1.")
        for name in ("nesterov", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={shown(getattr(self, name))}: give True or False.")
        if self.fragments > self.every:
            raise UsageError(f"fragments={self.fragments} with every={self.every}: each fragment is sent after a step "
                             f"of its own once in {self.every} steps: give at most {self.every} fragments.")
        combinations.check({"diloco.mix": self.mix, "diloco.overlap": self.overlap})
        if self.mix is not None and not (is_number(self.mix) and 0 <= self.mix < 1):
            raise UsageError(f"mix={shown(self.mix)}: give the share of a slice's own parameters that remains, from 0 "
                             "to below 1 (0.5 in streaming DiLoCo).")
        if not _is_known(self.dtype):
            raise UsageError(f"dtype={shown(self.dtype)}: outer gradients are sent as one of {', '.join(DTYPES)}.")

    @property
    def kept(self) -> float:
        """The share of a slice's own parameters that remains when an average arrives."""
        return 0.0 if not self.overlap else 0.5 if self.mix is None else self.mix


def _is_known(dtype: Any) -> bool:
    if isinstance(dtype, str):
        return dtype in DTYPES
    import jax.numpy as jnp  # the command line gives names, and is to refuse them before JAX starts

    return dtype in (jnp.float32, jnp.bfloat16)
