"""`zero_jax.from_deepspeed`: a DeepSpeed config as the options of `make_zero_train_step`, and what each line became."""

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax

from zero_jax.errors import UsageError, few, named
from zero_jax.offload.offload import Offload
from zero_jax.precision import LossScale, Precision
from zero_jax.step.options import Communication

AUTO = "auto"
"""What transformers' Trainer fills in: such a value says nothing here."""
NOT_STEERED = "none: it steers allocation and order of an eager program; XLA allocates the whole step ahead of time"


@dataclasses.dataclass(frozen=True)
class DeepSpeedOptions:
    """What a DeepSpeed config becomes; `str` gives a line for each of its keys.

    Attributes:
        options: keyword arguments: `make_zero_train_step(model, **converted.options)`.
        became: key, as `zero_optimization.stage` -> what it is here, or why it has no equivalent.
        unknown: keys that DeepSpeed's documentation, as known here, does not have.
    """

    options: dict[str, Any]
    became: dict[str, str]
    unknown: tuple[str, ...]

    def __str__(self) -> str:
        width = max((len(key) for key in self.became), default=0)
        lines = [f"{key:{width}}  {text}" for key, text in self.became.items()]
        return "\n".join(lines + [f"unknown: {few(self.unknown, 10)}"] * bool(self.unknown))


def from_deepspeed(config: str | os.PathLike[str] | Mapping[str, Any]) -> DeepSpeedOptions:
    """The options of `make_zero_train_step` that a DeepSpeed config asks for, and what each of its lines became.

    Mesh, model, loss and batch are not in such a file. Raises UsageError for a file that is no JSON object, and for
    values that DeepSpeed refuses, too.

    Args:
        config: the path of a ds_config.json, or its content.
    """
    data = _read(config) if isinstance(config, str | os.PathLike) else config
    if not isinstance(data, Mapping):
        raise UsageError(f"a DeepSpeed config is a JSON object, and this is {named(type(data).__name__)}: give the "
                         "path of a ds_config.json, or a dictionary.")
    reader = _Reader(dict(_flat(data)))
    return DeepSpeedOptions(reader.options(), reader.became, tuple(reader.unknown))


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {named(os.fspath(path))}: give the path of a ds_config.json.") from error
    except ValueError as error:
        raise UsageError(f"{named(os.fspath(path))} is no JSON ({error}): mend it there.") from error


