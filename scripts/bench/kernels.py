"""Each instruction of a training step on one GPU: the time that it took beside what `zero_jax.plan` predicts of it.

    python scripts/bench/kernels.py 124m:16 --measure FOLDER                 # on the GPU: writes the two files
    python scripts/bench/kernels.py --table FOLDER/124m_16_stage-3.json      # anywhere

Measured: the mean over steps of each instruction's time by CUPTI, as `jax.profiler` records it, without CUDA graphs
(they hide which instruction a kernel is of). Predicted: of the same compiled program, by typical
rates and by those of the chip's file. The step less the sum of its kernels is what launches and gaps cost.
"""

import argparse
import gzip
import json
import os
import re
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


CLASSES = (  # of an instruction: the first whose pattern is found in "opcode target kernel dtypes"
    ("attention forward", "forward"), ("attention backward", "backward"), ("product, odd rows", " odd "),
    ("product, cuBLAS", "cublas"), ("product, Triton", "fusion.* (bf16|f32)"), ("fusion, asynchronous", "fusion-start"),
    ("fusion", "fusion"), ("copy", "copy"))


def table(path):
    """By class of instruction: launches, and milliseconds as predicted and as measured, as Markdown."""
    import numpy as np

    from zero_jax.xla.chip import Rates
    from zero_jax.xla.events import Loop, Work
    from zero_jax.xla.live_chip import chip_of_kind
    from zero_jax.xla.parser import parse
    from zero_jax.xla.schedule import schedule
    from zero_jax.xla.targets import Target
    from zero_jax.xla.timing import predict

    found = json.loads(path.read_text())
    with gzip.open(path.with_suffix(".hlo.gz"), "rt") as file:
        module = parse(file.read())
    instructions = {name: each for body in module.computations.values() for name, each in body.instructions.items()}
    chip, works = chip_of_kind(found["device"]), []

    def walk(events, times):
        for event in events:
            if isinstance(event, Loop):
                walk(event.body, times * event.trips)
            elif isinstance(event, Work):
                works.append((event, times))

    def seconds(events):
        """By typical rates, and by the chip's."""
        target = Target("", chip, (1, 1))
        return np.array([predict(events, target, [(0, 0)], tokens=0, model_flops=0, rates=rates).seconds
                         for rates in (Rates(), chip.rates)])

    events = schedule(module)
    walk(events, 1)
    measured = {name: each["seconds"] for name, each in found["kernels"].items()}
    rows = defaultdict(lambda: [0, np.zeros(2), 0.0])
    for work, times in works:
        instruction = instructions[work.name]
        about = f"{work.opcode} {instruction.custom_call_target} {work.kernel} {' '.join(work.flops)}"
        name = next((name for name, pattern in CLASSES if re.search(pattern, about)), "other")
        row = rows[name]
        row[0] += times
        row[1] += times * seconds([work])
        row[2] += measured.pop(work.name, 0.0)
    rows["fusion, asynchronous"][2] += sum(measured.values())  # measured under names that the program does not have
    print(f"| {path.stem} | launches | typical rates, ms | the chip's rates, ms | measured ms |")
    print("| --- " * 5 + "|")
    for name, (launches, predicted, took) in sorted(rows.items(), key=lambda item: -item[1][2]):
        print(f"| {name} | {launches:,} | {' | '.join(f'{each * 1e3:.2f}' for each in predicted)} | {took * 1e3:.2f} |")
    busy = sum(each["seconds"] for each in found["kernels"].values())
    print(f"| between kernels | | | | {(found['step'] - busy) * 1e3:.2f} |")
    launches = sum(row[0] for row in rows.values())
    predicted = " | ".join(f"{each * 1e3:.2f}" for each in seconds(events))
    print(f"| the step | {launches:,} | {predicted} | {found['step'] * 1e3:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="NAME:BATCH")
    parser.add_argument("--row", nargs="+", default=["stage-3"])
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--measure", metavar="FOLDER", type=Path)
    parser.add_argument("--table", metavar="FILE", type=Path, nargs="+", default=[], help="what --measure wrote")
    args = parser.parse_args()
    for path in args.table:
        table(path)
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    for model in args.models:
        for row in args.row:
            measure(model, row, args.seq_len, args.measure)


if __name__ == "__main__":
    main()
