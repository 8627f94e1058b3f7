"""What of the state is stored in host memory (ZeRO-Offload, arXiv 2101.06840) or in files (ZeRO-Infinity).

A leaf in host memory is sharded as it would be on the device: each device's shard is in the memory of its own host.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from zero_jax import combinations
from zero_jax.arguments import is_number, is_one_of, shown, whole
from zero_jax.disk.generations import check_folder
from zero_jax.errors import UsageError
from zero_jax.layout.layout import Layout
from zero_jax.offload.disk_leaves import with_disk
from zero_jax.sharding.batch import sum_dtype
from zero_jax.sharding.host_arrays import HOST, on_host, put_on_host
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.tree import leaf_bytes, map_named, named_leaves
from zero_jax.xla.platform import Platform, is_gpu

MIN_BYTES = 1024
"""Bytes on each device of the smallest leaf that goes to the host: a copy takes about 10 microseconds, however small,
and all leaves below this are together less than 0.1 % of any model that needs offload."""

MIN_LAYER_BYTES = 4096
"""The same of stacked parameters, of each layer: every one is a copy of its own, forward and backward."""

_NO_COPY = ("the model reads the parameters as they are stored, so that there is no master copy beside them (there is "
            "one with precision=\"bf16\"; at stage 3 not with codes, gather= or another dtype of reduction)")


@dataclasses.dataclass(frozen=True)
class Offload:
    """What of the state is stored in host memory.

    `make_zero_train_step(offload="optimizer")` is `Offload()`, `offload="parameters"` is `Offload(parameters="host")`,
    and `offload="gradients"` that with `gradients="host"` as well.

    optimizer: "host" or "device", the optimizer's states, and with them the moving average of the parameters.
    master: "host" or "device", the fp32 master weights; None: "host" where the model reads a copy of another dtype.
        Stage 3 stores such a copy, sharded, beside them, unless gradients are reduced in another dtype than it, weights
        are sent as codes, or gathered once a step. Where the model reads parameters as they are stored, there is no
        copy: they stay on the device, and "host" is refused.
    parameters: "device" or "host": at stage 3, what the model reads, trainable or frozen (ZeRO-Infinity, arXiv
        2104.07857). Each layer's shard is copied to the device before it is gathered, forward and backward, so that no
        more than the layers in use are there; master weights are then in host memory, too.
    gradients: "device" or "host": at stage 3, those of stacked layers, on GPUs and simulated devices. Backward writes
        each layer's shard into a stack in host memory, of which the update reads blocks, as of the states; a global
        norm is added up block by block as well, so that its last bits may be others than on the device. With
        `accumulate=` the stack is the sum over microbatches, in float32: each reads a layer of it, adds and writes it.
    buffer_bytes: what the update may read at a time from the host's memory, per device; it needs about twice as much
        device memory, since results are written back from there. None: 2**26 on GPUs that have copy engines (jax
        0.11.2), but with gradients there or files, else 2**24.

    fraction: of the bytes of what `optimizer` and `master` put there, at least this share is in host memory, all of
        a parameter's or none, and the rest on the device (as the twin flow of ZeRO-Offload++); 1: all.
    disk: a folder on a local disk: what would be in host memory is in files there instead (ZeRO-Infinity, arXiv
        2104.07857), read, updated and written between the compiled programs of the step; None: no files. Parameters and
        gradients are then on the device.
    """

    optimizer: str = "host"
    master: str | None = None
    buffer_bytes: int | None = None
    parameters: str = "device"
    fraction: float = 1.0
    disk: str | os.PathLike[str] | None = None
    gradients: str = "device"

    def __post_init__(self) -> None:
        for name in ("optimizer", "master", "parameters", "gradients"):
            value = getattr(self, name)
            if is_one_of(value, "disk"):
                raise UsageError(f"Offload({name}=\"disk\"): only states are in files, those that optimizer and master "
                                 "put into host memory, with disk=FOLDER: give \"host\" or \"device\".")
            if not is_one_of(value, "host", "device") and not (name == "master" and value is None):
                raise UsageError(f"Offload({name}={shown(value)}): give \"host\" or \"device\".")
        if self.buffer_bytes is not None:
            object.__setattr__(self, "buffer_bytes", whole("Offload: buffer_bytes", self.buffer_bytes, 2**16))
        if not (is_number(self.fraction) and 0 < self.fraction <= 1):
            raise UsageError(f"Offload(fraction={shown(self.fraction)}): give a share above 0 and at most 1.")
        if self.disk is not None:
            check_folder(self.disk)
        combinations.check({f"offload.{name}": value for name, value in vars(self).items()})

    def block_bytes(self, platform: Platform) -> int:
        """`buffer_bytes`, or what it is by default on `platform`."""
        if self.buffer_bytes is not None:
            return self.buffer_bytes
        return 2**26 if self.allows_copy_engines and platform.has_copy_engines else 2**24

    @property
    def allows_copy_engines(self) -> bool:
        """Whether a GPU's copy engines may copy it, beside compute.

        Not gradients: XLA writes a backward pass's to other rows. Not beside files, which no program reads.
        """
        return self.disk is None and self.gradients != "host"


NAMED = {"optimizer": Offload(), "parameters": Offload(parameters="host"),
         "gradients": Offload(parameters="host", gradients="host")}
"""The placements that have a name."""


def offload_of(value: Any) -> Offload | None:
    """The argument `offload`: None, a name or an `Offload`; raises ValueError for anything else."""
    if value is None or isinstance(value, Offload):
        return value
    if isinstance(value, str) and value in NAMED:
        return NAMED[value]
    if is_one_of(value, "auto"):
        raise UsageError("offload=\"auto\": a choice compiles the step for its batch, which is not known yet: give "
                         "offload=zero_jax.choose_offload(model, stage, batch, ...).offload.")
    raise UsageError(f"offload={shown(value)}: give \"optimizer\" (the optimizer's states and the master weights in "
                     "host memory), \"parameters\" (and what the model reads), \"gradients\" (and the gradients), a "
                     "zero_jax.Offload, or None.")


def check_host_memory(axes: MeshAxes) -> None:
    """Raises ValueError unless the devices of the mesh can keep arrays in host memory.

    GPUs of target topologies list no memories, and are taken to have what every GPU has.
    """
    device = axes.mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds and (kinds or not is_gpu(device)):
        raise UsageError(f"offload: the backend {device.platform!r} has no memory {HOST!r}, only "
                         f"{', '.join(kinds) or 'none'}: leave offload out.")


def check_capacity(layout: Layout, num_devices: int) -> None:
    """Raises ValueError if this host has less memory than the leaves of its `num_devices` devices take there."""
    each = layout.host_bytes + layout.host_gradient_bytes
    needed, known = each * num_devices, host_share(1)
    if needed > known > 0:
        what = "state and gradients" if layout.host_gradients else "state"
        raise UsageError(
            f"offload: {each:,} bytes of {what} in host memory for each of this host's {num_devices} "
            f"devices are {needed:,}, and the host has {known:,}: give more hosts, a higher stage, an optimizer with "
            "less state (lion, bfloat16 moments), or keep a part on the device with Offload(optimizer=\"device\").")


def host_share(devices: int) -> int:
    """Memory of this host in bytes for each of so many devices; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // devices
    except (AttributeError, ValueError, OSError):
        return 0


