"""The rate at which live devices copy from and to their host's memory: measured, beside what is predicted of it."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.planning.transfers import REACHED
from zero_jax.sharding.host_arrays import on_device, on_host
from zero_jax.xla.targets import Target

PARTS_BY = 0.25
"""By which share of the prediction a measurement differs from it if that is worth a word."""

BYTES, ROUNDS = 2**28, 3
"""That are copied to each device, and back, and how often: 16 ms on a link of 32 GB/s, a thousand times a copy's
start."""


def measured_link(devices: Sequence[jax.Device], num_bytes: int = BYTES) -> float:
    """Bytes per second and direction that each of `devices`, all at once, copies from and to its host's memory.

    The smaller of the two directions, each the median of `ROUNDS`.
    """
    sharding = NamedSharding(Mesh(np.array(devices), ("device",)), P("device"))
    parts = [jax.device_put(np.zeros(num_bytes, np.uint8), device) for device in devices]
    here = jax.make_array_from_single_device_arrays((num_bytes * len(devices),), sharding, parts)
    up, down = list[float](), list[float]()
    for round_number in range(ROUNDS + 1):  # the first allocates
        there, seconds_down = _timed(here, on_host(sharding))
        here, seconds_up = _timed(there, on_device(sharding))
        if round_number:
            up.append(num_bytes / seconds_up)
            down.append(num_bytes / seconds_down)
    return min(statistics.median(up), statistics.median(down))


def with_measured_link(target: Target, rate: float) -> tuple[Target, tuple[str, ...]]:
    """`target` with the measured rate in the place of the predicted one where they part, and a sentence that says so.

    The chip's own figure is that of its link; `REACHED` of it is what copies are predicted to reach.
    """
    predicted = REACHED * target.chip.host_link_bandwidth
    if abs(rate / predicted - 1) < PARTS_BY:
        return target, ()
    note = (f"Measured: devices copy {rate / 1e9:.3g} GB/s from and to host memory, all at once; predicted were "
            f"{predicted / 1e9:.3g} (a link of {target.chip.host_link_bandwidth / 1e9:.3g}): the times above are with "
            "what was measured.")
    chip = dataclasses.replace(target.chip, host_link_bandwidth=rate / REACHED)
    return dataclasses.replace(target, chip=chip), (note,)


def _timed(array: jax.Array, sharding: NamedSharding) -> tuple[jax.Array, float]:
    began = time.perf_counter()
    moved = jax.block_until_ready(jax.device_put(array, sharding))
    return moved, time.perf_counter() - began
