"""Several processes as one run: how they find each other, and the devices and arrays that they share."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from zero_jax.distributed.launch import COORDINATOR, LOCAL_DEVICES, NUM_PROCESSES, PROCESS_ID
from zero_jax.errors import UsageError
from zero_jax.sharding.mesh import sharding_of_rank, simulate_local
from zero_jax.tree import is_key

HEARTBEAT_SECONDS = 100
"""Seconds without a heartbeat after which a process counts as failed; JAX's own default."""


def initialize(*, distributed: bool = False, heartbeat_seconds: int = HEARTBEAT_SECONDS,
               environ: Mapping[str, str] = os.environ) -> bool:
    """Joins this process to a run of several, if it belongs to one; returns whether it does. Call it before JAX runs.

    If `ZERO_JAX_COORDINATOR` (host:port of process 0), `ZERO_JAX_NUM_PROCESSES` and `ZERO_JAX_PROCESS_ID` are set, they
    are used. Otherwise, if `distributed`, JAX detects the cluster: Slurm, Open MPI, Kubernetes (with the package
    `kubernetes`) and TPU pods. CPU devices communicate by gloo, and `ZERO_JAX_DEVICES_PER_PROCESS` sets how many to
    simulate. `python -m zero_jax launch` sets all four variables.

    Args:
      distributed: whether to let JAX detect the cluster where the variables are not set.
      heartbeat_seconds: without a heartbeat of another process after which it counts as failed.
      environ: where to read the variables.

    Raises ValueError where variables are missing or not numbers, or no cluster is detected.
    """
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    variables = {name: environ[name] for name in names if environ.get(name)}
    if not variables and not distributed:
        return False
    if variables and len(variables) < len(names):
        raise UsageError(f"{', '.join(variables)} is set, and "
                         f"{', '.join(name for name in names if name not in variables)} is not: set all of them, or "
                         "none.")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if local := environ.get(LOCAL_DEVICES):
        simulate_local(_number(LOCAL_DEVICES, local, least=1))
    if variables:
        number = _number(NUM_PROCESSES, variables[NUM_PROCESSES], least=1)
        process = _number(PROCESS_ID, variables[PROCESS_ID], least=0)
        if process >= number:
            raise UsageError(f"{PROCESS_ID}={process} is not below {NUM_PROCESSES}={number}.")
        address = variables[COORDINATOR]
        bind = address if address.startswith("127.") else None  # otherwise the coordinator listens on every interface
        jax.distributed.initialize(address, number, process, coordinator_bind_address=bind,
                                   cluster_detection_method="deactivate", heartbeat_timeout_seconds=heartbeat_seconds)
        return True
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat_seconds)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"distributed: JAX finds no cluster here ({error}): set {', '.join(names)}, or leave "
                         "distributed out.") from error
    return True


def _number(name: str, text: str, *, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{name}={text!r} in the environment is not an integer of at least {least}.")
    return int(text)


def choose_devices(number: int) -> list[jax.Device]:
    """`number` of the devices of all processes, the same number of each process.

    Raises ValueError where there are fewer, or the number of processes does not divide `number`.
    """
    processes = jax.process_count()
    if number % processes:
        raise UsageError(f"devices={number} counts those of all {processes} processes, and does not divide by that.")
    own: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        own.setdefault(device.process_index, []).append(device)
    fewest = min(len(devices) for devices in own.values())
    if fewest * processes < number:
        raise UsageError(f"devices={number}, but {processes} processes have {fewest} of kind "
                         f"{jax.devices()[0].platform} each.")
    return [device for process in sorted(own) for device in own[process][: number // processes]]


def on_host(array: jax.Array) -> np.ndarray:
    """The global value of an array, on the host of every process; all must call this. The array caches no host copy."""
    if not array.is_fully_addressable and not array.is_fully_replicated:
        return multihost_utils.process_allgather(array, tiled=True)
    own = [shard.data for shard in array.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(array.shape, array.sharding, own))


def put_global(tree: Any, sharding: Sharding) -> Any:
    """NumPy arrays, the same on every process, as global arrays of that sharding."""
    return jax.tree.map(lambda value: jax.make_array_from_callback(
        value.shape, sharding_of_rank(sharding, value.ndim), lambda index: value[index]), tree)


def zeros_of(like: jax.ShapeDtypeStruct) -> jax.Array:
    """A global array of zeros (of a key dtype: keys of them) with the shape, dtype and sharding of `like`."""
    if is_key(like):
        return jax.jit(lambda: jax.lax.full(like.shape, 0, like.dtype), out_shardings=like.sharding)()
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: np.zeros(
        like.shape, like.dtype)[index])


def local(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices of this process among `devices`."""
    return [device for device in devices if device.process_index == jax.process_index()]
