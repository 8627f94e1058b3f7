"""ZeRO for JAX: any Flax model, any stage, the numbers of one device."""

from zero_jax.layout import Layout
from zero_jax.mesh import make_mesh, simulate_devices
from zero_jax.precision import Precision
from zero_jax.state import ZeroState
from zero_jax.step import ZeroTrainStep, make_zero_train_step, next_token_loss

__all__ = [
    "Layout",
    "Precision",
    "ZeroState",
    "ZeroTrainStep",
    "make_mesh",
    "make_zero_train_step",
    "next_token_loss",
    "simulate_devices",
]
