"""`make_zero_train_step`: the public constructor of a step, whose arguments become `StepOptions` and `MeshAxes`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import optax
from jax.sharding import Mesh

from zero_jax import combinations
from zero_jax.arguments import patterns, texts
from zero_jax.errors import UsageError
from zero_jax.frontends.functional import Functional, of_variables
from zero_jax.frontends.given_values import own_values
from zero_jax.frontends.lora import LoraModel
from zero_jax.frontends.model_functions import to_model_functions
from zero_jax.gather.quantized.policy import Communication, communication_of
from zero_jax.layout.batch_layout import BatchRule
from zero_jax.offload.offload import Offload, offload_of
from zero_jax.optim.compatibility import takes_value, traced_once, with_safe_scatters
from zero_jax.precision import Precision, precision_of
from zero_jax.sharding.auto_axes import computing_on, sharding_errors_explained
from zero_jax.sharding.batch import Accumulation
from zero_jax.sharding.mesh import default_mesh
from zero_jax.sharding.mesh_axes import AxisRoles, MeshAxes
from zero_jax.sharding.tensor_rules import TensorRule, rules_of
from zero_jax.sharding.tiling import Tiling, tiling_of
from zero_jax.stages import stage_of
from zero_jax.step.call_checks import check_loss
from zero_jax.step.disk.step import DiskTrainStep
from zero_jax.step.functions import StepFunctions
from zero_jax.step.guard import Guard
from zero_jax.step.losses import next_token_loss, takes_key
from zero_jax.step.options import StepOptions
from zero_jax.step.step import ZeroTrainStep
from zero_jax.step.update import with_wide_numbers
from zero_jax.transforms.remat import Remat, remat_of
from zero_jax.typing import Loss, Pattern


def make_zero_train_step(
    model: Any = None,
    stage: int = 3,
    *,
    params: Any = None,
    variables: Any = None,
    optimizer: optax.GradientTransformation | None = None,
    loss: Loss | None = None,
    mesh: Mesh | None = None,
    axis: str | Sequence[str] | None = None,
    axis_roles: AxisRoles | None = None,
    precision: Precision | str | None = None,
    rng_streams: Sequence[str] = ("dropout",),
    accumulate: int = 1,
    reduce: str = "every",
    gather: str = "use",
    frozen: Pattern | Sequence[Pattern] = (),
    ema: float | None = None,
    guard: Guard | None = None,
    tensor_rules: Sequence[TensorRule | tuple[Any, ...]] = (),
    sequence_parallel: bool = False,
    remat: Remat | str | tuple[str, ...] | None = None,
    partition_activations: bool | str = False,
    hpz_axes: str | Sequence[str] = (),
    combine_bytes: int | None = None,
    overlap: bool | str | Mapping[str, Any] = "auto",
    prefetch: bool = False,
    batch_specs: Sequence[BatchRule] = (),
    communication: Communication | None = None,
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
      axis: the mesh axes that ZeRO shards over, major first. Default: `data`, or `data_0`, `data_1`, ...
      axis_roles: the names of the mesh's axes by role, where they are not `data`, `replica`, `context` and `tensor`:
        {"data": "fsdp", "tensor": "tp"}. `data` may have several, major first.
      precision: a policy's name ("fp32", "bf16", "fp16", "bf16-stochastic"), a `Precision`, or None: dtypes as the
        model declares them.
      rng_streams: Linen's RNG streams beside "params", given anew at each step; default: ("dropout",). NNX modules own
        theirs.
      accumulate: microbatches that a step's batch is split into, one after another: their activations need not be
        held together. The gradient is the mean over them, weighted by the loss's weight.
      reduce: "every" microbatch's gradient is reduced, and shards of it summed; or each device sums its own and they
        are reduced "once": the communication of one batch, and a whole gradient in float32 on each device.
      gather: at stage 3, parameters are gathered at each "use", twice in every microbatch, and dropped; or in the
        "forward" pass alone, where each is read, and kept for the backward pass: the bytes sent, and the memory within
        a step, of stage 2, with gathers beside compute. With `accumulate`, or once a "step", before the first
        microbatch, into a copy in the compute dtype that all of them read:
        whole on each device, or sharded over `hpz_axes`, among which microbatches then gather. Gradients are then
        rounded to the compute dtype after their reduction, as at stages 1 and 2. "auto": "step" where the state, the
        copy and the sums of gradients take at most half of the memory of a device of the mesh, if its kind is known;
        `step.layout(batch).describe()` tells.
      frozen: patterns (`re.search` in a parameter's name, as `blocks/attention/kernel`) of parameters that are not
        trained: no gradient, no optimizer state, and stored in the dtype in which the model reads them.
      ema: decay of a moving average of the parameters, sharded as the optimizer's state; None: no average.
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
      hpz_axes: at stage 3, the ZeRO axes inside a node: forward keeps what it gathered over the others, a copy of the
        weights sharded over these alone, from which backward gathers without leaving the node (hpZ of ZeRO++, arXiv
        2306.10209).
      combine_bytes: the largest buffer into which XLA may combine collectives (C_B); None: as it does by itself.
      overlap: on TPU v5p and v6e the SparseCores gather and reduce while the TensorCores compute; on v5e gradients are
        reduced within matrix products and elementwise work; on GPUs loops over layers gather for the next iteration,
        and reduce what the one before made. By options of XLA that `step.layout(batch).describe()` names, at a cost in
        memory and time to compile; at stages 1 and 2 weights are gathered in pieces. "auto": where there is more than
        one such device, and where XLA fails to compile the step with them it warns and does without; True: the same,
        but refused where nothing would change, and failing where XLA does; False: nowhere; a mapping, on TPUs and GPUs:
        these options of XLA besides, or in place of its own.
      prefetch: on TPU v5p and v6e at stage 3, each iteration of a loop over layers gathers the parameters of the next
      one
        while it computes, forward and backward, and gradients are reduced while the next iteration computes. It costs
        memory (some layers' weights) and time to compile. A model without a loop is refused.
      batch_specs: for leaves of the batch that are no examples (a graph's edges, a table, a key as uint32): pairs of a
        pattern (`re.search` in the leaf's name) and a `PartitionSpec` over axes of the mesh, or None for leaves that
        are whole on every device, as ("edges", P("data")). Scalars and typed keys need no rule. With `accumulate`
        every microbatch gets what is whole, and of a typed key one of its own; what a rule shards is refused.
      communication: quantised collectives (ZeRO++), as `zero_jax.Communication(weights="int8", gradients="int8")`; by
        default weights and gradients are sent in the dtypes of `precision`.
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
    axes = MeshAxes.of(default_mesh() if mesh is None else mesh, axis, axis_roles)
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
        combinations.check({"tiling": tiling, "lora": True})
    options = StepOptions(
        stage=zero_stage, precision=precision, accumulation=Accumulation(accumulate, reduce, gather), frozen=frozen,
        ema=ema, guard=guard, tensor_rules=rules_of(tensor_rules), sequence_parallel=sequence_parallel,
        remat=remat_of(remat), partition_activations=partition_activations,
        hpz_axes=texts("hpz_axes", hpz_axes, "(\"data_1\",)"), combine_bytes=combine_bytes,
        overlap=overlap, prefetch=prefetch, batch_specs=tuple(batch_specs),
        communication=communication_of(communication), offload=offload_of(offload),
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
