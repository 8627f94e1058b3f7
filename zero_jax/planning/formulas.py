"""The paper's arithmetic of memory: bytes of model states, activations and buffers of a training step, by formula.

Plain numbers in, plain numbers out; no model and no JAX. Bytes are per device. Model states alone are a lower bound of
a device's memory: the largest models that ran had 0.82 of the parameters that fit by formula (Table 2).
Source: arXiv 1910.02054, sections 3, 5, 6 and 7, unless another is named.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from zero_jax.errors import UsageError
from zero_jax.stages import stage_of

# Which column of the stage table divides a component by the data-parallel degree.
SPLIT_BY = {
    "weights": "shards_params",
    "gradients": "shards_gradients",
    "accumulator": "shards_optimizer",
    "master": "shards_optimizer",
    "momentum": "shards_optimizer",
    "variance": "shards_optimizer",
}
UPDATE = ("gradients", "accumulator", "master", "momentum", "variance")  # in host memory if the update runs there


@dataclass(frozen=True)
class ByteCounts:
    """Bytes per parameter of each model state under one system's mixed-precision Adam.

    accumulator: extra copies of the gradients for the update, sharded as the optimizer states are.
    absent_at_3: the component that stage 3 does not store.
    gathered: bytes that stage 3 adds for each parameter of the largest layer.
    """

    weights: float
    gradients: float
    accumulator: float
    master: float
    momentum: float
    variance: float
    absent_at_3: str = ""
    gathered: float = 0

    def coefficients(self, stage: int) -> dict[str, tuple[float, bool]]:
        """Component -> (bytes per parameter, whether they are divided by the data-parallel degree)."""
        row = stage_of(stage)
        return {name: (0 if row.shards_params and name == self.absent_at_3 else getattr(self, name),
                       getattr(row, column))
                for name, column in SPLIT_BY.items()}


PAPER = ByteCounts(2, 2, 0, 4, 4, 4)  # section 3.1: K = 12
# Its estimators: 2 + 18/N at stage 2, 18/N + 4 x largest layer at stage 3; its older documents say 4 + 16/N.
DEEPSPEED = ByteCounts(2, 2, 4, 4, 4, 4, absent_at_3="gradients", gathered=4)
# Megatron's distributed optimizer is stage 1: 4 + 16/N, 6 + 12/N (gradients in fp32) and 8 + 8/N.
MEGATRON_FP16 = ByteCounts(2, 2, 4, 4, 4, 4)
MEGATRON_BF16 = ByteCounts(2, 4, 0, 4, 4, 4)
MEGATRON_FP32 = ByteCounts(4, 4, 0, 0, 4, 4)
# This library's state: gradients exist inside the step alone, and stage 3 stores only the master weights.
ZERO_JAX = ByteCounts(2, 0, 0, 4, 4, 4, absent_at_3="weights")
ZERO_JAX_FP32 = ByteCounts(4, 0, 0, 0, 4, 4)


def model_state_bytes(
    counts: ByteCounts, stage: int, num_params: float, *, data: int, model: int = 1, largest_layer: float = 0,
    host: Collection[str] = ()
) -> dict[str, float]:
    """Bytes of each model state on a device (sections 5.1 to 5.3, Table 1); their sum is the device's.

    data, model: the data- and the model-parallel degree. largest_layer: parameters of the largest layer, of a
    device's part. host: components in host memory, which count 0 here (DeepSpeed's offload is `UPDATE`).
    """
    _check_degrees(data=data, model=model)
    if unknown := set(host) - set(SPLIT_BY):
        raise UsageError(f"host={sorted(unknown)} are not model states: give some of {', '.join(SPLIT_BY)}.")
    sizes = {name: 0.0 if name in host else size * num_params / model / (data if split else 1)
             for name, (size, split) in counts.coefficients(stage).items()}
    return sizes | {"gathered": counts.gathered * largest_layer if stage_of(stage).shards_params else 0.0}


def activation_elements(layers: int, hidden: int, batch: int, length: int) -> float:
    """All activations of a transformer, in elements (section 3.2, footnotes)."""
    return 12 * hidden * batch * length * layers


def checkpoint_elements(layers: int, hidden: int, batch: int, length: int, *, model: int = 1) -> float:
    """One checkpoint per layer, in elements per device; P_a divides it by the model-parallel degree (section 6.1)."""
    _check_degrees(model=model)
    return hidden * batch * length * layers / model


def sqrt_checkpoint_elements(layers: int, hidden: int, batch: int, length: int) -> float:
    """A checkpoint at every sqrt(layers) layers and the activations of as many, recomputed at once; in elements."""
    depth = math.sqrt(layers)
    return depth * (checkpoint_elements(1, hidden, batch, length) + activation_elements(1, hidden, batch, length))


def activation_bytes_exact(
    layers: int, hidden: int, heads: int, batch: int, length: int, *, model: int = 1, split_sequence: bool = False
) -> float:
    """Bytes per device of all fp16 activations, attention scores among them, nothing recomputed.

    `split_sequence`: sequence parallelism splits what tensor parallelism over `model` devices leaves replicated.
    Source: Korthikanti et al. 2022 (arXiv 2205.05198), equations 1, 2 and 4.
    """
    _check_degrees(model=model)
    scores = 5 * heads * length / hidden
    replicated = 10 / model if split_sequence else 10
    return length * batch * hidden * layers * (replicated + (24 + scores) / model)


def fused_buffer_bytes(num_params: float, *, limit: float = math.inf) -> float:
    """An fp32 buffer of all gradients (section 3.2); C_B's does not grow beyond `limit` bytes (section 6.2)."""
    return min(4 * num_params, limit)


def _check_degrees(**degrees: int) -> None:
    for name, degree in degrees.items():
        if degree < 1:
            raise UsageError(f"{name}={degree} is not a number of devices: give 1 or more.")


def palm_flops(num_params: float, layers: int, hidden: int, length: int) -> float:
    """FLOPs of a token, forward and backward: 6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B).

    >>> f"{palm_flops(540.35e9, 118, 18432, 2048) / 1e12:.2f} TFLOP"
    '3.30 TFLOP'
    """
    return 6.0 * num_params + 12.0 * layers * hidden * length
