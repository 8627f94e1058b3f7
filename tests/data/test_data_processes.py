"""Batches over two and four real processes: each reads only the rows of its own devices."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.oracle import slow

from zero_jax.data.batches import Batches

LENGTH = 8
TOKENS = np.arange(LENGTH * 24 + 1, dtype=np.uint32)

PROCESS = """
import sys
import jax, numpy as np
jax.distributed.initialize(sys.argv[1], int(sys.argv[3]), int(sys.argv[2]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from zero_jax.data.batches import Batches

class Told(Batches):
    def _read(self, windows):
        print("READ", *windows)
        return super()._read(windows)

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
tokens = np.arange(8 * 24 + 1, dtype=np.uint32)
batches = Told(tokens, batch_size=8, length=8, sharding=sharding)
for number in range(3, 6):  # the second epoch
    batch = batches[number]
    assert batch["inputs"].shape == (8, 8)
    for shard in batch["targets"].addressable_shards:
        print("ROW", number, shard.index[0].start, *np.asarray(shard.data).ravel())
"""


@pytest.mark.parametrize("number", [2, slow(4)])
def test_each_process_reads_only_its_own_rows(number):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // number}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(i), str(number)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(number)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    whole = Batches(TOKENS, batch_size=8, length=LENGTH)
    assert whole.num_windows == 24 and whole.batches_per_epoch == 3
    every_read = []
    for i, (process, (out, err)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, err
        lines = [line.split() for line in out.splitlines()]
        own = slice(8 // number * i, 8 // number * (i + 1))
        rows = {(int(line[1]), int(line[2])): line[3:] for line in lines if line[0] == "ROW"}
        assert sorted(rows) == [(k, row) for k in range(3, 6) for row in range(8)[own]]
        read = [int(window) for kind, *line in lines if kind == "READ" for window in line]
        expected = [whole[k]["inputs"][own, 0] // LENGTH for k in range(3, 6)]
        assert sorted(read) == sorted(np.concatenate(expected))
        every_read += read
        for k in range(3, 6):
            found = np.array([rows[k, row] for row in range(8)[own]], np.int32)
            np.testing.assert_array_equal(found, whole[k]["targets"][own])
            assert not np.array_equal(found, whole[k - 3]["targets"][own]), "another epoch has another order"
    assert sorted(every_read) == [*range(24)], "each example once in the epoch"
