"""Mixtures of packed documents over two real processes: each has the rows of its devices, as one process has them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = """
import sys
import numpy as np
from zero_jax.data.documents import Documents
from zero_jax.data.batches import ExampleBatches
from zero_jax.data.objectives import masked_language
from zero_jax.data.packing import DocumentRows
from zero_jax.data.prefetch import Prefetched

def source(number):
    lengths = np.random.default_rng(number).integers(2, 30, number)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return DocumentRows(Documents(np.arange(offsets[-1]), offsets), 16, pack=True, causal=False)

def bert(row, key):
    return {**row, **masked_language(row["inputs"], key, mask_id=3, replacements=np.arange(9),
                                     candidates=row["segment_ids"] > 0)}

def make(sharding=None):
    return ExampleBatches([source(90), source(200)], batch_size=8, weights=(0.25, 0.75), seed=3, make=bert,
                          sharding=sharding)
"""
PROCESS = PROGRAM + """
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
batches = make(NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data")))
batches.seek(int(sys.argv[3]))
with Prefetched(batches, depth=2) as feed:
    for number in range(3):
        for name, array in next(feed).items():
            for shard in array.addressable_shards:
                print("ROW", batches.position - 1, name, shard.index[0].start, *np.asarray(shard.data).ravel())
"""


@pytest.mark.slow
def test_two_processes_have_the_batches_of_one():
    pytest.importorskip("grain")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
                        "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, address, str(i), "5"], env=env, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in range(2)]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    names: dict = {}
    exec(PROGRAM, names)
    whole, seen = names["make"](), set()
    for i, (process, (out, err)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, err
        for line in (line.split() for line in out.splitlines() if line.startswith("ROW")):
            number, name, row = int(line[1]), line[2], int(line[3])
            assert row // 4 == i
            found, expected = np.array(line[4:], float), whole[number][name][row]
            np.testing.assert_array_equal(found, expected)
            seen.add((number, name, row))
    assert len(seen) == 3 * 5 * 8 and {number for number, _, _ in seen} == {5, 6, 7}
    assert (whole[5]["inputs"] != whole[6]["inputs"]).any()  # the control
