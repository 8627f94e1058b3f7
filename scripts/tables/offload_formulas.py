"""The arithmetic of ZeRO-Offload and ZeRO-Infinity: what a model takes, where it fits, and what bandwidth that needs.

Plain numbers in, plain numbers out; no model and no JAX. Sizes in bytes, rates per second. Sources: arXiv 2104.07857
(ZeRO-Infinity), sections 3 and 4, with its equations' numbers; arXiv 2101.06840 (ZeRO-Offload).
"""

import math
from dataclasses import dataclass

STATE_BYTES = 20
"""Of a parameter with mixed-precision Adam: parameter and gradient in 16 bits, both, momentum and variance in 32."""


def transformer_params(layers: int, hidden: int) -> float:
    """Parameters of a transformer's blocks (equation 1)."""
    return 12.0 * layers * hidden**2


def model_state_bytes(layers: int, hidden: int) -> float:
    """All model states (equation 2)."""
    return STATE_BYTES * transformer_params(layers, hidden)


def checkpoint_bytes(layers: int, hidden: int, batch: int, length: int, *, interval: int = 1) -> float:
    """Activation checkpoints in 16 bits, one after every `interval` blocks (equation 3)."""
    return 2.0 * batch * length * hidden * layers / interval


def layer_state_bytes(hidden: int) -> float:
    """The largest product of a block, hidden x 4 hidden, and its gradient, in 16 bits (equation 4)."""
    return 4.0 * hidden * 4 * hidden


def layer_activation_bytes(hidden: int, heads: int, batch: int, length: int, *, interval: int = 1) -> float:
    """Activations between two checkpoints (equation 5)."""
    return float(batch * length * interval * (16 * hidden + 2 * heads * length))


def params_intensity(batch: int, length: int) -> float:
    """FLOPs of a device for each byte of parameters and gradients that it moves (section 4.1)."""
    return float(batch * length)


def optimizer_intensity(batch: int, length: int) -> float:
    """The same for optimizer states, which are read and written once a step."""
    return batch * length / 4


def checkpoints_intensity(hidden: int, *, interval: int = 1) -> float:
    """The same for activation checkpoints."""
    return 24.0 * hidden * interval


def efficiency(intensity: float, bandwidth: float, peak_flops: float) -> float:
    """The share of compute in a step that moves its data before or after it, and not beside it (equation 6)."""
    return intensity * bandwidth / (intensity * bandwidth + peak_flops)


def needed_bandwidth(intensity: float, share: float, peak_flops: float) -> float:
    """The bandwidth at which `efficiency` is `share`."""
    return share / (1 - share) * peak_flops / intensity


def largest_hidden(memory_bytes: float, *, tiles: int = 1) -> float:
    """The width whose largest product and its gradient take so many bytes, in so many tiles one after another."""
    return math.sqrt(memory_bytes * tiles / 16)


@dataclass(frozen=True)
class StateBytes:
    """Where a step stores the states of a parameter, which all devices share, in bytes of each kind of memory."""

    device: float
    host: float = 0
    disk: float = 0

    def largest_model(self, devices: int, *, device: float, host: float = 0, disk: float = 0) -> float:
        """Parameters whose states fit: a bound, which leaves nothing for activations; memory of each device."""
        pairs = ((self.device, device), (self.host, host), (self.disk, disk))
        return devices * min(memory / size for size, memory in pairs if size)


ZERO_JAX = {
    "no": StateBytes(16), "optimizer": StateBytes(4, host=12), "parameters": StateBytes(2, host=14),
    "disk": StateBytes(4, disk=24)}
"""This library's AdamW with bf16 at stage 3, by placement: fp32 master weights and two moments (12 bytes), the
gradient (4, in fp32, where nothing is offloaded, else 2, in bf16), and where the master weights are elsewhere a bf16
copy of them (2). Files hold two generations."""
