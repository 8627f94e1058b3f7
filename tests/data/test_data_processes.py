"""Batches over two and four real processes: each reads or makes only the rows of its own devices."""

import numpy as np
import pytest
from support.oracle import slow
from support.two_processes import two_processes

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
    with two_processes(PROCESS, str(number), count=number, devices=8 // number) as processes:
        outputs = [process.communicate(timeout=120) for process in processes]
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


MIXTURE = """
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
MIXTURE_PROCESS = MIXTURE + """
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
    with two_processes(MIXTURE_PROCESS, "5", devices=4) as processes:
        outputs = [process.communicate(timeout=240) for process in processes]
    names: dict = {}
    exec(MIXTURE, names)
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
