"""Several processes as one run: how they find each other, and the devices and arrays that they have together."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from zero_jax.launch import COORDINATOR, LOCAL_DEVICES, NUM_PROCESSES, PROCESS_ID
from zero_jax.mesh import of_rank, simulate_local

HEARTBEAT_SECONDS = 100
"""After how long without a sign of life a process counts as dead, unless told otherwise: JAX's own default."""


def initialize(*, distributed: bool = False, heartbeat_seconds: int = HEARTBEAT_SECONDS,
               environ: Mapping[str, str] = os.environ) -> bool:
    """Makes this process one of several, where it is; returns whether it is. Call it before anything runs on JAX.

    Where `ZERO_JAX_COORDINATOR` (host:port of the first process), `ZERO_JAX_NUM_PROCESSES` and `ZERO_JAX_PROCESS_ID`
    are set, they count. Else, if `distributed`, JAX finds the others by itself: under Slurm, Open MPI, Kubernetes (with
    the package `kubernetes`) and on TPU pods. CPU devices talk by gloo; `ZERO_JAX_DEVICES_PER_PROCESS` simulates
    some. `python -m zero_jax launch` sets all four.

    Raises ValueError where variables are missing or are no numbers, or no cluster is found.
    """
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    told = {name: environ[name] for name in names if environ.get(name)}
    if not told and not distributed:
        return False
    if told and len(told) < len(names):
        raise ValueError(f"{', '.join(told)} is set, and {', '.join(n for n in names if n not in told)} is not: set "
                         "all of them, or none.")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if local := environ.get(LOCAL_DEVICES):
        simulate_local(_number(LOCAL_DEVICES, local, least=1))
    if told:
        number = _number(NUM_PROCESSES, told[NUM_PROCESSES], least=1)
        process = _number(PROCESS_ID, told[PROCESS_ID], least=0)
        if process >= number:
            raise ValueError(f"{PROCESS_ID}={process} is not below {NUM_PROCESSES}={number}.")
        address = told[COORDINATOR]
        bind = address if address.startswith("127.") else None  # else it listens on every interface
        jax.distributed.initialize(address, number, process, coordinator_bind_address=bind,
                                   cluster_detection_method="deactivate", heartbeat_timeout_seconds=heartbeat_seconds)
        return True
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_seconds)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"distributed: JAX finds no cluster here ({error}): set {', '.join(names)}, or leave "
                         "distributed out.") from error
    return True


def _number(name: str, text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name}={text!r} in the environment is no whole number of at least {least}.")
    return int(text)


def choose_devices(number: int) -> list[jax.Device]:
    """`number` of all processes' devices, as many of each process.

    Raises ValueError where the processes do not have as many, or their number does not divide `number`.
    """
    processes = jax.process_count()
    if number % processes:
        raise ValueError(f"devices={number} counts those of all {processes} processes, and does not divide by that.")
    own: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        own.setdefault(device.process_index, []).append(device)
    fewest = min(len(devices) for devices in own.values())
    if fewest * processes < number:
        raise ValueError(f"devices={number}, but {processes} processes have {fewest} of kind "
                         f"{jax.devices()[0].platform} each.")
    return [device for process in sorted(own) for device in own[process][: number // processes]]


def on_host(array: jax.Array) -> np.ndarray:
    """A whole array on the host of every process, which must all ask for it; the array keeps no copy there."""
    if not array.is_fully_addressable and not array.is_fully_replicated:
        return multihost_utils.process_allgather(array, tiled=True)
    own = [shard.data for shard in array.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(array.shape, array.sharding, own))


def lay_out(tree: Any, sharding: Sharding) -> Any:
    """Numpy arrays that every process holds whole, as global arrays of that sharding."""
    return jax.tree.map(lambda value: jax.make_array_from_callback(
        value.shape, of_rank(sharding, value.ndim), lambda index: value[index]), tree)


def local(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Those of `devices` that belong to this process."""
    return [device for device in devices if device.process_index == jax.process_index()]
