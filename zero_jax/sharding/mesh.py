"""The device mesh: making one, the names of its axes, and what depends on its devices."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.arguments import shown, whole
from zero_jax.errors import UsageError
from zero_jax.xla.platform import Platform, platform_of, simulate
from zero_jax.xla.targets import target_of

DATA = "data"
REPLICA = "replica"
TENSOR = "tensor"
CONTEXT = "context"


def with_ordered_collectives(flags: str) -> str:
    """`flags` for XLA with the one that keeps the collectives of simulated devices in one order, unless it is given.

    A program that JAX loads from its persistent cache has lost, on CPUs, the order of loops and the collectives outside
    of them (jaxlib 0.10.2 and 0.12). Where one device begins with the gather of an untied head and another with the
    loop over layers, each waits for the rest, and XLA ends the process after 40 seconds. With this flag a gather stands
    where its value is needed, mostly in memory that the loop has left and must have finished with.
    """
    name = "--xla_cpu_enable_concurrency_optimized_scheduler"
    known = jax.__version_info__ < (0, 13)  # XLA ends the process on a flag that it does not know
    return f"{flags} {name}=false".strip() if known and name not in flags else flags


def simulate_local(num_devices: int) -> None:
    """As `simulate_devices`, without a look at what JAX has started with: before `jax.distributed` no look is allowed.

    Threads twice as many: with one for each device, a batched `eigh` on all of them at once deadlocks
    (jaxlib 0.10.2: each waits in `ParallelBatchMap` for parts that no thread is left to take).
    """
    os.environ.setdefault("NPROC", str(2 * num_devices))  # which XLA reads for the size of a CPU client's pool
    os.environ["XLA_FLAGS"] = with_ordered_collectives(os.environ.get("XLA_FLAGS", ""))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def simulate_devices(num_devices: int, *, platform: str | None = None) -> None:
    """Makes this process see `num_devices` simulated CPU devices. Call it before anything runs on JAX.

    Args:
      num_devices: how many.
      platform: a target topology of as many devices, as "v5e:2x4" or "h100:8": steps that are made from here on do on
        the simulated devices what they do there (layouts, the order of collectives, tiles, where states are), so that
        its numbers can be compared. Kernels and XLA's options are the CPU's. None: what they do on CPUs.

    Raises ValueError if JAX has already started with another number of devices.
    """
    num_devices = whole("simulate_devices: num_devices", num_devices, 1)
    target = None if platform is None else target_of(platform)
    if target is not None and target.num_devices != num_devices:
        raise UsageError(f"simulate_devices({num_devices}, platform={platform!r}): that has {target.num_devices} "
                         "devices: give the same number of both.")
    try:
        simulate_local(num_devices)
    except RuntimeError:
        pass  # JAX has started: what counts is what it started with
    if jax.device_count() != num_devices or jax.default_backend() != "cpu":
        raise UsageError(
            f"simulate_devices({num_devices}): JAX has already started with {jax.device_count()} "
            f"{jax.default_backend()} device(s), and their number cannot change any more. Call simulate_devices "
            "before anything else runs on JAX, in a fresh process, with XLA_FLAGS free of "
            "--xla_force_host_platform_device_count.")
    simulate(target)


def make_mesh(
    data: int | Sequence[int] = -1, *, replica: int = 1, context: int = 1, tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh for ZeRO over live devices or those of a target topology.

    Args:
      data: size of the axis `data`, over which ZeRO shards; -1 takes all devices that the others leave, and on a
        whole TPU slice factors it along the torus. A sequence factors it into axes `data_0`, `data_1`, ... (major
        first): parameters are then gathered over one axis after another, and gradients scattered so.
      replica: size of the axis `replica`, across which the shards are replicated (hybrid sharding).
      context: size of the axis `context`, over which the sequence is split; ZeRO shards over it, too.
      tensor: size of the axis `tensor`, over which rules split parameters (tensor parallelism); neighbours in a node.
      devices: default: all live devices.

    Returns: a `Mesh` with Auto axes, so that models without sharding annotations run under it. Devices are
    in the order that suits their interconnect. Raises ValueError where the sizes do not fit the devices.
    """
    devices = list(jax.devices()) if devices is None else _checked(devices)
    asked = f"make_mesh(data={shown(data)}, replica={shown(replica)}, context={shown(context)}, tensor={shown(tensor)})"
    is_sequence = isinstance(data, (tuple, list))
    factors: list[Any] = list(data) if is_sequence else [data]
    others = {REPLICA: replica, CONTEXT: context, TENSOR: tensor}
    if any(isinstance(size, bool) or not isinstance(size, (int, np.integer)) for size in [*factors, *others.values()]):
        raise UsageError(f"{asked}: sizes must be whole numbers, and data one or a tuple of several.")
    if not factors or any(size < 1 for size in factors) and factors != [-1] or min(others.values()) < 1:
        raise UsageError(f"{asked}: sizes must be positive; data=-1 takes the rest.")
    others = {name: size for name, size in others.items() if size > 1}
    if factors == [-1]:
        if len(devices) % math.prod(others.values()):
            raise UsageError(f"make_mesh: {len(devices)} devices do not divide by {others}.")
        factors = [len(devices) // math.prod(others.values())] if others else list(_torus(devices))
    names = [DATA] if not is_sequence and len(factors) == 1 else [f"{DATA}_{i}" for i in range(len(factors))]
    for name, size in others.items():
        at = 0 if name == REPLICA else len(names)
        factors.insert(at, size)
        names.insert(at, name)
    needed = math.prod(factors)
    if needed > len(devices):
        raise UsageError(
            f"make_mesh: {dict(zip(names, factors, strict=True))} needs {needed} devices and there are {len(devices)}. "
            f"On a CPU, call zero_jax.simulate_devices({needed}) before anything runs on JAX.")
    if needed < len(devices):
        return Mesh(np.array(devices[:needed]).reshape(factors), names)
    return Mesh(mesh_utils.create_device_mesh(factors, devices, allow_split_physical_axes=True), names)


def _checked(devices: Any) -> list[jax.Device]:
    """`devices` as a list; raises ValueError for none, for one that is given twice, and for what is none."""
    try:
        listed = list(devices)
    except TypeError:
        listed = [devices]
    strange = [device for device in listed if not (hasattr(device, "platform") and hasattr(device, "id"))]
    if strange:
        raise UsageError(f"make_mesh: {shown(strange[0])} in devices is a {type(strange[0]).__name__} and no device: "
                         "give some of jax.devices().")
    if not listed:
        raise UsageError("make_mesh: devices is empty: give some of jax.devices(), or leave it out for all of them.")
    if twice := [device for device, times in Counter(listed).items() if times > 1]:
        raise UsageError(f"make_mesh: devices has {twice[0]} twice: give each once.")
    return listed


def default_mesh() -> Mesh:
    """The mesh of `jax.set_mesh` where one is set; else `make_mesh()`."""
    return make_mesh() if jax.sharding.get_abstract_mesh().empty else jax.sharding.get_mesh()


def _torus(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """Sizes along the axes of a TPU slice, the first two of three as one; else the number of devices.

    XLA:TPU has reduce-scatters along a line or a small plane, and none over a 3-D slice or a large plane.
    """
    platform = platform_of(devices[0])
    if not platform.is_tpu:
        return (len(devices),)
    *plane, depth = (len(set(along)) for along in zip(*map(platform.coords, devices), strict=True))
    chips = math.prod(plane) * depth
    if len(devices) % chips or chips <= 8 and depth == 1:
        return (len(devices),)
    sizes = plane if depth == 1 else [math.prod(plane), depth]
    sizes[-1] *= len(devices) // chips  # a chip may be two devices
    return tuple(size for size in sizes if size > 1) or (1,)


def sharding_of_rank(sharding: Any, ndim: int) -> Any:
    """The sharding of a batch for a leaf of so many dims: without a sequence, over the batch's axes alone."""
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= ndim:
        return sharding
    return NamedSharding(sharding.mesh, P(*sharding.spec[:ndim]))


def major_first(splits: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """The axes that split the dims of an array, in the order in which it is scattered; backwards it is gathered.

    splits: of each dim its axes, major first, as in its spec: whatever the order of the mesh is, only a scatter over
    the major axis before the minor one leaves the rows of the spec on each device. names: the axes of the mesh, in
    whose order those of different dims are.

    >>> major_first([("y", "x"), ("z",)], ("x", "y", "z"))
    ['y', 'x', 'z']
    """
    left, order = [list(axes) for axes in splits if axes], []
    while left:
        axes = min(left, key=lambda axes: names.index(axes[0]))
        order.append(axes.pop(0))
        left = [axes for axes in left if axes]
    return order


def fills_tiles(part: int) -> bool:
    """Whether a TPU scatters a dim of which each chip keeps `part` unpadded, on whichever side of its tiles it is.

    Tiles hold 8 x 128 values, and XLA chooses which dim is along which side. Measured: other parts are padded, by up
    to a third, or all-reduced, depending on what is around them.
    """
    return part % 256 == 0


def tile_block(mesh: Mesh, axis: str, platform: Platform) -> int:
    """How many values, or a multiple of them, a TPU scatters to each chip over `axis` without padding of its own.

    A tile of bfloat16 is 16 x 128 values. Over a plane of a torus each part travels as two halves.
    """
    line = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)[:, 0]
    dims = sum(len(set(along)) > 1 for along in zip(*map(platform.coords, line), strict=True))
    return 2048 if dims <= 1 else 4096


def constrain(value: jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """`value` laid out by `spec`, under jit."""
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))
