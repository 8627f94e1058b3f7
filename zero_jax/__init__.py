"""ZeRO for JAX: any Flax model, any stage, the numbers of one device."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_jax.blocks import Remat
    from zero_jax.checkpoint import Checkpoints, Restored
    from zero_jax.chunked import chunked_next_token_loss
    from zero_jax.cluster import initialize
    from zero_jax.contract import ContractError
    from zero_jax.functional import remat
    from zero_jax.guard import BadStepError, Guard, LossScale
    from zero_jax.interop import export_params, import_params
    from zero_jax.layout import Layout
    from zero_jax.losses import next_token_loss
    from zero_jax.make import make_zero_train_step
    from zero_jax.manifest import CheckpointError, DamagedCheckpointError
    from zero_jax.matrices import whole_matrices
    from zero_jax.mesh import make_mesh, simulate_devices
    from zero_jax.planner import plan
    from zero_jax.precision import Precision
    from zero_jax.state import ZeroState
    from zero_jax.step import ZeroTrainStep
    from zero_jax.tensor import TensorRule
    from zero_jax.tensor_names import Names

__all__ = [
    "BadStepError",
    "CheckpointError",
    "Checkpoints",
    "ContractError",
    "DamagedCheckpointError",
    "Guard",
    "Layout",
    "LossScale",
    "Names",
    "Precision",
    "Remat",
    "Restored",
    "TensorRule",
    "ZeroState",
    "ZeroTrainStep",
    "chunked_next_token_loss",
    "export_params",
    "import_params",
    "initialize",
    "make_mesh",
    "make_zero_train_step",
    "next_token_loss",
    "plan",
    "remat",
    "simulate_devices",
    "whole_matrices",
]

# Names are imported when first asked for, so that the command line refuses bad input before JAX starts (PEP 562).
_HOMES = {
    "BadStepError": "guard",
    "CheckpointError": "manifest",
    "Checkpoints": "checkpoint",
    "ContractError": "contract",
    "DamagedCheckpointError": "manifest",
    "Guard": "guard",
    "Layout": "layout",
    "LossScale": "guard",
    "Names": "tensor_names",
    "Precision": "precision",
    "Remat": "blocks",
    "Restored": "checkpoint",
    "TensorRule": "tensor",
    "ZeroState": "state",
    "ZeroTrainStep": "step",
    "chunked_next_token_loss": "chunked",
    "export_params": "interop",
    "import_params": "interop",
    "initialize": "cluster",
    "make_mesh": "mesh",
    "make_zero_train_step": "make",
    "next_token_loss": "losses",
    "plan": "planner",
    "remat": "functional",
    "simulate_devices": "mesh",
    "whole_matrices": "matrices",
}


def __getattr__(name: str) -> Any:
    """The public name `name`, imported from its module and kept."""
    if name not in _HOMES:
        raise AttributeError(f"module 'zero_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"zero_jax.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, imported or not yet, beside what the module holds."""
    return sorted({*globals(), *__all__})
