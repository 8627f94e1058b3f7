"""ZeRO for JAX: any Flax model at any stage; matches single-device training."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_jax.auditing.audit import Audit, audit
    from zero_jax.checkpoint.checkpoint import Checkpoints, Restored
    from zero_jax.contract.verify import ContractError
    from zero_jax.diloco.step import DiLoCoStep, make_diloco_step
    from zero_jax.distributed.initialize import initialize
    from zero_jax.errors import CheckpointError, DamagedCheckpointError, ReplicaError, UsageError
    from zero_jax.frontends.lora import lora
    from zero_jax.frontends.model_functions import remat
    from zero_jax.interop.deepspeed import DeepSpeedOptions, from_deepspeed
    from zero_jax.interop.lora_files import export_lora, export_merged, import_lora, merge_lora
    from zero_jax.interop.naming import Names
    from zero_jax.interop.params_io import export_params, import_params, init_from_file
    from zero_jax.interop.programs import export_programs
    from zero_jax.layout.layout import Layout
    from zero_jax.offload.offload import Offload
    from zero_jax.optim.narrow_moments import narrow_moments
    from zero_jax.optim.whole_matrices import whole_matrices
    from zero_jax.planning.offload_choice import OffloadChoice
    from zero_jax.planning.placement import choose_offload
    from zero_jax.planning.plan import plan
    from zero_jax.precision import LossScale, Precision
    from zero_jax.sharding.mesh import make_mesh, simulate_devices
    from zero_jax.sharding.tensor_rules import TensorRule
    from zero_jax.state import ZeroState
    from zero_jax.step.attention import Attention, attention
    from zero_jax.step.chunked_loss import chunked_next_token_loss
    from zero_jax.step.disk.step import DiskTrainStep
    from zero_jax.step.guard import BadStepError, Guard
    from zero_jax.step.losses import dpo_loss, next_token_loss, response_log_probs
    from zero_jax.step.make import make_zero_train_step
    from zero_jax.step.metrics import Metric
    from zero_jax.step.options import Communication, Parallelism
    from zero_jax.step.step import ZeroTrainStep
    from zero_jax.transforms.remat import Remat

__all__ = [
    "Attention",
    "Audit",
    "BadStepError",
    "CheckpointError",
    "Checkpoints",
    "Communication",
    "ContractError",
    "DamagedCheckpointError",
    "DeepSpeedOptions",
    "DiLoCoStep",
    "DiskTrainStep",
    "Guard",
    "Layout",
    "LossScale",
    "Metric",
    "Names",
    "Offload",
    "OffloadChoice",
    "Parallelism",
    "Precision",
    "Remat",
    "ReplicaError",
    "Restored",
    "TensorRule",
    "UsageError",
    "ZeroState",
    "ZeroTrainStep",
    "attention",
    "audit",
    "choose_offload",
    "chunked_next_token_loss",
    "dpo_loss",
    "export_lora",
    "export_merged",
    "export_params",
    "export_programs",
    "from_deepspeed",
    "import_lora",
    "import_params",
    "init_from_file",
    "initialize",
    "lora",
    "make_diloco_step",
    "make_mesh",
    "make_zero_train_step",
    "merge_lora",
    "narrow_moments",
    "next_token_loss",
    "plan",
    "remat",
    "response_log_probs",
    "simulate_devices",
    "whole_matrices",
]

# Names are imported when first asked for, so that the command line refuses bad input before JAX starts (PEP 562).
_NAMES = {
    "auditing.audit": ("Audit", "audit"),
    "checkpoint.checkpoint": ("Checkpoints", "Restored"),
    "contract.verify": ("ContractError",),
    "diloco.step": ("DiLoCoStep", "make_diloco_step"),
    "distributed.initialize": ("initialize",),
    "errors": ("CheckpointError", "DamagedCheckpointError", "ReplicaError", "UsageError"),
    "frontends.lora": ("lora",),
    "frontends.model_functions": ("remat",),
    "interop.deepspeed": ("DeepSpeedOptions", "from_deepspeed"),
    "interop.lora_files": ("export_lora", "export_merged", "import_lora", "merge_lora"),
    "interop.naming": ("Names",),
    "interop.params_io": ("export_params", "import_params", "init_from_file"),
    "interop.programs": ("export_programs",),
    "layout.layout": ("Layout",),
    "offload.offload": ("Offload",),
    "optim.narrow_moments": ("narrow_moments",),
    "optim.whole_matrices": ("whole_matrices",),
    "planning.offload_choice": ("OffloadChoice",),
    "planning.placement": ("choose_offload",),
    "planning.plan": ("plan",),
    "precision": ("LossScale", "Precision"),
    "sharding.mesh": ("make_mesh", "simulate_devices"),
    "sharding.tensor_rules": ("TensorRule",),
    "state": ("ZeroState",),
    "step.attention": ("Attention", "attention"),
    "step.chunked_loss": ("chunked_next_token_loss",),
    "step.disk.step": ("DiskTrainStep",),
    "step.guard": ("BadStepError", "Guard"),
    "step.losses": ("dpo_loss", "next_token_loss", "response_log_probs"),
    "step.make": ("make_zero_train_step",),
    "step.metrics": ("Metric",),
    "step.options": ("Communication", "Parallelism"),
    "step.step": ("ZeroTrainStep",),
    "transforms.remat": ("Remat",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """The public name `name`, imported from its module at the first access."""
    if name == "__version__":
        return importlib.import_module("zero_jax.versions").installed_version("zero-jax")
    if name not in _MODULES:
        raise AttributeError(f"module 'zero_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"zero_jax.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, imported or not yet, and the attributes of the module."""
    return sorted({*globals(), *__all__})
