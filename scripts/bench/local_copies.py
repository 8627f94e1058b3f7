"""What a copy on the host's disk costs, and what it saves at a restart, beside a checkpoint in a folder.

    python scripts/bench/local_copies.py --width 1024 --folder /tmp/shared --local /dev/shm/copies

Both on this machine: a shared folder over a network is slower.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import flax.linen as nn
import jax
import optax

import zero_jax
from zero_jax.checkpoint.local_copies import LocalCopies


def seconds(do, times: int) -> float:
    """The least of `times` calls."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(do())
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of the checkpoints; default: a temporary one")
    parser.add_argument("--local", type=Path, default=Path("/dev/shm/zero_jax_copies"))
    args = parser.parse_args()
    zero_jax.simulate_devices(args.devices)
    blocks = [nn.Dense(args.width) for _ in range(args.layers)]
    model = nn.Sequential([nn.Embed(256, args.width), *blocks, nn.Dense(256)])
    batch = {name: jax.numpy.zeros((args.devices, 8), int) for name in ("inputs", "targets")}
    step = zero_jax.make_zero_train_step(model, 3, optimizer=optax.adamw(1e-3))
    state = step.init(jax.random.key(0), batch)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    folder = args.folder or Path(tempfile.mkdtemp())
    checkpoints, copies, number = zero_jax.Checkpoints(folder, keep_last=2), LocalCopies(args.local, "bench"), [0]

    def save(wait: bool) -> None:
        number[0] += 1
        checkpoints.save(step, state, at=number[0], wait=wait)

    def copy(wait: bool) -> None:
        number[0] += 1
        copies.save(step, state, at=number[0], data=None, heads=checkpoints.heads())
        if wait:
            copies.wait()

    rows = []
    for name, do, restore in (
            ("checkpoint", save, lambda: checkpoints.restore(step, batch).state),
            ("local copy", copy, lambda: copies.restore(step, batch, heads=checkpoints.heads()).state)):
        do(True)  # compiles
        blocked = []
        for _ in range(args.times):
            start = time.perf_counter()
            do(False)
            blocked.append(time.perf_counter() - start)
            checkpoints.wait(), copies.wait()
        rows.append((name, min(blocked), seconds(lambda do=do: do(True), args.times), seconds(restore, args.times)))
    print(f"state of {size / 2**20:.0f} MiB on {args.devices} devices; seconds, least of {args.times}")
    print(f"{'':12}{'training waits':>16}{'until written':>16}{'restored in':>16}")
    for name, *values in rows:
        print(f"{name:12}" + "".join(f"{value:16.3f}" for value in values))
    checkpoints.close()
    copies.clear()
    shutil.rmtree(args.local)
    if args.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
