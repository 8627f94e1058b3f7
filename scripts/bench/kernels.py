"""Each instruction of a training step on one GPU: the time that it took beside what `zero_jax.plan` predicts of it.

    python scripts/bench/kernels.py 124m:16 --measure FOLDER                 # on the GPU: writes the two files
    python scripts/bench/kernels.py --table FOLDER/124m_16_stage-3.json      # anywhere

Measured: the median over steps of each instruction's time by CUPTI, as `jax.profiler` records it, without CUDA graphs
(they hide which instruction a kernel is of). Predicted: FLOPs and HBM bytes of the same compiled program, by
`zero_jax.xla.schedule`. The difference of the step and the sum of its kernels is what launches and gaps cost.
"""

import argparse
import gzip
import json
import os
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

NUM_STEPS = 5


def measure(model, row, length, folder):
    """Writes the step's HLO and, as JSON, seconds by instruction, of the step, and of the steps without a profiler."""
    import jax
    import optax
    from gpu import ROWS, built, config_and_batch, median_seconds

    import zero_jax

    config, batch = config_and_batch(model, length)
    mesh = zero_jax.make_mesh(1)
    stage, options = ROWS[row]
    step = zero_jax.make_zero_train_step(
        built(config, mesh), stage, mesh=mesh, precision="bf16", optimizer=optax.adamw(1e-4), **options)
    state = step.init(jax.random.key(0), batch)

    def run():
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    alone = median_seconds(run, 3, 10)
    with tempfile.TemporaryDirectory() as traces:
        with jax.profiler.trace(traces):
            start = time.perf_counter()
            for _ in range(NUM_STEPS):
                run()
            traced = (time.perf_counter() - start) / NUM_STEPS
        kernels = kernel_seconds(next(Path(traces).rglob("*.xplane.pb")))
    name = f"{model.replace(':', '_')}_{row}"
    with gzip.open(folder / f"{name}.hlo.gz", "wt") as file:
        file.write(step.compiled_step(batch).text)
    (folder / f"{name}.json").write_text(json.dumps({
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "step": alone, "traced_step": traced,
        "kernels": kernels}, indent=1))
    print(name, "step", alone, "traced", traced, "busy", sum(each["seconds"] for each in kernels.values()), flush=True)


def kernel_seconds(path):
    """By instruction: seconds and launches of one step, and the kernels' names; by CUPTI's lines of the GPU."""
    from jax.profiler import ProfileData

    found = defaultdict(lambda: {"seconds": 0.0, "launches": 0.0, "names": Counter()})
    for plane in ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {key: value for key, value in event.stats}
                each = found[str(stats.get("hlo_op", event.name))]
                each["seconds"] += event.duration_ns * 1e-9 / NUM_STEPS
                each["launches"] += 1 / NUM_STEPS
                each["names"][event.name[:80]] += 1
    return {op: {**each, "names": [name for name, _ in each["names"].most_common(3)]} for op, each in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="NAME:BATCH")
    parser.add_argument("--row", nargs="+", default=["stage-3"])
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--measure", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    for model in args.models:
        for row in args.row:
            measure(model, row, args.seq_len, args.measure)


if __name__ == "__main__":
    main()
