"""In which dtype parameters are stored, used and their gradients reduced."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax import combinations
from zero_jax.arguments import is_number, is_one_of, patterns, shown, whole
from zero_jax.errors import UsageError
from zero_jax.typing import Pattern


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale (Micikevicius et al. 2018): small gradients survive fp16, overflows are skipped.

    The loss is multiplied by the scale before it is differentiated. A gradient that is not finite is skipped and
    divides the scale by `factor`; `interval` finite ones in a row multiply it.
    """

    initial: float = 2.0**15
    factor: float = 2.0
    interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        if not all(map(is_number, (self.initial, self.factor, self.smallest, self.largest))):
            raise UsageError(f"{shown(self)}: give finite numbers.")
        whole("LossScale: interval", self.interval, 1)
        if not 0 < self.smallest <= self.initial <= self.largest:
            raise UsageError(f"{self}: give 0 < smallest <= initial <= largest.")
        if self.factor <= 1:
            raise UsageError(f"{self}: give a factor above 1.")


@dataclass(frozen=True)
class Precision:
    """A mixed-precision policy; None leaves a dtype as it is.

    params: stored parameters (the master weights) and the optimizer's moments; None: as the model declares.
    compute: parameters as the model reads them and what `cast_batch` says. The cast happens on the shard, so
        that all-gathers are in this dtype. None: as stored. Activations follow from Flax's own promotion of these two,
        and from a module's own `dtype` where it has one.
    reduce: the dtype in which gradients are reduced. None: the one in which the model reads the parameter.
    keep: patterns (`re.search` in a parameter's name, as `blocks/norm/scale`) of parameters that the model reads in
        the dtype in which they are stored.
    loss_scale: for a compute dtype of few exponents, float16.
    cast_batch: what else is cast to `compute`: "inputs", the floating arguments of the model's call, so that targets
        and weights keep their dtype; True, all floating leaves of the batch; False, nothing.
    rounding: "stochastic": the update is computed in float32, and parameters and the optimizer's state rounded to the
        dtype in which they are stored at random, up or down, so that on average small updates are not lost.
    fp8: whose products have float8 operands, forward and backward, scaled by the smallest power of two with which an
        array fits: a whole weight, and what a device has of an activation or its gradient. Weights, gathered as that,
        and activations are e4m3, gradients of activations e5m2. True: matrices of the blocks, which are stacked for a
        loop or named alike but for numbers; patterns (`re.search`): these matrices. `compute`: bfloat16 or float32.
    """

    params: Any = None
    compute: Any = None
    reduce: Any = None
    keep: tuple[str, ...] = ()
    loss_scale: LossScale | None = None
    rounding: str = "nearest"
    cast_batch: bool | str = "inputs"
    fp8: bool | Pattern | tuple[Pattern, ...] = False

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
                raise UsageError(f"Precision({name}={dtype!r}): give a floating dtype such as jnp.bfloat16, or None.")
            object.__setattr__(self, name, jnp.dtype(dtype))
        if not is_one_of(self.rounding, "nearest", "stochastic"):
            raise UsageError(f"Precision(rounding={shown(self.rounding)}): give \"nearest\" or \"stochastic\".")
        if self.rounding == "stochastic" and self.params != jnp.bfloat16:
            raise UsageError(f"Precision(params={self.params}, rounding=\"stochastic\"): only parameters stored in "
                             "bfloat16 are rounded so: give params=jnp.bfloat16.")
        if not is_one_of(self.cast_batch, "inputs", True, False):
            raise UsageError(f"Precision(cast_batch={shown(self.cast_batch)}): give \"inputs\", True or False.")
        keep = patterns("Precision: keep", self.keep, "(\"norm/scale\",)")
        if keep and self.compute is None:
            raise UsageError(f"Precision(keep={keep}) without compute: every parameter is read as it is stored.")
        object.__setattr__(self, "keep", keep)
        if not isinstance(self.fp8, bool):
            object.__setattr__(self, "fp8", patterns("Precision: fp8", self.fp8, "(\"mlp\", \"attention\")") or False)
        if self.fp8 and self.compute not in (jnp.bfloat16, jnp.float32):
            raise UsageError(f"Precision(fp8={shown(self.fp8)}, compute={self.compute}): float8 is rounded from and to "
                             "a dtype with the exponents of float32: give compute=jnp.bfloat16.")

    def read_dtype(self, name: str, stored: Any) -> Any:
        """The dtype in which the model reads the parameter `name`, which is stored as `stored`.

        Integers, booleans and complex numbers are read as they are stored: a floating dtype would change their values.
        """
        if self.compute is None or not jnp.issubdtype(stored, jnp.floating):
            return stored
        return stored if any(re.search(pattern, name) for pattern in self.keep) else self.compute

    def reduce_dtype(self, name: str, stored: Any) -> Any:
        """The dtype in which the gradient of that parameter is reduced."""
        return self.reduce if self.reduce is not None and jnp.issubdtype(stored, jnp.floating) else (
            self.read_dtype(name, stored))


def wide_dtype(stored: Any) -> Any:
    """That of averages and outer copies of a parameter: float32, or what is wider.

    A small step rounds away in fewer bits: in bfloat16 an average of decay 0.999 does not move at all.
    """
    return jnp.promote_types(stored, jnp.float32)


POLICIES = {
    "fp32": Precision(params=jnp.float32, compute=jnp.float32),
    "bf16": Precision(params=jnp.float32, compute=jnp.bfloat16),
    "fp16": Precision(params=jnp.float32, compute=jnp.float16, loss_scale=LossScale()),
    "bf16-fp8": Precision(params=jnp.float32, compute=jnp.bfloat16, fp8=True),
    "bf16-stochastic": Precision(params=jnp.bfloat16, compute=jnp.bfloat16, rounding="stochastic"),
}


def precision_of(policy: "Precision | str | None", *, platform: str) -> Precision:
    """A policy by name or as it is, for devices of JAX's `platform`; None keeps every dtype as the model declares it.

    Raises ValueError for a name that is unknown, for float64 without jax_enable_x64, and for float16 on a TPU.
    """
    if policy is not None and not isinstance(policy, Precision) and not (
            isinstance(policy, str) and policy in POLICIES):
        raise UsageError(f"precision={policy!r} is unknown: give one of {', '.join(POLICIES)}, or a Precision.")
    precision = policy if isinstance(policy, Precision) else Precision() if policy is None else POLICIES[policy]
    for name, dtype in (("params", precision.params), ("compute", precision.compute), ("reduce", precision.reduce)):
        if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise UsageError(f"Precision({name}={dtype}): JAX makes {jax.dtypes.canonicalize_dtype(dtype)} of it: set "
                             "jax_enable_x64, or give that.")
    is_float16 = jnp.float16 in (precision.params, precision.compute, precision.reduce)
    combinations.check({"float16": policy if is_float16 else None, "platform": platform})
    return precision
