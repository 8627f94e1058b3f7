"""Time of saving and restoring a state beside plain orbax, in one run, and the bytes on disk, as a Markdown table.

    python scripts/bench/checkpoint.py                       # GPT-2 of 4 layers x 512 on 8 simulated devices
    python scripts/bench/checkpoint.py --layers 12 --width 768 --rounds 3 --out /a/disk

Plain orbax saves and loads the same arrays with the same options, without checksums and a manifest. Machines and disks
are noisy, so the two take turns, and the results are ratios of medians. "Blocked" is how long an asynchronous save
blocks the caller. Compilation is not timed.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from orbax.checkpoint.experimental import v1 as ocp

import zero_jax
from models import gpt2


def num_bytes(path):
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def timed(fun):
    start = time.perf_counter()
    result = fun()
    return time.perf_counter() - start, result


def compare(step, state, root, rounds):
    """{what: (seconds of each round by us, by plain orbax)}, bytes on disk of both."""
    times = {name: ([], []) for name in ("save", "save, blocked", "restore")}
    batch = {name: jax.ShapeDtypeStruct((step.mesh.size, 64), jnp.int32) for name in ("inputs", "targets")}
    checkpoints, abstract = zero_jax.Checkpoints(root / "ours", keep_last=None), step.abstract_state(batch)
    sizes = (0, 0)
    keys = jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, state)
    like = jax.tree.map(lambda leaf, plain: jax.eval_shape(jax.random.key_data, leaf).update(
        sharding=leaf.sharding) if _is_key(leaf) else leaf, abstract, keys)
    for number in range(-1, rounds):  # the first one compiles
        ours, plain = root / f"ours/{number + 1}", root / f"plain-{number}"

        def save_ours(at=number + 1, wait=True):
            return checkpoints.save(step, state, at=at, wait=wait)

        def save_plain(path=plain):
            return ocp.save(path, keys)

        turns = [(0, save_ours), (1, save_plain)]
        seconds = {"save": [0.0, 0.0], "save, blocked": [0.0, 0.0], "restore": [0.0, 0.0]}
        for who, save in turns if number % 2 else reversed(turns):
            seconds["save"][who], _ = timed(save)
        sizes = num_bytes(ours), num_bytes(plain)
        turns = [(0, lambda: checkpoints.restore(step, batch).state), (1, lambda path=plain: ocp.load(path, like))]
        for who, restore in turns if number % 2 else reversed(turns):
            seconds["restore"][who], result = timed(lambda restore=restore: jax.block_until_ready(restore()))
            del result
        shutil.rmtree(ours)
        shutil.rmtree(plain)
        seconds["save, blocked"][0], _ = timed(lambda at=number + 1: checkpoints.save(step, state, at=at))
        checkpoints.wait()
        seconds["save, blocked"][1], response = timed(lambda path=plain: ocp.save_async(path, keys))
        response.result()
        shutil.rmtree(ours)
        shutil.rmtree(plain)
        if number >= 0:
            for name, pair in seconds.items():
                for who in (0, 1):
                    times[name][who].append(pair[who])
    return times, sizes


def _is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where to save, since disks differ; default: a temporary folder")
    args = parser.parse_args()
    if jax.config.jax_platforms in (None, "", "cpu"):
        zero_jax.simulate_devices(8)
    config = gpt2.Config(args.layers, args.width, 8, vocab_size=256, max_length=64)
    step = zero_jax.make_zero_train_step(gpt2.build(config), args.stage, optimizer=optax.adamw(1e-3))
    batch = {name: jnp.zeros((jax.device_count(), 64), jnp.int32) for name in ("inputs", "targets")}
    state = step.init(jax.random.key(0), batch)
    # Moments of noise, as of a real run: zeros would compress to nothing.
    state = jax.block_until_ready(jax.jit(lambda state: jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape, leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, state), out_shardings=step.layout().shardings)(state))
    with tempfile.TemporaryDirectory(dir=args.out) as root:
        times, (ours, plain) = compare(step, state, Path(root), args.rounds)
    state_bytes = sum(row.bytes for row in step.layout().placements())
    print(f"jax {jax.__version__}, orbax-checkpoint {metadata.version('orbax-checkpoint')}, {jax.device_count()} "
          f"{jax.default_backend()} devices, stage {args.stage}, {state_bytes / 2**20:.0f} MiB of state, "
          f"{args.rounds} rounds\n")
    print("| what | ours, ms | plain orbax, ms | ratio | paired |\n| --- | --- | --- | --- | --- |")
    for name, (left, right) in times.items():
        a, b = statistics.median(left), statistics.median(right)
        paired = statistics.median(x / y for x, y in zip(left, right, strict=True))
        print(f"| {name} | {a * 1e3:.0f} | {b * 1e3:.0f} | {a / b:.2f} | {paired:.2f} |")
    print(f"| bytes on disk | {ours:,} | {plain:,} | {ours / plain:.3f} | |")


if __name__ == "__main__":
    main()
