"""Ten thousand tiny steps with checkpoints: memory stays flat, the step compiles once, retention keeps what it should.

    python scripts/reliability/soak.py                       # 10,000 steps, a checkpoint every 100
    python scripts/reliability/soak.py --steps 1000

Prints resident memory as it goes. Exits 1 if memory grows by more than --slack MiB after the first fifth of the steps,
if anything compiles after the second checkpoint, or if other checkpoints remain than keep_last and keep_every say.
"""

import argparse
import os
import sys
import tempfile
import time

import flax.linen as nn
import jax
import numpy as np
import optax

import zero_jax
from zero_jax.data.batches import Batches

KEEP_LAST, KEEP_EVERY, SAVES = 3, 10, 100


def resident_mib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(root, steps, every, width):
    """(resident MiB at each tenth, names of late compilations, steps of the checkpoints, steps expected)."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None)
    model = nn.Sequential([nn.Embed(61, width), nn.Dense(width + 3), nn.gelu, nn.Dense(61)])
    step = zero_jax.make_zero_train_step(model, 3, optimizer=optax.adamw(1e-3), ema=0.9)
    tokens = np.random.default_rng(0).integers(0, 61, 100_000).astype(np.uint8)
    batches = Batches(tokens, batch_size=8, length=8, sharding=step.batch_sharding)
    state, memory = step.init(jax.random.key(0), batches[0]), []
    started = time.monotonic()
    with zero_jax.Checkpoints(root, keep_last=KEEP_LAST, keep_every=KEEP_EVERY * every) as checkpoints:
        for number in range(1, steps + 1):
            state, metrics = step(state, next(batches))
            if number % 50 == 0:
                float(metrics["loss"])  # waits for the devices
            if number % every == 0:
                checkpoints.save(step, state, at=number, data=batches.state())
            if number == 2 * every:
                jax.block_until_ready(state)
                compiled.clear()
            if number % (steps // 10) == 0:
                memory.append(resident_mib())
                print(f"step {number:6d}: {memory[-1]:7.1f} MiB, checkpoints {checkpoints.steps()[-KEEP_LAST:]}, "
                      f"{time.monotonic() - started:.0f} s", flush=True)
        late = list(compiled)
        checkpoints.wait()
        saved_steps = checkpoints.steps()
        restored = checkpoints.restore(step, batches[0])
        assert restored.step == steps and restored.data["position"] == steps
    all_saves = range(every, steps + 1, every)
    expected = [at for at in all_saves if at in all_saves[-KEEP_LAST:] or at % (KEEP_EVERY * every) == 0]
    return memory, late, saved_steps, expected


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, help=f"steps between checkpoints; default: {SAVES} checkpoints in all")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--slack", type=float, default=10.0, help="MiB")
    args = parser.parse_args()
    zero_jax.simulate_devices(8)
    every = args.every or max(1, args.steps // SAVES)
    with tempfile.TemporaryDirectory() as root:
        memory, late, saved_steps, expected = soak(root, args.steps, every, args.width)
    growth = memory[-1] - memory[1]
    print(f"{args.steps} steps, {args.steps // every} checkpoints: memory grew by {growth:.1f} MiB since the first "
          f"fifth, {len(late)} programs compiled after the second checkpoint, "
          f"checkpoints {'as the policy says' if saved_steps == expected else f'{saved_steps}, expected {expected}'}")
    return 0 if growth <= args.slack and not late and saved_steps == expected else 1


if __name__ == "__main__":
    sys.exit(main())
