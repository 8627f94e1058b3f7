"""Which memory stores each leaf of the state: the device's, or the host's (ZeRO-Offload, arXiv 2101.06840).

A leaf in host memory is sharded as it would be on the device: each device's shard is in the memory of its own host.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.sharding.layout import Layout
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.tree import leaf_bytes, map_named, named_leaves

DEVICE, HOST = "device", "pinned_host"
"""JAX's names of the memories. Only pinned host memory is copied without the processor's help."""

MIN_BYTES = 1024
"""Bytes on each device of the smallest leaf that goes to the host: a copy takes about 10 microseconds, however small,
and all leaves below this are together less than 0.1 % of any model that needs offload."""

_PLACES = ("host", "device")

_NO_COPY = ("the model reads the parameters as they are stored, so that there is no master copy beside them (there is "
            "one with precision=\"bf16\"; at stage 3 not with communication=, gather= or another dtype of reduction)")


@dataclasses.dataclass(frozen=True)
class Offload:
    """What of the state is stored in host memory; `make_zero_train_step(offload="optimizer")` is `Offload()`.

    optimizer: "host" or "device", the optimizer's states, and with them the moving average of the parameters.
    master: "host" or "device", the fp32 master weights; None: "host" where the model reads a copy of another dtype.
        Stage 3 stores such a copy, sharded, beside them, unless gradients are reduced in another dtype than it, weights
        are sent as codes, or gathered once a step. Where the model reads parameters as they are stored, there is no
        copy: they stay on the device, and "host" is refused.
    buffer_bytes: what the update may read at a time from the host's memory, per device; it needs about twice as much
        device memory, since results are written back from there.

    What else could be placed (parameters, activations, files on a disk) would be further fields.
    """

    optimizer: str = "host"
    master: str | None = None
    buffer_bytes: int = 2**24

    def __post_init__(self) -> None:
        for name in ("optimizer", "master"):
            if getattr(self, name) not in _PLACES and (name, getattr(self, name)) != ("master", None):
                raise UsageError(f"Offload({name}={shown(getattr(self, name))}): give \"host\" or \"device\".")
        size = self.buffer_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < 2**16:
            raise UsageError(f"Offload(buffer_bytes={shown(size)}): give a number of bytes of at least 65,536.")
        if self.optimizer == self.master == "device":
            raise UsageError("Offload(optimizer=\"device\", master=\"device\") offloads nothing: leave offload out.")


def offload_of(value: Any) -> Offload | None:
    """The argument `offload`: None, a name or an `Offload`; raises ValueError for anything else."""
    if value is None or isinstance(value, Offload):
        return value
    if isinstance(value, str) and value == "optimizer":
        return Offload()
    raise UsageError(f"offload={shown(value)}: give \"optimizer\" (the optimizer's states and the master weights in "
                     "host memory), a zero_jax.Offload, or None.")


def check_host_memory(axes: MeshAxes) -> None:
    """Raises ValueError unless the devices of the mesh can keep arrays in host memory.

    GPUs of target topologies list no memories, and are taken to have what every GPU has.
    """
    device = axes.mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds and (kinds or device.platform not in ("gpu", "cuda")):
        raise UsageError(f"offload: the backend {device.platform!r} has no memory {HOST!r}, only "
                         f"{', '.join(kinds) or 'none'}: leave offload out.")


def check_capacity(layout: Layout) -> None:
    """Raises ValueError if this host has less memory than the leaves of its own devices take there."""
    local = sum(device.process_index == jax.process_index() for device in layout.mesh.devices.flat)
    needed, known = layout.host_bytes * local, _physical_bytes()
    if needed > known > 0:
        raise UsageError(
            f"offload: {layout.host_bytes:,} bytes of state in host memory for each of this host's {local} devices are "
            f"{needed:,}, and the host has {known:,}: give more hosts, a higher stage, an optimizer with less state "
            "(lion, bfloat16 moments), or keep a part on the device with Offload(optimizer=\"device\").")


def _physical_bytes() -> int:
    """Memory of this host; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def with_offload(layout: Layout, offload: Offload | None) -> Layout:
    """`layout` with what `offload` names in host memory: a pure function, so that init, step and restore agree.

    Raises ValueError where nothing of the state would be there.
    """
    if offload is None:
        return layout
    check_host_memory(layout.axes)
    has_copy = layout.state.weights is not None
    if offload.master == "host" and not has_copy:
        raise UsageError(f"Offload(master=\"host\") at stage {layout.stage.number}: {_NO_COPY}: leave master out.")
    master = offload.master or "host"
    fields = {"opt_state": offload.optimizer, "ema": offload.optimizer, "params": master if has_copy else "device"}

    def is_large(leaf: Any) -> bool:
        return (jnp.issubdtype(leaf.dtype, jnp.number) and len(leaf.shape) > 0
                and leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) >= MIN_BYTES)

    host = frozenset(name for name, leaf in named_leaves(layout.state)
                     if fields.get(name.split("/")[0]) == "host" and is_large(leaf))
    if not host:
        raise UsageError(
            f"offload: no leaf of this state would be in host memory at stage {layout.stage.number}: "
            f"{_why_none(layout, offload)}: leave offload out.")
    return dataclasses.replace(layout, host=host, state=map_named(
        lambda name, leaf: leaf.update(sharding=on_host(leaf.sharding)) if name in host else leaf, layout.state))


def _why_none(layout: Layout, offload: Offload) -> str:
    if offload.optimizer == "device" and layout.state.weights is None:
        return _NO_COPY
    return f"the optimizer keeps no array of {MIN_BYTES:,} bytes on a device or more"


def on_host(sharding: NamedSharding) -> NamedSharding:
    """`sharding` in host memory. JAX drops this for GPUs of a target topology, which `xla.host_memory` mends."""
    return sharding.with_memory_kind(HOST)


def on_device(sharding: NamedSharding) -> NamedSharding:
    """`sharding` in the device's memory."""
    return NamedSharding(sharding.mesh, sharding.spec)


def is_on_host(value: Any) -> bool:
    """Whether an array or tracer is in host memory."""
    return jax.typeof(value).memory_space == jax.memory.Space.Host


def fetch(value: Any) -> Any:
    """A tree with its arrays in device memory; traceable."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if is_on_host(leaf) else leaf, value)


def put_on_host(value: jax.Array) -> jax.Array:
    """`value` in host memory; traceable."""
    return value if is_on_host(value) else jax.device_put(value, jax.memory.Space.Host)


def as_placed(state: Any, layout: Layout) -> Any:
    """A traced `state` (or a part of its fields) with what the layout has in host memory there, whatever JAX says.

    A compiled step's arguments on GPUs of a target topology are, to JAX, in device memory.
    """
    return map_named(lambda name, leaf: put_on_host(leaf) if name in layout.host else leaf, state)