def params_as_placed(params: Any, frozen: Any, layout: Layout) -> tuple[Any, Any]:
    """As `as_placed`, of what the model reads: trainable parameters or their copy, and frozen ones."""
    field = "params" if layout.state.weights is None else "weights"
    placed = as_placed({field: params, "frozen": frozen}, layout)
    return placed[field], placed["frozen"]


def as_placed(state: Any, layout: Layout) -> Any:
    """A traced `state` (or a part of its fields) with what the layout has in host memory there, whatever JAX says.

    A compiled step's arguments on GPUs of a target topology are, to JAX, in device memory.
    """
    return map_named(lambda name, leaf: put_on_host(leaf) if name in layout.host else leaf, state)


def with_offload(layout: Layout, offload: Offload | None) -> Layout:
    """`layout` with what `offload` names in host memory or in files.

    A pure function, so that init, step and restore agree. Raises ValueError where nothing of the state would be there.
    """
    if offload is None:
        return layout
    if offload.disk is None:
        check_host_memory(layout.axes)
    has_copy = layout.state.weights is not None
    if offload.master == "host" and not has_copy:
        raise UsageError(f"Offload(master=\"host\") at stage {layout.stage.number}: {_NO_COPY}: leave master out.")
    master = offload.master or "host"
    parameters = {"frozen": offload.parameters, "weights" if has_copy else "params": offload.parameters}
    fields = {"opt_state": offload.optimizer, "ema": offload.optimizer, **({"params": master} if has_copy else {}),
              **parameters}

    def is_large(name: str, leaf: Any) -> bool:
        field, _, param = name.partition("/")
        shard_bytes = leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        if field in parameters and (stacked := layout.reads[param].stacked):
            # A layer that is a row of vectors of less than four bytes shares words with others: XLA:TPU reads no part,
            # "Sublane slicing size must be multiple of element packing factor" (libtpu 0.0.42.1).
            if layout.axes.is_tpu and len(leaf.shape) < 3 and jnp.dtype(leaf.dtype).itemsize < 4:
                return False
            return shard_bytes >= MIN_LAYER_BYTES * math.prod(leaf.shape[dim] for dim in stacked)
        return jnp.issubdtype(leaf.dtype, jnp.number) and len(leaf.shape) > 0 and shard_bytes >= MIN_BYTES

    sizes = {name: leaf_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
             for name, leaf in named_leaves(layout.state)
             if fields.get(name.split("/")[0]) == "host" and is_large(name, leaf)}
    host = shared(sizes, layout, offload.fraction) if offload.fraction < 1 else frozenset(sizes)
    if not host:
        why = _NO_COPY if offload.optimizer == "device" and not has_copy else (
            f"the optimizer keeps no array of {MIN_BYTES:,} bytes on a device or more")
        raise UsageError(f"offload: no leaf of this state would be in host memory at stage {layout.stage.number}: "
                         f"{why}: leave offload out.")
    if offload.disk is not None:
        return with_disk(layout, host)
    gradients = _gradients_in_host_memory(layout, offload) if offload.gradients == "host" else {}
    return dataclasses.replace(layout, host=host, host_gradients=gradients, state=map_named(
        lambda name, leaf: leaf.update(sharding=on_host(leaf.sharding)) if name in host else leaf, layout.state))


