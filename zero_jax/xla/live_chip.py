"""Which chip and which topology devices are of, live or not, by what they say of themselves."""

import collections
from collections.abc import Sequence

import jax

from zero_jax.xla.chip import Chip, built_in, chip_files
from zero_jax.xla.targets import Target


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip of devices whose `device_kind` is that; None for one without a file in zero_jax/xla/chips.

    The whole name has to be the same: "NVIDIA H100 PCIe" is another chip than "NVIDIA H100 80GB HBM3".
    """
    return next((chip for chip in map(built_in, chip_files()) if device_kind in {chip.name, chip.kind} - {""}), None)


def topology_of(devices: Sequence[jax.Device]) -> Target | None:
    """The smallest topology that `devices` are of; None for a kind without a file in zero_jax/xla/chips."""
    chip = chip_of_kind(devices[0].device_kind)
    if chip is None:
        return None
    if chip.tpu is None:
        hosts = collections.Counter(device.process_index for device in devices)
        dims = len(hosts), max(hosts.values())
    else:
        along = zip(*(device.coords for device in devices), strict=True)
        dims = tuple(len(set(values)) for values in along)[:len(chip.tpu.host)]
    name = next(name for name in chip_files() if built_in(name) == chip)
    return Target(f"{name}:{'x'.join(map(str, dims))}", chip, dims)


def is_live(device: jax.Device) -> bool:
    """Whether programs can run on `device` of this process; those of target topologies can only be compiled for."""
    try:
        device.memory_stats()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def memory_limit(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that a program may use of each of some live devices of this process; None where they do not say."""
    stats = [device.memory_stats() or {} for device in devices]
    return min((each["bytes_limit"] for each in stats), default=None) if all(
        "bytes_limit" in each for each in stats) else None