def _flat(data: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nested config as (dotted key, value); what is below a free-form section is one value."""
    for key, value in data.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and name not in _WHOLE_SECTIONS:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


_WHOLE_SECTIONS: Mapping[str, str] = {
    "tensorboard": "train --log-to tensorboard", "wandb": "train --log-to wandb",
    "csv_monitor": "train.jsonl of a run has each step", "comet": "none: train --log-to has tensorboard and wandb",
    "flops_profiler": "each line of a run has TFLOP/s, MFU and HFU", "comms_logger": "step.verify(batch) counts bytes",
    "aio": "none: files are read and written by threads of their own", "elasticity": "launch --restarts",
    "autotuning": "zero_jax.plan and choose_offload", "curriculum_learning": "none: batches are yours",
    "data_efficiency": "none: batches are yours", "sparse_attention": "none: attention is the model's",
    "compression_training": "none: the model is yours", "hybrid_engine": "none: one program trains",
    "checkpoint": "zero_jax.Checkpoints", "data_types": "Precision(reduce=...): sums of microbatches are float32",
    "pipeline": "none: there is no pipeline parallelism", "progressive_layer_drop": "none: the model is yours",
    "amp": "none: Apex; bf16 or fp16 is precision=", "moe": "none: experts are the model's",
    "eigenvalue": "none: the model is yours",
    "tensor_parallel": "an axis `tensor` of the mesh, with Parallelism(tensor_rules=)",
    "inference": "none: of serving", "compile": "none needed: the step is one compiled program",
}

_NOTED: Mapping[str, str] = {
    "train_batch_size": "rows of the batch that the step is given",
    "train_micro_batch_size_per_gpu": "rows / (devices x accumulate)",
    "steps_per_print": "train --log-every; a loop prints what it likes",
    "wall_clock_breakdown": "train --profile steps=10:15", "memory_breakdown": "zero_jax.plan reports memory",
    "dump_state": "print(converted)", "prescale_gradients": "none: the loss is a mean, and gradients its",
    "gradient_predivide_factor": "none: the loss is a mean, and gradients its",
    "sparse_gradients": "none: XLA has no sparse gradients", "disable_allgather": "none: XLA chooses collectives",
    "communication_data_type": "Precision(reduce=...)", "seed": "the key of step.init",
    "zero_allow_untested_optimizer": "none needed: any optax transform", "zero_force_ds_cpu_optimizer":
    "none: the update runs on the device", "graph_harvesting": "none needed: the step is one program",
    "dataloader_drop_last": "batches are yours", "use_data_before_expert_parallel": "none: axes of the mesh have names",
    "fp16.auto_cast": "Precision(cast_batch=\"inputs\") is the default",
    "fp16.hysteresis": "none: each overflow counts",
    "fp16.consecutive_hysteresis": "none: each overflow counts",
    "fp16.fp16_master_weights_and_grads": "none: master weights are fp32",
    "bf16.immediate_grad_update": "none: gradients are one program's",
    "bf16.check_grad_overflow": "guard=zero_jax.Guard()",
    "optimizer.legacy_fusion": NOT_STEERED,
    "zero_optimization.overlap_comm": "Communication(overlap=)",
    "zero_optimization.stage3_param_persistence_threshold": "none: small leaves are sharded where a dim divides",
    "zero_optimization.stage3_model_persistence_threshold": "none: small leaves are sharded where a dim divides",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "zero_jax.export_params",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero_jax.export_params",
    "zero_optimization.ignore_unused_parameters": "none needed: what is not read has a zero gradient",
    "zero_optimization.elastic_checkpoint": "a checkpoint is restored at any stage on any number of devices",
    "zero_optimization.load_from_fp32_weights": "checkpoints have master weights",
    "zero_optimization.cpu_offload": "offload=\"optimizer\"",
    "zero_optimization.mics_shard_size": "an axis `replica` of the mesh: zero_jax.make_mesh(replica=...)",
    "zero_optimization.mics_hierarchical_params_gather": "none: XLA chooses how it gathers",
    "zero_optimization.zero_quantized_nontrainable_weights": "Communication(weights=...) is of all weights",
    "zero_optimization.memory_efficient_linear": "remat=",
    "zero_optimization.zeropp_loco_param": "none: no error feedback",
    "activation_checkpointing.number_checkpoints": "remat= is of blocks of the model",
    "activation_checkpointing.synchronize_checkpoint_boundary": NOT_STEERED,
    "activation_checkpointing.contiguous_memory_optimization": NOT_STEERED,
    "activation_checkpointing.profile": "train --profile steps=10:15",
    **{f"zero_optimization.{key}": NOT_STEERED for key in (
        "contiguous_gradients", "reduce_scatter", "round_robin_gradients", "sub_group_size",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "allgather_partitions", "grad_hooks",
        "stage3_use_all_reduce_for_fetch_params", "use_multi_rank_bucket_allreduce", "legacy_stage1",
        "override_module_apply", "module_granularity_threshold", "pipeline_loading_checkpoint")},
    **{f"zero_optimization.{key}": ("Communication(combine_bytes=) is the largest buffer of XLA's combiner; without it "
                                    "XLA chooses")
       for key in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size",
                   "prefetch_bucket_size")},
    **{f"zero_optimization.{part}.{key}": NOT_STEERED
       for part in ("offload_optimizer", "offload_param") for key in (
        "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init",
        "pipeline")},
}


class _Reader:
    """One config: its values are taken out by key, and what is left is noted or unknown."""

    def __init__(self, values: dict[str, Any]):
        self.values = values
        self.became: dict[str, str] = {}
        self.unknown: list[str] = []

    def take(self, key: str, default: Any, became: str | Callable[[Any], str]) -> Any:
        """The value of `key`, with what it became; `default` where it is absent or "auto"."""
        value = self.values.pop(key, None)
        if value is None:
            return default
        if value == AUTO:
            self.became[key] = "\"auto\": what the Trainer fills in" + (
                f"; here {default}" if default is not None else "; nothing is given here")
            return default
        self.became[key] = became if isinstance(became, str) else became(value)
        return value

    def number(self, key: str, default: Any, became: str | Callable[[Any], str]) -> Any:
        """As `take`, of a number."""
        value = self.take(key, default, became)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UsageError(f"{key}={named(value)}: give a number.")
        return value

    def options(self) -> dict[str, Any]:
        """The keyword arguments."""
        stage = self.number("zero_optimization.stage", 0, lambda value: f"stage={value}")
        if stage not in (0, 1, 2, 3):
            raise UsageError(f"zero_optimization.stage={named(stage)}: give 0, 1, 2 or 3.")
        result: dict[str, Any] = {"stage": int(stage)}
        accumulate = self.number("gradient_accumulation_steps", 1, lambda value: f"accumulate={value}")
        if accumulate != 1:
            result["accumulate"] = int(accumulate)
        result |= {name: value for name, value in (
            ("precision", self.precision()), ("optimizer", self.optimizer()), ("offload", self.offload(int(stage))),
            ("communication", self.communication(int(stage)))) if value is not None}
        result |= self.checkpoints()
        self.rest()
        return result

    def precision(self) -> str | Precision | None:
        """fp32, bf16 or fp16 with its loss scale."""
        bf16 = self.take("bf16.enabled", False, lambda on: "precision=\"bf16\"" if on else "no precision")
        bf16 = self.take("bfloat16.enabled", bf16, "precision=\"bf16\"")
        pure = self.take("bf16.bf16_master_weights_and_grads", False, "precision=\"bf16-stochastic\"")
        pure = self.take("bf16.bf16_optimizer_states", False, "precision=\"bf16-stochastic\"") and pure
        fp16 = self.take("fp16.enabled", False, lambda on: "precision of fp16" if on else "no precision")
        scale = self.number("fp16.loss_scale", 0, lambda value: "LossScale, dynamic" if not value else (
            "LossScale(initial=...): a fixed scale has no equivalent, it starts there"))
        power = self.number("fp16.initial_scale_power", 16, lambda value: f"LossScale(initial=2.0**{value})")
        window = self.number("fp16.loss_scale_window", 1000, lambda value: f"LossScale(interval={value})")
        smallest = self.number("fp16.min_loss_scale", 1, lambda value: f"LossScale(smallest={value})")
        if bf16 and fp16:
            raise UsageError("bf16.enabled and fp16.enabled: give one of them.")
        if bf16:
            return "bf16-stochastic" if pure else "bf16"
        if not fp16:
            return None
        initial = min(max(float(scale or 2.0**power), float(smallest)), 2.0**24)
        return Precision(params=jnp.float32, compute=jnp.float16, loss_scale=LossScale(
            initial=initial, interval=int(window), smallest=max(float(smallest), 1e-6)))

    def optimizer(self) -> optax.GradientTransformation | None:
        """An optax transform with its schedule and clipping; None where the config has none, or leaves it to others."""
        kind = self.take("optimizer.type", None, lambda value: _OPTIMIZERS.get(str(value).lower(), (
            "none: give optimizer= an optax transform", None))[0])
        read = {name: self.number(f"optimizer.params.{name}", default, f"of optimizer=: {name}")
                for name, default in (("lr", 1e-3), ("eps", 1e-8), ("weight_decay", 0.0), ("momentum", 0.0))}
        betas = self.take("optimizer.params.betas", (0.9, 0.999), "of optimizer=: b1, b2")
        decoupled = self.take("optimizer.params.adam_w_mode", True, "optax.adamw, or weight decay before Adam")
        for name in ("torch_adam", "bias_correction", "fused", "amsgrad", "freeze_step", "cuda_aware",
                     "comm_backend_name", "max_coeff", "min_coeff", "max_grad_norm", "nesterov", "foreach"):
            self.take(f"optimizer.params.{name}", None, "none: of DeepSpeed's kernels; optax has its own")
        clip = self.number("gradient_clipping", 0.0, lambda value: f"optax.clip_by_global_norm({value})")
        rate = self.schedule(read["lr"])
        if kind is None:
            if clip:
                self.became["gradient_clipping"] = (f"optax.chain(optax.clip_by_global_norm({clip}), ...) of the "
                                                    "optimizer that you give: this config has none")
            return None
        build = _OPTIMIZERS.get(str(kind).lower(), ("", None))[1]
        if build is None:
            return None
        transform = build(rate, read | {"betas": tuple(betas), "decoupled": decoupled})
        return optax.chain(optax.clip_by_global_norm(float(clip)), transform) if clip else transform

    def schedule(self, rate: float) -> Any:
        """The learning rate: a number, or an optax schedule."""
        kind = self.take("scheduler.type", None, lambda value: f"a schedule of optax as the learning rate: {value}")
        if kind is None:
            for key in [key for key in self.values if key.startswith("scheduler.params.")]:
                self.take(key, None, "none: there is no scheduler.type")
            return rate
        read = {name: self.number(f"scheduler.params.{name}", default, f"of the schedule: {name}")
                for name, default in (
            ("warmup_min_lr", 0.0), ("warmup_max_lr", rate), ("warmup_num_steps", 1000), ("total_num_steps", None),
            ("warmup_min_ratio", 0.0), ("cos_min_ratio", 1e-4))}
        self.take("scheduler.params.warmup_type", None, "a linear rise: optax has no logarithmic one")
        self.take("scheduler.params.last_batch_iteration", None, "the state of the optimizer has the step")
        peak, warm = float(read["warmup_max_lr"]), max(int(read["warmup_num_steps"]), 1)
        total = read["total_num_steps"]
        rise = optax.linear_schedule(float(read["warmup_min_lr"]), peak, warm)
        if kind == "WarmupLR":
            return rise
        if kind in ("WarmupDecayLR", "WarmupCosineLR") and total is not None:
            left = max(int(total) - warm, 1)
            if kind == "WarmupDecayLR":
                return optax.join_schedules([rise, optax.linear_schedule(peak, 0.0, left)], [warm])
            rise = optax.linear_schedule(rate * read["warmup_min_ratio"], rate, warm)
            return optax.join_schedules([rise, optax.cosine_decay_schedule(rate, left, read["cos_min_ratio"])], [warm])
        why = "total_num_steps is not given" if total is None and kind.startswith("Warmup") else "it is not covered"
        self.became["scheduler.type"] = f"none: {kind}: {why}; give a schedule of optax as the learning rate"
        return rate

    def offload(self, stage: int) -> Offload | str | None:
        """Host memory or files for states and parameters."""
        places = {}
        for part in ("optimizer", "param"):
            key = f"zero_optimization.offload_{part}"
            value = self.take(f"{key}.device", "none", lambda place, part=part: _offload_text(part, place, stage))
            places[part] = "none" if value is None else value
            path = self.take(f"{key}.nvme_path", None, "Offload(disk=...)" if part == "optimizer" else (
                "none: parameters are in host memory"))
            if part == "optimizer":
                folder = path
        ratio = self.number("zero_optimization.offload_optimizer.ratio", 1.0,
                            lambda value: f"Offload(fraction={value})")
        if self.values.get("zero_optimization.cpu_offload") is True:
            places["optimizer"] = "cpu"
        if places["param"] in ("cpu", "nvme") and stage == 3:
            return Offload(parameters="host", fraction=ratio)
        if places["optimizer"] == "nvme":
            if folder is None:
                raise UsageError("zero_optimization.offload_optimizer.device=\"nvme\" has no nvme_path: give the "
                                 "folder.")
            return Offload(disk=folder)
        if places["optimizer"] == "cpu" and stage:
            return Offload(fraction=ratio)
        return None

    def communication(self, stage: int) -> Communication | None:
        """ZeRO++'s quantised weights and gradients and its hpZ, and whether anything is sent beside compute."""
        weights = self.take("zero_optimization.zero_quantized_weights", False,
                            "Communication(weights=\"int8\")" if stage == 3 else "none: weights are sent at stage 3")
        gradients = self.take("zero_optimization.zero_quantized_gradients", False, "Communication(gradients=\"int8\"); "
                              "(\"int8\", \"int4\") inside a node and across nodes, on a mesh that has both")
        options: dict[str, Any] = {}
        if weights and stage == 3:
            options["weights"] = "int8"
        if gradients:
            options["gradients"] = "int8"
        size = self.number("zero_optimization.zero_hpz_partition_size", 1, lambda value: (
            f"Communication(hpz_axes=(\"data_1\",)), with mesh=zero_jax.make_mesh((-1, {value}))"
            if value > 1 and stage == 3 else "none: no secondary partition"))
        if size > 1 and stage == 3:
            options["hpz_axes"] = ("data_1",)
        if self.values.get("zero_optimization.overlap_comm") is False:
            options["overlap"] = False
        return Communication(**options) if options else None

    def checkpoints(self) -> dict[str, Any]:
        """Checkpoints of activations."""
        cpu = self.take("activation_checkpointing.cpu_checkpointing", False, lambda on: (
            "remat=\"full\", partition_activations=\"cpu\"" if on else "no checkpoints on the host"))
        split = self.take("activation_checkpointing.partition_activations", False, lambda on: (
            "partition_activations=True, where the mesh has an axis `tensor`" if on else "no split checkpoints"))
        return {"remat": "full", "partition_activations": "cpu"} if cpu else {"remat": "full"} if split else {}

    def rest(self) -> None:
        """Notes what has no option of its own, and names what is unknown."""
        known = [*_NOTED, *_WHOLE_SECTIONS, *self.became]
        for key in self.values:
            if text := _NOTED.get(key) or _WHOLE_SECTIONS.get(key.partition(".")[0]):
                self.became[key] = text
            else:
                near = difflib.get_close_matches(key, known, n=1)
                self.unknown.append(key)
                self.became[key] = "unknown" + (f": is it {near[0]}?" if near else "")


def _offload_text(part: str, place: Any, stage: int) -> str:
    if place == "none":
        return "nothing is offloaded"
    if part == "param" and stage < 3:
        return "none: parameters are in shards at stage 3"
    if place == "cpu":
        return "offload=Offload()" if part == "optimizer" else "offload=Offload(parameters=\"host\")"
    if place == "nvme":
        return "offload=Offload(disk=nvme_path)" if part == "optimizer" else (
            "offload=Offload(parameters=\"host\"): parameters are in no files")
    raise UsageError(f"zero_optimization.offload_{part}.device={named(place)}: give \"none\", \"cpu\" or \"nvme\".")


def _adam(rate: Any, read: Mapping[str, Any]) -> optax.GradientTransformation:
    b1, b2 = read["betas"]
    if read["decoupled"]:
        return optax.adamw(rate, b1, b2, read["eps"], weight_decay=read["weight_decay"])
    return _decayed(read, optax.adam(rate, b1, b2, read["eps"]))


def _decayed(read: Mapping[str, Any], transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """`transform` of the gradient with weight decay in it."""
    return optax.chain(optax.add_decayed_weights(read["weight_decay"]), transform)


_LAMB = ("optimizer=optax.lamb", lambda rate, read: optax.lamb(
    rate, *read["betas"], eps=read["eps"], weight_decay=read["weight_decay"]))
_ONE_BIT = ("optimizer=optax.adamw; its 1-bit messages: Communication(gradients=\"int8\")", _adam)
_OPTIMIZERS: Mapping[str, tuple[str, Callable[..., optax.GradientTransformation]]] = {
    "adam": ("optimizer=optax.adamw, as adam_w_mode is by default", _adam), "adamw": ("optimizer=optax.adamw", _adam),
    "onebitadam": _ONE_BIT, "zerooneadam": _ONE_BIT, "lamb": _LAMB, "onebitlamb": _LAMB,
    "lion": ("optimizer=optax.lion", lambda rate, read: optax.lion(
        rate, *read["betas"], weight_decay=read["weight_decay"])),
    "sgd": ("optimizer=optax.sgd", lambda rate, read: _decayed(
        read, optax.sgd(rate, momentum=read["momentum"] or None))),
    "adagrad": ("optimizer=optax.adagrad", lambda rate, read: _decayed(read, optax.adagrad(rate, eps=read["eps"]))),
}
