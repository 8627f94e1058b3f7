"""A program in two real processes or more, of some simulated devices each, as one run of `jax.distributed`."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

from support.pages import ROOT
from zero_jax.sharding.mesh import with_ordered_collectives

GPT2_BATCH = """
import json, sys
import jax
address, number, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(address, 2, number)
import numpy as np, optax
import zero_jax
from models import gpt2

tokens = np.random.default_rng(0).integers(0, 96, (8, 17)).astype(np.int32)
mesh = zero_jax.make_mesh(4)
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
batch = {name: jax.make_array_from_callback((8, 16), rows, part.__getitem__)
         for name, part in (("inputs", tokens[:, :-1]), ("targets", tokens[:, 1:]))}
"""
"""The beginning of a program: both processes' mesh of four devices, and a batch for a GPT-2 of 96 words; `folder`."""


@contextlib.contextmanager
def two_processes(program: str, *args: str, count: int = 2, devices: int = 2, xla_flags: str = ""
                  ) -> Iterator[list[subprocess.Popen[str]]]:
    """Both, or `count`, started with (address, number, *args) as `sys.argv[1:]`; they are killed at the end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
                        "XLA_FLAGS": with_ordered_collectives(
                            f"--xla_force_host_platform_device_count={devices} {xla_flags}")}
    processes = [subprocess.Popen([sys.executable, "-c", program, address, str(number), *args], env=env,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for number in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
