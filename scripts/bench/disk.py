"""States on disk: the engine beside fio and TensorStore, and whole train steps with their memory.

    python scripts/bench/disk.py engine --folder /mnt/nvme --gib 2        # needs fio on the PATH for its row
    python scripts/bench/disk.py train --folder /mnt/nvme --million 300
    python scripts/bench/disk.py train --million 300 --stacked

`engine`: records of 16 MiB are read from one generation while those of the next are written, as in a step, checksums
and copies included; fio reads and writes blocks of that size in that mix (`libaio`, depth 4, direct); TensorStore has a
file for each record (its `file` driver: through the page cache, synced); `buffered` is our engine without O_DIRECT. The
rows are run in turn, `--rounds` times, and the medians printed: bytes read and written, over the time until they are
synced, and of each round's rate over that of fio beside it. Our engine and fio take `STEPS` steps, over files that were
written before: a file system takes longer for the first write of a block that is only reserved, as fio's are not.

`train`: a stack of 4096 x 4096 layers with Adam on one CPU device, fp32, each way in a process of its own: without
states (plain SGD, from `gradients` and `apply_gradients`), with the states in memory, and with them in files. Peak
resident memory is that of the steps after the first, and that of `init` is below the table; the time of a step's walk
over the files is that of the step less that of the one without states. `--stacked`: of one `nn.scan` over the layers,
at stage 3 and in bf16, in memory and in files. Below that are peak resident memory and time of a checkpoint that is
saved and restored after the steps.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

RECORD = 2**24
STEPS = 4
WIDTH = 4096


def engine(folder, gib, *, direct=True):
    """Seconds of a step's reads and writes, of `gib` each, when both generations were written before."""
    from zero_jax.disk import record_file
    from zero_jax.disk.generations import Generations
    from zero_jax.disk.record_file import RecordLayout
    from zero_jax.disk.streaming import Streaming

    if not direct:
        record_file.DIRECT = 0
    layout = RecordLayout()
    for number in range(int(gib * 2**30) // RECORD):
        layout.add([(f"leaf{number}", 0, (0,), (RECORD,), "uint8")])
    streaming = Streaming(Generations(Path(folder) / "states", layout))
    streaming.files.lock()
    streaming.files.create(1)
    block = np.random.default_rng(0).integers(0, 256, RECORD, np.uint8)

    def fill(record, buffer):
        record.parts[0].view(buffer)[...] = block

    for number in range(2):
        for record in layout.records:
            streaming.write(record, fill)
        streaming.finish()
        streaming.files.commit(number)
    start = time.perf_counter()
    for number in range(STEPS):
        with streaming.read(layout.records, lambda record, buffer: np.array(record.parts[0].view(buffer))) as ahead:
            for record, _ in zip(layout.records, ahead, strict=True):
                streaming.write(record, fill)
        streaming.finish()
        streaming.files.commit(2 + number)
    seconds = (time.perf_counter() - start) / STEPS
    streaming.close()
    return seconds


def fio(folder, gib):
    """Seconds that fio takes for as many bytes."""
    result = subprocess.run(
        ["fio", "--name=states", f"--filename={folder}/fio.bin", f"--size={2 * int(gib * 1024)}M", "--bs=16M",
         "--direct=1", "--ioengine=libaio", "--iodepth=4", "--rw=rw", "--end_fsync=1", f"--loops={STEPS}",
         "--output-format=json"],
        check=True, capture_output=True, text=True)
    job = json.loads(result.stdout[result.stdout.index("{"):])["jobs"][0]
    return job["job_runtime"] / 1000 / STEPS


def tensorstore(folder, gib):
    """Seconds of TensorStore's reads and writes."""
    import collections

    import tensorstore as ts

    store = ts.KvStore.open({"driver": "file", "path": f"{folder}/store/"}).result()
    block, count = np.random.default_rng(0).bytes(RECORD), int(gib * 2**30) // RECORD
    for number in range(count):
        store.write(f"old{number}", block).result()
    start, reads, writes = time.perf_counter(), collections.deque(), collections.deque()
    for number in range(count):
        reads.append(store.read(f"old{number}"))
        writes.append(store.write(f"new{number}", block))
        if len(reads) > 4:
            reads.popleft().result()
            writes.popleft().result()
    for future in (*reads, *writes):
        future.result()
    return time.perf_counter() - start


WAYS = {"ours, direct": lambda folder, gib: engine(folder, gib),
        "ours, buffered": lambda folder, gib: engine(folder, gib, direct=False),
        "fio": fio, "tensorstore": tensorstore}


def engines(folder, gib, rounds):
    """Prints GB/s of each way, each run in a process of its own."""
    rates = {way: [] for way in WAYS if way != "fio" or shutil.which("fio")}
    for _ in range(rounds):
        for way in rates:
            place = tempfile.mkdtemp(dir=folder)
            try:
                code = subprocess.run([sys.executable, __file__, "one", "--way", way, "--folder", place, "--gib",
                                       str(gib)], check=True, capture_output=True, text=True)
                rates[way].append(2 * gib * 2**30 / 1e9 / float(code.stdout.split()[-1]))
            finally:
                shutil.rmtree(place)
    print("| way | GB/s, reads and writes together | over fio | each round |\n| --- | --- | --- | --- |")
    for way, each in rates.items():
        over = [rate / beside for rate, beside in zip(each, rates.get("fio", ()), strict=False)]
        print(f"| {way} | {statistics.median(each):.2f} | {f'{statistics.median(over):.2f}' if over else ''} | "
              f"{', '.join(f'{rate:.2f}' for rate in each)} |")


def resident():
    """Resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most of `resident()` during a `with`."""

    def __enter__(self):
        self.bytes, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._ended.wait(0.005):
            self.bytes = max(self.bytes, resident())

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()


def stacked(layers):
    """A stack of layers, in one loop."""
    import flax.linen as nn
    import jax.numpy as jnp

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(WIDTH, use_bias=False)(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)()(x, None)[0]

    return Stack()


def checkpointed(step, state, batch, folder):
    """Peak memory and time of saving `state` and of restoring it."""
    import jax

    import zero_jax

    result = {}
    try:
        with zero_jax.Checkpoints(folder) as checkpoints:
            for what in ("save", "restore"):
                start = time.perf_counter()
                with Peak() as peak:
                    if what == "save":
                        checkpoints.save(step, state, wait=True)
                        jax.tree.map(lambda leaf: leaf.delete(), state)
                    else:
                        jax.block_until_ready(checkpoints.restore(step, batch).state)
                result |= {f"{what}_mib": peak.bytes / 2**20, f"{what}_seconds": time.perf_counter() - start}
    finally:
        shutil.rmtree(folder)
    return result


def train(way, folder, million, steps, buffer_mib, in_stack):
    """Prints, as JSON, peak memory and times of the steps after the first of one way."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    import zero_jax

    layers = max(1, round(million * 1e6 / WIDTH**2))
    model = stacked(layers) if in_stack else nn.Sequential([nn.Dense(WIDTH, use_bias=False) for _ in range(layers)])
    batch = {"inputs": jnp.ones((4, WIDTH)), "targets": jnp.ones((4, WIDTH))}
    offload = zero_jax.Offload(disk=folder, buffer_bytes=buffer_mib * 2**20) if way == "files" else None
    options = {"precision": "bf16", "remat": "full"} if in_stack else {}
    step = zero_jax.make_zero_train_step(
        model, 3 if in_stack else 2, **options, offload=offload,
        optimizer=optax.sgd(1e-3) if way == "none" else optax.adam(1e-4),
        loss=lambda model, batch: jnp.mean((model(batch["inputs"]) - batch["targets"]) ** 2))
    step.layout(batch)
    start = time.perf_counter()
    with Peak() as first:
        state, times, losses = jax.block_until_ready(step.init(jax.random.key(0), batch)), [], []
    init_seconds = time.perf_counter() - start
    with Peak() as peak:
        for number in range(steps + 1):
            if number == 1:
                peak.bytes = 0
            start = time.perf_counter()
            if way == "none":
                gradients, metrics, variables = step.gradients(state, batch)
                jax.block_until_ready(gradients)
                state, _ = step.apply_gradients(state, gradients, variables=variables)
                del gradients, variables
            else:
                state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            jax.block_until_ready(state)
            times.append(time.perf_counter() - start)
    checkpoint = {} if way == "none" else checkpointed(step, state, batch, Path(folder).parent / f"{way}-checkpoints")
    result = {"way": way, "parameters": step.layout().num_params, "peak_mib": peak.bytes / 2**20,
              "seconds": statistics.median(times[1:]), "losses": losses, "init_mib": first.bytes / 2**20,
              "init_seconds": init_seconds, **checkpoint}
    if way == "files":
        records = step._states.records.layout.records
        read = sum(block.reads.num_bytes for block in step._states.blocks if block.reads is not None)
        result |= {"read_bytes": read, "written_bytes": sum(each.num_bytes for each in records if not each.once),
                   "ring_mib": step._states.streaming.ring_bytes / 2**20,
                   "direct": step._states.generations._files[0].is_direct}
    print(json.dumps(result))


def trains(folder, million, steps, buffer_mib, ways, in_stack):
    """Prints the table of train steps."""
    rows = {}
    for way in ways:
        place = tempfile.mkdtemp(dir=folder)
        try:
            run = subprocess.run(
                [sys.executable, __file__, "one", "--way", way, "--folder", place, "--million", str(million),
                 "--steps", str(steps), "--buffer-mib", str(buffer_mib), *["--stacked"] * in_stack],
                check=False, capture_output=True, text=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "MALLOC_TRIM_THRESHOLD_": "0"})
            if run.returncode:
                print(f"{way}: {run.stderr[-2000:]}", file=sys.stderr)
                continue
            rows[way] = json.loads(run.stdout.splitlines()[-1])
        finally:
            shutil.rmtree(place)
    print("| states | parameters | peak resident MiB | step s | ring MiB | read GB | written GB |")
    print("| --- " * 7 + "|")
    for way, row in rows.items():
        moved = [f"{row.get(key, 0) / 1e9:.2f}" for key in ("read_bytes", "written_bytes")]
        print(f"| {way} | {row['parameters']:,} | {row['peak_mib']:,.0f} | {row['seconds']:.2f} | "
              f"{row.get('ring_mib', 0):,.0f} | {' | '.join(moved)} |")
    for way, row in rows.items():
        print(f"init, {way}: peak resident {row['init_mib']:,.0f} MiB, {row['init_seconds']:.1f} s with compiling")
    for way, row in rows.items():
        if "save_mib" in row:
            print(f"checkpoint, {way}: saved with {row['save_mib']:,.0f} MiB in {row['save_seconds']:.1f} s, restored "
                  f"with {row['restore_mib']:,.0f} MiB in {row['restore_seconds']:.1f} s")
    if {"none", "files"} <= rows.keys():
        none, files = rows["none"], rows["files"]
        extra = files["peak_mib"] - none["peak_mib"]
        seconds = files["seconds"] - none["seconds"]
        print(f"\nover no states: {extra:,.0f} MiB, ring {files['ring_mib']:,.0f} MiB; walk {seconds:.2f} s, "
              f"{(files['read_bytes'] + files['written_bytes']) / 1e9 / seconds:.2f} GB/s")
    if {"memory", "files"} <= rows.keys():
        print(f"losses of memory and files equal: {rows['memory']['losses'] == rows['files']['losses']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["engine", "train", "one"])
    parser.add_argument("--folder", default=".")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--million", type=float, default=300.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--buffer-mib", type=int, default=16)
    parser.add_argument("--ways", nargs="+")
    parser.add_argument("--stacked", action="store_true")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "engine":
        engines(options.folder, options.gib, options.rounds)
    elif options.what == "train":
        ways = options.ways or (["memory", "files"] if options.stacked else ["none", "memory", "files"])
        trains(options.folder, options.million, options.steps, options.buffer_mib, ways, options.stacked)
    elif options.way in WAYS:
        print(WAYS[options.way](options.folder, options.gib))
    else:
        train(options.way, options.folder, options.million, options.steps, options.buffer_mib, options.stacked)


if __name__ == "__main__":
    main()
