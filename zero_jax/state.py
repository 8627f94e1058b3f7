"""The state that a train step takes and returns."""

import dataclasses

import jax
from jax.sharding import NamedSharding

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.tree import is_key, leaf_bytes
from zero_jax.typing import OptState, Params, PRNGKey, Pytree, Scalar, Variables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class ZeroState:
    """The state of training: a pytree, so that it can be saved, mapped and donated.

    step: number of steps taken, int32 scalar; a step that is skipped is not taken.
    params: the trainable parameters, at full precision, a tree of dicts; sharded at stage 3, and at stages 1 and 2
        where `weights` holds what the model reads (then they are the paper's fp32 master copy).
    weights: the copy of `params` in the compute dtype that the model reads, replicated; sharded at stage 3
        with master weights in host memory, else None there, and wherever the parameters are stored in the dtype they
        are used in.
    frozen: the other parameters, in the dtype in which the model reads them; sharded at stage 3.
    opt_state: the optimizer's state; sharded from stage 1 on.
    variables: what the model owns beside parameters (batch statistics, RNG streams, frozen variables).
    ema: the moving average of `params`, in float32 or what is wider, sharded as the optimizer's moments; None without
        one.
    guard: the count of bad steps and the loss scale (`guard.GuardState`); None without loss scale and guard.
    rng: the typed key from which each step's randomness is derived.
    disk: with `Offload(disk=...)` which generation of the files has the leaves that are `OnDisk` here, uint32 (2,).
    """

    step: Scalar
    params: Params
    weights: Params | None
    frozen: Params
    opt_state: OptState
    variables: Variables
    ema: Params | None
    guard: Pytree
    rng: PRNGKey
    disk: jax.Array | None = None

    def __repr__(self) -> str:
        leaves = [leaf for leaf in jax.tree.leaves(self) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
        mesh = next((dict(each.mesh.shape) for each in shardings if isinstance(each, NamedSharding)), None)
        device_bytes = sum(leaf_bytes(sharding.shard_shape(leaf.shape) if sharding else leaf.shape, leaf.dtype)
                           for leaf, sharding in zip(leaves, shardings, strict=True))
        elements = sum(leaf.size for leaf in jax.tree.leaves(self.params) if hasattr(leaf, "size"))
        return f"ZeroState(mesh={mesh}, stored_params={elements:,}, bytes_per_device={device_bytes:,})"


FROM_PARAMS = ("params", "weights", "frozen", "opt_state", "ema")
"""The fields of a state that hold the parameters, or follow from them."""


def state_key(rng: object) -> PRNGKey:
    """`rng` as `typed_key`, for a state: raises ValueError where it is not of JAX's default implementation."""
    key, default = typed_key(rng), jax.eval_shape(lambda: jax.random.key(0)).dtype
    if key.dtype != default:
        raise UsageError(f"rng is of {key.dtype}, and the keys of a step are of jax_default_prng_impl, {default}: say "
                         "jax.config.update(\"jax_default_prng_impl\", ...) before the step is made, or give "
                         "jax.random.key(0).")
    return key


def typed_key(rng: object) -> PRNGKey:
    """`rng`, a JAX PRNG key of either kind, as a typed one; raises ValueError for anything else."""
    if not isinstance(rng, jax.Array):
        raise UsageError(f"rng={shown(rng)} is a {type(rng).__name__}, not a key: give jax.random.key(0), say.")
    key = rng
    if not is_key(rng):
        try:
            key = jax.random.wrap_key_data(rng)
        except (TypeError, ValueError) as error:
            raise UsageError(f"rng is an array of dtype {rng.dtype} and shape {rng.shape}, not a key: give "
                             "jax.random.key(0), say.") from error
    if key.shape:
        raise UsageError(f"rng has shape {key.shape}, which is {key.size} keys: give one of them, as keys[0].")
    return key
