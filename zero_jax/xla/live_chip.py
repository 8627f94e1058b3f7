"""Which chip and which topology devices are of, live or not, by what they say of themselves."""

import collections
from collections.abc import Sequence

import jax

from zero_jax.errors import UsageError
from zero_jax.xla.chip import Chip, built_in, chip_files, named_chip
from zero_jax.xla.targets import Target


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip of devices whose `device_kind` is that; None for one without a file in zero_jax/xla/chips.

    The whole name has to be the same: "NVIDIA H100 PCIe" is another chip than "NVIDIA H100 80GB HBM3".
    """
    return next((chip for chip in map(built_in, chip_files()) if device_kind in {chip.name, chip.kind} - {""}), None)


def topology_of(devices: Sequence[jax.Device], chip_name: str | None = None) -> Target | None:
    """The smallest topology that `devices` are of; None for a kind without a file in zero_jax/xla/chips.

    chip_name: the chip or chip file that they are taken for in the place of their own; raises UsageError for one whose
    links are of another kind.
    """
    chip = chip_of_kind(devices[0].device_kind) if chip_name is None else named_chip(chip_name)
    if chip is None:
        return None
    if (chip.tpu is None) == (devices[0].platform == "tpu"):
        raise UsageError(f"chip={chip_name} has the links of a {'GPU' if chip.gpu else 'TPU'}, and the devices "
                         f"here are {devices[0].platform}: zero-jax calibrate writes the chip file of these.")
    if chip.tpu is None:
        hosts = collections.Counter(device.process_index for device in devices)
        dims = len(hosts), max(hosts.values())
    else:
        along = zip(*(device.coords for device in devices), strict=True)
        dims = tuple(len(set(values)) for values in along)[:len(chip.tpu.host)]
    name = chip_name or next(name for name in chip_files() if built_in(name) == chip)
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