def _gradients_in_host_memory(layout: Layout, offload: Offload) -> dict[str, int]:
    """Bytes on each device of the gradients that go down layer by layer; raises ValueError where none does.

    Small stacks stay on the device: the update would bring them up whole, and XLA:GPU left such a stack on the device
    (0.5 MB, biases of 1T parameters). Above an eighth of the buffer the update reads blocks, whatever the states are.
    On TPUs stacks of vectors stay, too: a layer of one is a row of its tiles, and a part of a tile cannot be written.
    """
    smallest = offload.block_bytes(layout.axes.built_for) // 8
    smallest_dims = 3 if layout.axes.is_tpu else 2
    uses, shardings = dict(named_leaves(layout.uses)), dict(named_leaves(layout.gradients))

    def dtype_of(name: str, leaf: Any) -> Any:
        dtype = uses[name].reduce if name in uses else leaf.dtype
        return dtype if layout.microbatches == 1 else sum_dtype(dtype)

    sizes = {name: leaf_bytes(shardings[name].shard_shape(leaf.shape), dtype_of(name, leaf))
             for name, leaf in named_leaves(layout.state.params)}
    gradients = {name: sizes[name] for name, leaf in named_leaves(layout.state.params)
                 if layout.reads[name].stacked == (0,) and smallest < sizes[name] >= MIN_LAYER_BYTES * leaf.shape[0]
                 and len(leaf.shape) >= smallest_dims}
    if not gradients:
        raise UsageError(
            "Offload(gradients=\"host\"): gradients go down as a loop over layers makes them, and none of this model's "
            "loops over stacked layers (nn.scan, nnx.scan) has a parameter whose gradients take more than "
            f"{smallest:,} bytes on each device (an eighth of buffer_bytes), and {MIN_LAYER_BYTES:,} for each layer: "
            "stack the layers, or leave gradients out.")
    return gradients


def shared(sizes: Mapping[str, int], layout: Layout, fraction: float) -> frozenset[str]:
    """`share_of` the leaves of so many bytes, all that belong to a parameter together.

    A block of an update with a moment on the host and one on the device has copies of the latter: 64.6 MiB of
    temporaries where all on either side have 41 and 28 (four matrices of 4096 x 2048 and less, two H100).
    """
    params = [name for name, _ in named_leaves(layout.state.params)]
    owner = {name: max((param for param in params if name.endswith(f"/{param}")), key=len, default=name)
             for name in sizes}
    groups = dict[str, int]()
    for name, size in sizes.items():
        groups[owner[name]] = groups.get(owner[name], 0) + size
    share = share_of(groups, fraction)
    return frozenset(name for name in sizes if owner[name] in share)


def share_of(sizes: Mapping[str, int], fraction: float) -> frozenset[str]:
    """Names that are at least that fraction of all bytes: the largest that fit into it, and one more.

    sizes: bytes of each. A pure function, so that each process and each restart takes the same.
    """
    wanted, share = fraction * sum(sizes.values()), dict[str, int]()
    by_size = sorted(sizes, key=lambda name: (-sizes[name], name))
    for name in by_size:
        if sum(share.values()) + sizes[name] <= wanted:
            share[name] = sizes[name]
    if (rest := wanted - sum(share.values())) > 0:
        completing = next(name for name in reversed(by_size) if name not in share and sizes[name] >= rest)
        for name in list(share):  # what is not needed beside it
            if sum(share.values()) - sizes[name] + sizes[completing] >= wanted:
                del share[name]
        share[completing] = sizes[completing]
    return frozenset(share)
