"""How JAX names the platform of a GPU: "gpu" where it is live, "cuda" where it is described by a target topology."""

import jax

GPU = "gpu", "cuda"


def is_gpu(device: jax.Device) -> bool:
    """Whether `device` is one of XLA:GPU, live or described."""
    return device.platform in GPU
