"""Kills runs with SIGKILL at random moments and compares what they leave with a run that was not killed.

    python scripts/reliability/crash_test.py    # 200 kills while saving, then 10 runs of 3 kills each: 40 minutes
    python scripts/reliability/crash_test.py --kills 20 --runs 2

A kill while saving: a process saves after every step, at stages 0 to 3 in turn, blocking or asynchronously, until it is
killed. Then the last checkpoint is restored at a random stage on another number of devices. It must be at least the
last one that was complete, and every leaf must be bitwise that of an undisturbed run after as many steps.

A run of kills: 200 steps with checkpoints every 10, killed three times at random moments and resumed each time. Losses
of every step, the batches that gave them, and the final state must be bitwise those of one undisturbed run.
Exits 1 on any difference.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax
from zero_jax.data.batches import Batches
from zero_jax.tree import named_leaves

DEVICES, WORDS, LENGTH, ROWS = 8, 61, 8, 8
TOKENS = np.random.default_rng(0).integers(0, WORDS, 20_000).astype(np.uint8)
BATCH = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for name in ("inputs", "targets")}


def make_step(stage, devices, width):
    """A step with some uneven shapes; a larger `width` makes saving take longer."""
    model = nn.Sequential([nn.Embed(WORDS, width), nn.Dense(width + 3), nn.gelu, nn.Dense(WORDS)])
    return zero_jax.make_zero_train_step(
        model, stage, optimizer=optax.adamw(1e-3), ema=0.9, mesh=zero_jax.make_mesh(devices=jax.devices()[:devices]),
        precision="bf16" if stage in (1, 2) else None)


def batches_for(step):
    return Batches(TOKENS, batch_size=ROWS, length=LENGTH, seed=1, sharding=step.batch_sharding)


def fingerprint(step, state):
    """A hash over all leaves in their unpadded shapes: SHA-256, independent of the checksum that is tested."""
    digest, stored_shapes = hashlib.sha256(), dict(named_leaves(step.layout().stored_shapes))
    for name, leaf in named_leaves(state):
        if not name.startswith("weights"):
            data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            true = stored_shapes[name].load(np.asarray(data))
            digest.update(f"{name} {leaf.dtype} {true.shape}".encode() + true.tobytes())
    return digest.hexdigest()


def child(folder, stage, steps, every, sync, width):
    """A run that resumes from the last checkpoint in `folder`, if there is one, and logs what it does there."""
    step = make_step(stage, DEVICES, width)
    batches, log = batches_for(step), (folder / "log.jsonl").open("a")

    def log_row(**row):
        log.write(json.dumps(row) + "\n")
        log.flush()

    with zero_jax.Checkpoints(folder / "checkpoints", keep_last=2) as checkpoints:
        after = 0
        if checkpoints.steps():
            restored = checkpoints.restore(step, BATCH)
            state, after = restored.state, restored.step
            batches.restore(restored.data)
        else:
            state = step.init(jax.random.key(0), BATCH)
        log_row(resumed=after)
        pending = None
        for number in range(after + 1, steps + 1):
            batch = next(batches)
            state, metrics = step(state, batch)
            log_row(step=number, loss=float(metrics["loss"]).hex(),
                 batch=zlib.crc32(np.asarray(batch["inputs"]).tobytes()))
            if number % every == 0 or number == steps:
                checkpoints.save(step, state, at=number, data=batches.state(), wait=sync)
                if sync or pending:
                    log_row(complete=number if sync else pending)  # the previous save ends before this one starts
                pending = number
        checkpoints.wait()
        log_row(complete=steps, final=fingerprint(step, state))


def start(folder, **options):
    folder.mkdir(parents=True, exist_ok=True)
    args = [f"--{name}={value}" for name, value in options.items()]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path[1:] + [str(Path(__file__).parents[2])]))}
    return subprocess.Popen([sys.executable, __file__, "--child", str(folder), *args], env=env,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def rows(folder):
    """What the child logged, without a line that the kill cut off."""
    path = folder / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def kill(process, folder, rng, *, until, seconds):
    """Kills `process` a random time after it has logged `until` rows; raises if it failed by itself."""
    deadline = time.monotonic() + 300
    while len(rows(folder)) < until and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(rng.uniform(0, seconds))
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    if process.returncode != -signal.SIGKILL and process.returncode != 0:
        raise RuntimeError(f"the run failed by itself: {errors.decode()[-2000:]}")


def references(stage, steps, width):
    """The fingerprint of the state after each step of an undisturbed run."""
    step = make_step(stage, DEVICES, width)
    batches, state, prints = batches_for(step), step.init(jax.random.key(0), BATCH), []
    for _ in range(steps):
        state, _ = step(state, next(batches))
        prints.append(fingerprint(step, state))
    return prints


def kills_while_saving(root, number, seed, width, steps=300):
    """(how many of `number` kills left something unfinished, faults)."""
    rng, known, targets = random.Random(seed), {}, {}
    unfinished, faults = 0, []
    for i in range(number):
        stage, sync = i % 4, i // 4 % 2
        folder = root / f"kill-{i}"
        process = start(folder, stage=stage, steps=steps, every=1, sync=sync, width=width)
        kill(process, folder, rng, until=rng.choice((1, 4, 10)), seconds=0.4)
        complete = [row["complete"] for row in rows(folder) if "complete" in row]
        path = folder / "checkpoints"
        left = [each.name for each in path.iterdir()] if path.exists() else []
        unfinished += len(left) > len(zero_jax.Checkpoints(path).steps())
        checkpoints = zero_jax.Checkpoints(path)
        steps_found = checkpoints.steps()
        if (steps_found[-1] if steps_found else 0) < max(complete, default=0):
            faults.append(f"kill {i}: {max(complete)} was complete, and there are {steps_found}")
        if not steps_found:
            print(f"kill {i:3d}: stage {stage}, before the first checkpoint was complete", flush=True)
            shutil.rmtree(folder)
            continue
        if stage not in known or len(known[stage]) < steps_found[-1]:
            known[stage] = references(stage, steps_found[-1] + 40, width)
        target = rng.randrange(4), rng.choice((1, 2, 4))
        target = (target[0] if (target[0] in (1, 2)) == (stage in (1, 2)) else stage, target[1])
        step = targets.setdefault(target, make_step(*target, width))
        for at in steps_found:
            try:
                restored = checkpoints.restore(step, BATCH, at=at)
                if fingerprint(step, restored.state) != known[stage][at - 1] or restored.data["position"] != at:
                    faults.append(f"kill {i}: checkpoint {at} of stage {stage} is another on {target}")
            except zero_jax.CheckpointError as error:
                faults.append(f"kill {i}: {error}")
        print(f"kill {i:3d}: stage {stage}, {'sync ' if sync else 'async'}, complete {max(complete, default=0):3d}, "
              f"found {steps_found}, left {len(left) - len(steps_found)}, restored at stage {target[0]} on {target[1]} "
              "devices", flush=True)
        shutil.rmtree(folder)
    return unfinished, faults


def run_of_kills(root, seed, width, *, kills=3, steps=200):
    """The faults of one run that is killed `kills` times."""
    rng, options = random.Random(seed), {"stage": seed % 4, "steps": steps, "every": 10, "sync": 0, "width": width}
    whole, killed = root / f"whole-{seed}", root / f"killed-{seed}"
    process = start(whole, **options)
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(errors.decode()[-2000:])
    for number in range(kills):
        before = len(rows(killed))
        process = start(killed, **options)
        kill(process, killed, rng, until=before + rng.randrange(1, steps // (kills + 1) + 10), seconds=0.2)
        last = max((row.get("step", 0) for row in rows(killed)), default=0)
        print(f"run {seed}: kill {number + 1} after step {last}", flush=True)
    process = start(killed, **options)
    _, errors = process.communicate()
    if process.returncode:
        return [f"run {seed} does not resume: {errors.decode()[-2000:]}"]
    expected, found = ({row["step"]: (row["loss"], row["batch"]) for row in rows(folder) if "step" in row}
                       for folder in (whole, killed))
    faults = []
    for row in rows(killed):  # steps that were taken twice, too
        if "step" in row and (row["loss"], row["batch"]) != expected[row["step"]]:
            faults.append(f"run {seed}: step {row['step']} has loss and batch {row['loss'], row['batch']}, and "
                          f"{expected[row['step']]} without kills")
    if found.keys() != expected.keys() or len(expected) != steps:
        faults.append(f"run {seed}: {len(found)} steps of {len(expected)}")
    if rows(whole)[-1] != rows(killed)[-1] or "final" not in rows(whole)[-1]:
        faults.append(f"run {seed}: the final states differ")
    shutil.rmtree(whole)
    shutil.rmtree(killed)
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=67, help="of the model")
    for name in ("stage", "steps", "every", "sync"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    zero_jax.simulate_devices(DEVICES)
    if args.child:
        child(args.child, args.stage, args.steps, args.every, bool(args.sync), args.width)
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        unfinished, faults = kills_while_saving(Path(root), args.kills, args.seed, args.width)
        for seed in range(args.seed, args.seed + args.runs):
            faults += run_of_kills(Path(root), seed, args.width)
    print("\n".join(faults))
    print(f"{args.kills} kills while saving, {unfinished} of them inside of a save or a removal; "
          f"{args.runs} runs of 3 kills; {len(faults)} faults; {time.monotonic() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
