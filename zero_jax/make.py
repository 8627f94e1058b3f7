"""make_zero_train_step: what a user may say of a step, and what becomes of it."""

from collections.abc import Sequence
from typing import Any

import optax
from jax.sharding import Mesh

from zero_jax.batch import Accumulation
from zero_jax.blocks import Remat
from zero_jax.functional import functional
from zero_jax.guard import Guard
from zero_jax.losses import Loss, next_token_loss
from zero_jax.mesh import make_mesh, zero_axes
from zero_jax.precision import Precision, precision_of
from zero_jax.stages import stage_of
from zero_jax.step import ZeroTrainStep
from zero_jax.tensor import TensorRule
from zero_jax.transform import takes_value
from zero_jax.zero_r import ZeroR


def make_zero_train_step(
    model: Any,
    stage: int,
    *,
    optimizer: optax.GradientTransformation | None = None,
    loss: Loss | None = None,
    mesh: Mesh | None = None,
    axis: str | Sequence[str] | None = None,
    precision: Precision | str | None = None,
    streams: Sequence[str] = ("dropout",),
    accumulate: int = 1,
    reduce: str = "every",
    frozen: str | Sequence[str] = (),
    ema: float | None = None,
    guard: Guard | None = None,
    tensor_rules: Sequence[TensorRule | tuple[Any, ...]] = (),
    sequence_parallel: bool = False,
    remat: Remat | str | tuple[str, ...] | None = None,
    partition_activations: bool | str = False,
    secondary: str | Sequence[str] = (),
    combine_bytes: int | None = None,
) -> ZeroTrainStep:
    """A train step of any Flax model at a ZeRO stage, with the numbers of one device.

    Args:
      model: a Linen module, an NNX module, or a function of `rngs: nnx.Rngs` that makes one (then its state
        is born sharded, where a constructed module has already been whole on one device).
      stage: 0 (data parallel), 1 (optimizer states sharded), 2 (and gradients), 3 (and parameters).
      optimizer: any optax transform. Default: `optax.adamw(3e-4)`.
      loss: `loss(model, batch) -> scalar`, `(scalar, {name: metric})` or `(scalar, {name: metric}, weight)`, over the
        global batch; `weight`, the number of valid tokens say, is what the scalar is a mean over. `model` is a bound
        Linen module or the merged NNX module. Default: `next_token_loss`.
      mesh: Default: `make_mesh()`, all live devices on the axis `data`.
      axis: the mesh axes that ZeRO shards over, major first. Default: `data`, or `data_0`, `data_1`, ...
      precision: a policy's name ("fp32", "bf16", "fp16", "bf16-stochastic"), a `Precision`, or None: dtypes as the
        model declares them.
      streams: Linen's RNG streams beside "params", given anew at each step. NNX modules own theirs.
      accumulate: microbatches that a step's batch is split into, one after another: their activations need not be
        held together. The gradient is the mean over them, weighted by the loss's weight.
      reduce: "every" microbatch's gradient is reduced, and shards of it summed; or each device sums its own and they
        are reduced "once": the wire of one batch, and a whole gradient in float32 on each device. Then each device's
        rows are a microbatch of their own, in batch statistics too.
      frozen: patterns (`re.search` in a parameter's name, as `blocks/attention/kernel`) of parameters that are not
        trained: no gradient, no optimizer state, and stored in the dtype in which the model reads them.
      ema: decay of a moving average of the parameters, laid out as the optimizer's state; None: no average.
      guard: what to do about steps that are not finite or whose loss spikes; None: nothing is looked at, but for the
        overflows of a loss scale.
      tensor_rules: with an axis `tensor` of the mesh: pairs of a pattern and a spec of a parameter's last dims, as
        ("up/kernel", P(None, "tensor")), or `TensorRule`s; the first that matches splits a parameter. The model's own
        partitioning metadata (Linen's `with_partitioning`, NNX's) count as well where they name that axis.
      sequence_parallel: what lies between the products that `tensor` splits (norms, dropout, the residual stream) is
        split over it along the sequence, the second dim.
      remat: what each block of the model keeps for the backward pass: "full" (its input), "dots", names, or a `Remat`;
        None: as the model does.
      partition_activations: checkpoints are split over `tensor` (the paper's P_a); "cpu": and kept in the host's memory
        (P_a+cpu; also without that axis).
      secondary: at stage 3, the ZeRO axes inside a node: forward keeps what it gathered over the others, a copy of the
        weights divided over these alone, from which backward gathers without leaving the node (ZeRO++'s hpZ).
      combine_bytes: the largest buffer into which XLA may combine collectives (C_B); None: as it does by itself.

    Raises ValueError for anything that is not as described, with what to do about it.
    """
    row = stage_of(stage)
    mesh = make_mesh() if mesh is None else mesh
    axes = zero_axes(mesh, axis)
    optimizer = optax.adamw(3e-4) if optimizer is None else optimizer
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ValueError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}, not an optax transform: give optax.adamw(1e-3), "
            "say.")
    return ZeroTrainStep(
        functional(model, streams), row, takes_value(optimizer), loss or next_token_loss, mesh, axes,
        precision_of(precision, platform=mesh.devices.flat[0].platform), Accumulation(accumulate, reduce),
        (frozen,) if isinstance(frozen, str) else tuple(frozen), ema, guard,
        ZeroR(tuple(tensor_rules), sequence_parallel, remat, partition_activations,
              (secondary,) if isinstance(secondary, str) else tuple(secondary), combine_bytes))
