"""Which chip a live device is, by the name that its driver gives it, for its peak rate."""

from zero_jax.xla.targets import Chip, known_targets, target_of

TPU_KINDS = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}
"""`jax.Device.device_kind` of TPUs whose chip files have their other name."""


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip of devices whose `device_kind` is that; None for one without a file in zero_jax/xla/chips.

    The whole name has to be the same: "NVIDIA H100 PCIe" is another chip than "NVIDIA H100 80GB HBM3".
    """
    name = TPU_KINDS.get(device_kind, device_kind)
    return next((chip for text in known_targets() if (chip := target_of(text).chip).name == name), None)
