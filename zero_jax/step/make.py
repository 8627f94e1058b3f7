"""`make_zero_train_step`: the public constructor of a step, whose arguments become `StepOptions` and `MeshAxes`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import optax
from jax.sharding import Mesh

from zero_jax import combinations
from zero_jax.arguments import patterns, shown, texts
from zero_jax.errors import UsageError
from zero_jax.frontends.functional import Functional, of_variables
from zero_jax.frontends.given_values import own_values
from zero_jax.frontends.lora import LoraModel
from zero_jax.frontends.model_functions import to_model_functions
from zero_jax.offload.offload import Offload, offload_of
from zero_jax.optim.compatibility import takes_value, traced_once, with_safe_scatters
from zero_jax.precision import Precision, precision_of
from zero_jax.sharding.auto_axes import computing_on, sharding_errors_explained
from zero_jax.sharding.mesh import default_mesh
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.tiling import Tiling, tiling_of
from zero_jax.stages import stage_of
from zero_jax.step.call_checks import check_loss
from zero_jax.step.disk.step import DiskTrainStep
from zero_jax.step.functions import StepFunctions
from zero_jax.step.guard import Guard
from zero_jax.step.losses import next_token_loss, takes_key
from zero_jax.step.options import Communication, Parallelism, StepOptions
from zero_jax.step.step import ZeroTrainStep
from zero_jax.step.update import with_wide_numbers
from zero_jax.transforms.remat import Remat, remat_of
from zero_jax.typing import Loss, Pattern

Options = TypeVar("Options", Communication, Parallelism)


def make_zero_train_step(
    model: Any = None,
    stage: int = 3,
    *,
    params: Any = None,
    variables: Any = None,
    optimizer: optax.GradientTransformation | None = None,
    loss: Loss | None = None,
    mesh: Mesh | None = None,
    parallelism: Parallelism | None = None,
    precision: Precision | str | None = None,
    rng_streams: Sequence[str] = ("dropout",),
    accumulate: int = 1,
    communication: Communication | None = None,
    frozen: Pattern | Sequence[Pattern] = (),
    ema: float | None = None,
    guard: Guard | None = None,
    remat: Remat | str | tuple[str, ...] | None = None,
    partition_activations: bool | str = False,
    offload: Offload | str | None = None,
    tiling: Tiling | None = None,
) -> ZeroTrainStep:
    """A train step of any Flax model at a ZeRO stage; its numbers match single-device training.

    Args:
      model: a Linen module, an NNX module, or a function of `rngs: nnx.Rngs` that makes one (then its state
        is initialised sharded, where a constructed module has already been whole on one device). A bound Linen module,
        and a Flax model object with `module` and `params` (Hugging Face's), start from the values that they have. Any
        of these with adapters, as `zero_jax.lora` returns it.
      stage: 0 (data parallel), 1 (optimizer states sharded), 2 (and gradients), 3 (and parameters).
      params: in place of a model, the parameters of `loss(params, batch)`: any pytree of arrays (lists, dataclasses,
        the arrays of an Equinox module), of `jax.ShapeDtypeStruct`s (then `init` needs values), or a function of a key
        that makes one. Each is gathered where the loss uses it, in the body of a `lax.scan` over stacked layers too.
        The state has them as nested dicts by their names; `step.params(state)` returns the pytree. With adapters, as
        `zero_jax.lora(params, rank, targets)` returns them.
      variables: beside `params`, what a step hands on to the next and no gradient changes, as statistics of batches: a
        dict of arrays, or a function of a key that makes one. The loss is then `loss(params, variables, batch)`, and
        returns (what a loss returns, the new variables). They are `state.variables`.
      optimizer: any optax transform. Default: `optax.adamw(3e-4)`.
      loss: `loss(model, batch) -> scalar`, `(scalar, {name: metric})` or `(scalar, {name: metric}, weight)`, over the
        global batch; `weight`, the number of valid tokens say, is what the scalar is a mean over; a metric is an array
        or a `zero_jax.Metric`. `model` is a bound Linen module or the merged NNX module. Default: `next_token_loss`.
      mesh: Auto or Explicit axes (`jax.make_mesh`): a step computes on Auto ones, over the same devices. Default: the
        mesh of `jax.set_mesh` where there is one, or `make_mesh()`, all live devices on the axis `data`.
      parallelism: a `zero_jax.Parallelism`: the axes that ZeRO shards over, rules by which an axis `tensor` splits
        parameters, how leaves of the batch that are no examples are sharded; None: by the names of the mesh's axes.
      precision: a policy's name ("fp32", "bf16", "fp16", "bf16-fp8", "bf16-stochastic"), a `Precision`, or None:
        dtypes as the model declares them.
      rng_streams: Linen's RNG streams beside "params", given anew at each step; default: ("dropout",). NNX modules own
        theirs.
      accumulate: microbatches that a step's batch is split into, one after another: their activations need not be
        held together. The gradient is the mean over them, weighted by the loss's weight.
      communication: a `zero_jax.Communication`: when parameters are gathered and gradients reduced, hpZ, codes
        (ZeRO++), overlap; None: gathered at each use, reduced in every microbatch, in the dtypes of `precision`.
      frozen: patterns (`re.search` in a parameter's name, as `blocks/attention/kernel`) of parameters that are not
        trained: no gradient, no optimizer state, and stored in the dtype in which the model reads them.
      ema: decay of a moving average of the parameters, sharded as the optimizer's state; None: no average.
      guard: what to do about steps that are not finite or whose loss spikes; None: nothing is looked at, but for the
        overflows of a loss scale.
      remat: what each block of the model keeps for the backward pass: "full" (its input), "dots", names, or a `Remat`;
        None: as the model does.
      partition_activations: checkpoints are split over `tensor` (the paper's P_a); "cpu": and kept in the host's memory
        (P_a+cpu; also without that axis).
      offload: "optimizer" stores the optimizer's states, the moving average, and the fp32 master copy of bf16 weights,
        in host memory (ZeRO-Offload, arXiv 2101.06840); "parameters", at stage 3, also what the model reads, whose
        layers come up one after another (ZeRO-Infinity, arXiv 2104.07857); "gradients" also those of stacked layers,
        which go down as they are made; an `Offload` says what and where. The update runs on the device and streams them
        through a bounded buffer: the same numbers. None: all in device memory.
        `zero_jax.choose_offload(...).offload` is the one of least predicted time that fits.
      tiling: at stage 3, weights whose gathered copy is too large are gathered, multiplied, and their gradients
        reduced in tiles (memory-centric tiling, arXiv 2104.07857): {pattern: number of tiles}, as
        {"mlp/up/kernel": 16}; or a number of bytes, above which a gathered copy is made in as many tiles as bring it
        below. A weight that is named must be used by one matrix product alone.

    Raises ValueError for anything that is not as described, with what to do about it.
    """
    if (model is None) == (params is None) or params is not None and loss is None:
        raise UsageError("make_zero_train_step: give a Flax model; or params, a pytree of arrays, and loss, a function "
                         "of such a pytree and a batch, as in make_zero_train_step(params=params, loss=loss, stage=3).")
    if variables is not None and params is None:
        raise UsageError("make_zero_train_step: variables= is for a loss of params=, and a Flax model has its own.")
    if params is not None:
        check_loss(loss, "loss(params, batch)" if variables is None else "loss(params, variables, batch)")
        model = (dataclasses.replace(params, model=Functional(params.model, variables))
                 if isinstance(params, LoraModel) else Functional(params, variables))
        loss = loss if variables is None else of_variables(loss, takes_key(loss))
    rng_streams = texts("rng_streams", rng_streams, "(\"dropout\",)")
    zero_stage = stage_of(stage)
    parallelism = _of("parallelism", parallelism, Parallelism, "tensor_rules=[(\"up/kernel\", P(None, \"tensor\"))]")
    communication = _of("communication", communication, Communication, "weights=\"int8\"")
    axes = MeshAxes.of(default_mesh() if mesh is None else mesh, parallelism.axis, parallelism.axis_roles)
    optimizer = optax.adamw(3e-4) if optimizer is None else optimizer
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise UsageError(
            f"optimizer={optimizer!r} is a {type(optimizer).__name__}, not an optax transform: give optax.adamw(1e-3), "
            "say.")
    precision = precision_of(precision, platform=axes.platform)
    frozen = patterns("frozen", frozen, "(\"embed\", \"norm\")")
    base = model
    if isinstance(model, LoraModel):
        base, frozen = model.model, (*frozen, model.frozen)
        combinations.check({"tiling": tiling, "fp8": precision.fp8, "lora": True})
    options = StepOptions(
        zero_stage, precision, accumulate, communication, parallelism, frozen=frozen, ema=ema, guard=guard,
        remat=remat_of(remat), partition_activations=partition_activations, offload=offload_of(offload),
        tiling=tiling_of(tiling))
    loss = next_token_loss if loss is None else loss
    check_loss(loss)
    with computing_on(axes.mesh), sharding_errors_explained():
        model_functions = to_model_functions(model, rng_streams, precision)
    kind = ZeroTrainStep if options.offload is None or options.offload.disk is None else DiskTrainStep
    optimizer = takes_value(optimizer)
    if precision.rounding == "stochastic":
        optimizer = with_wide_numbers(optimizer)
    if axes.platform == "cpu":
        optimizer = with_safe_scatters(optimizer)
    functions = StepFunctions(model_functions, traced_once(optimizer), loss, axes, options)
    return kind(functions, base.values if isinstance(base, Functional) else own_values(base))


def _of(name: str, value: Any, kind: type[Options], example: str) -> Options:
    """The argument `name`, a `kind`; its defaults where it is None."""
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"{name}={shown(value)} is a {type(value).__name__}: give zero_jax.{kind.__name__}("
                         f"{example}), say, or None.")
    return value or kind()
