"""Batches over two real processes: each reads only the rows of its own devices."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from zero_jax.data import Batches

LENGTH = 8
TOKENS = np.arange(LENGTH * 24 + 1, dtype=np.uint32)

PROCESS = """
import sys
import jax, numpy as np
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from zero_jax.data import Batches

class Told(Batches):
    def _read(self, windows):
        print("READ", *windows)
        return super()._read(windows)

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
tokens = np.arange(8 * 24 + 1, dtype=np.uint32)
batch = Told(tokens, batch_size=8, length=8, sharding=sharding)[4]
assert batch["inputs"].shape == (8, 8)
for shard in batch["targets"].addressable_shards:
    print("ROW", shard.index[0].start, *np.asarray(shard.data).ravel())
"""


def test_each_of_two_processes_reads_only_its_own_rows():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    whole = Batches(TOKENS, batch_size=8, length=LENGTH)
    for i, (process, (out, err)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, err
        lines = [line.split() for line in out.splitlines()]
        own = slice(4 * i, 4 * i + 4)
        rows = {int(row): tokens for kind, row, *tokens in lines if kind == "ROW"}
        assert sorted(rows) == list(range(8))[own]
        found = np.array([rows[row] for row in sorted(rows)], np.int32)
        np.testing.assert_array_equal(found, whole[4]["targets"][own])
        read = [int(window) for kind, *line in lines if kind == "READ" for window in line]
        assert sorted(read) == sorted(whole[4]["inputs"][own, 0] // LENGTH)
