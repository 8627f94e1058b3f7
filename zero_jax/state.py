"""What a train step carries from one step to the next."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ZeroState:
    """The state of training: a pytree, so that it can be saved, mapped and donated.

    params: the parameters at full precision, a tree of dicts; sharded at stage 3, and at stages 1 and 2
        where `weights` holds what the model reads (then they are the paper's fp32 master copy).
    weights: the copy of `params` in the compute dtype that the model reads, replicated; None at stage 3
        and wherever the parameters are stored in the dtype they are used in.
    opt_state: the optimizer's state; sharded from stage 1 on.
    variables: what the model owns beside parameters (batch statistics, RNG streams, frozen variables).
    step: number of steps taken, int32 scalar.
    rng: the typed key from which each step's randomness is derived.
    """

    step: Any
    params: Any
    weights: Any
    opt_state: Any
    variables: Any
    rng: Any
