"""Where one leaf of the state is stored, as data."""

import dataclasses

from zero_jax.typing import Shape, Spec


@dataclasses.dataclass(frozen=True)
class Placement:
    """One leaf of the state: what it is, how it is stored, and what it costs each device.

    Attributes:
        name: its path in the state, such as `params/blocks/attention/kernel`.
        shape: of the leaf itself.
        stored: its shape with dims merged or padded, which `spec` divides.
        dtype: as NumPy names it.
        spec: how it is sharded.
        bytes: of the leaf itself, over all devices that hold one copy together.
        padding: bytes of padding, over those devices.
        device_bytes: on each device, or in the host's memory for each device; padding included.
        note: why it is padded or replicated; empty where it is neither.
        memory: "device", "host" or "disk".
    """

    name: str
    shape: Shape
    stored: Shape
    dtype: str
    spec: Spec
    bytes: int
    padding: int
    device_bytes: int
    note: str
    memory: str = "device"

    @property
    def stored_bytes(self) -> int:
        """Bytes of the leaf with its padding."""
        return self.bytes + self.padding
