"""What a train step carries from one step to the next."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ZeroState:
    """The state of training: a pytree, so that it can be saved, mapped and donated.

    step: number of steps taken, int32 scalar; a step that is skipped is not taken.
    params: the parameters that are trained, at full precision, a tree of dicts; sharded at stage 3, and at stages 1
        and 2 where `weights` holds what the model reads (then they are the paper's fp32 master copy).
    weights: the copy of `params` in the compute dtype that the model reads, replicated; None at stage 3
        and wherever the parameters are stored in the dtype they are used in.
    frozen: the parameters that are not trained, in the dtype in which the model reads them; sharded at stage 3.
    opt_state: the optimizer's state; sharded from stage 1 on.
    variables: what the model owns beside parameters (batch statistics, RNG streams, frozen variables).
    ema: the moving average of `params`, laid out as the optimizer's moments; None without one.
    guard: what a step remembers of bad steps before it (`guard.GuardState`); None without loss scale and guard.
    rng: the typed key from which each step's randomness is derived.
    """

    step: Any
    params: Any
    weights: Any
    frozen: Any
    opt_state: Any
    variables: Any
    ema: Any
    guard: Any
    rng: Any


def typed_key(rng: Any) -> jax.Array:
    """`rng`, a JAX PRNG key of either kind, as a typed one; raises ValueError for anything else."""
    if not isinstance(rng, jax.Array):
        raise ValueError(f"rng={rng!r} is a {type(rng).__name__}, not a key: give jax.random.key(0), say.")
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng
    return jax.random.wrap_key_data(rng)
