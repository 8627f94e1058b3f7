"""The platform of a mesh's devices, by which the library decides what a step does; simulated ones may have another's.

XLA's options (`xla.overlap`, `xla.host_copies`) are of the devices themselves, for which a program is compiled.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from zero_jax.xla.targets import Target

GPU = "gpu", "cuda"
"""How JAX names the platform of a GPU: "gpu" where it is live, "cuda" where it is described by a target topology."""

SPARSE_CORES = {"TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU v6e": "v6e"}
"""Kinds of devices whose SparseCores send when their compiler is asked, and their usual names.

Libraries know two names of each: target topologies have the first, and a live device may have either.
"""

WITHIN_PRODUCTS = ("TPU v5 lite", "TPU v5e")
"""Both names of the kind whose compiler sends reductions within matrix products when asked."""

ENGINES_SINCE = 0, 11, 2
"""The first version of JAX whose XLA:GPU copies the right rows by copy engines (0.10.2 does not)."""

_simulated: Target | None = None


def is_gpu(device: jax.Device) -> bool:
    """Whether `device` is one of XLA:GPU, live or described."""
    return device.platform in GPU


@dataclasses.dataclass(frozen=True)
class Platform:
    """What a step is built for: decided once for a mesh, by `MeshAxes.of`.

    Attributes:
        name: "cpu", "gpu" or "tpu".
        kind: `jax.Device.device_kind`.
        torus: of simulated TPUs, how many chips there are along each dim, and devices on a chip; empty: devices know
            their place.
        is_simulated: whether the devices are a CPU's, which `simulate_devices(platform=...)` gave these decisions.
    """

    name: str
    kind: str
    torus: tuple[int, ...] = ()
    is_simulated: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return self.name == "gpu"

    @property
    def is_tpu(self) -> bool:
        """Whether the devices are TPUs: collectives run along one mesh axis after another, and arrays have tiles."""
        return self.name == "tpu"

    @property
    def has_sparse_cores(self) -> bool:
        """Whether SparseCores gather whole weights and those of layers, where overlap is asked for."""
        return self.kind in SPARSE_CORES

    @property
    def sends_within_products(self) -> bool:
        """Whether what is asked for is sent within matrix products, on their core: on v5e."""
        return self.kind in WITHIN_PRODUCTS

    @property
    def has_copy_engines(self) -> bool:
        """Whether slices of host memory in loops can be copied by copy engines, beside compute."""
        return self.is_gpu and (self.is_simulated or jax.__version_info__ >= ENGINES_SINCE)

    @property
    def copies_both_ways(self) -> bool:
        """Whether an update is to read one block while it writes another: by copy engines; and as they do, on CPUs.

        XLA:TPU moves copies of one iteration of a loop beside those of another by itself.
        """
        return self.has_copy_engines or self.name == "cpu"

    def coords(self, device: Any) -> tuple[int, ...]:
        """The place of a TPU in its torus."""
        return tuple(map(int, np.unravel_index(device.id, self.torus)))[:-1] if self.torus else tuple(device.coords)


def simulate(target: Target | None) -> None:
    """From here on CPU devices have the decisions of those of `target`; None: their own."""
    global _simulated
    _simulated = target


def platform_of(device: jax.Device) -> Platform:
    """The platform of `device`, live, described or simulated."""
    if device.platform == "cpu" and _simulated is not None:
        chip, dims = _simulated.chip, _simulated.dims
        torus = (*dims, chip.tpu.devices_per_chip) if chip.tpu else ()
        return Platform("tpu" if chip.tpu else "gpu", chip.kind or chip.name, torus, is_simulated=True)
    return Platform("gpu" if is_gpu(device) else device.platform, device.device_kind)
