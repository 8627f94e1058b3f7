"""Time of an optimizer's update, sharded over replicated, in one run, as a Markdown table.

    python scripts/bench/optimizers.py                                  # 8 simulated devices, minutes on 2 cores
    python scripts/bench/optimizers.py --optimizers adamw muon --rounds 40
    python scripts/bench/optimizers.py --target h100:8                  # and its communication and FLOPs on a target

The update alone runs: gradients, state and parameters are sharded as in the step at stage 0 (replicated) and at stage 3
(sharded; at stages 1 and 2 it is the same program, and its result is gathered afterwards). Machines are noisy, so the
two take turns, and the results are ratios of medians. Simulated devices share the machine's cores: replicated work runs
once for each of them, where real devices would run it in parallel, so read a ratio as work, not as time on
accelerators. --target compiles each sharded update ahead of time for a target topology, and adds bytes sent and FLOPs
of matrix products per device.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import zero_jax
from models import gpt2
from zero_jax.optim.presets import OPTIMIZERS
from zero_jax.xla import devices as xla_devices
from zero_jax.xla import hlo
from zero_jax.xla.events import totals
from zero_jax.xla.schedule import schedule

MUON = {"muon as partitioned": None, "muon, gather": "gather", "muon, owner": "owner"}


def kernels(params):
    return jax.tree.map_with_path(lambda path, _: "matrix" if "kernel" in str(path) else "rest", params)


def optimizer_of(name, mesh):
    if name in OPTIMIZERS:
        return OPTIMIZERS[name](learning_rate=1e-3, weight_decay=0.1)
    inner = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=lambda params: jax.tree.map(
        lambda leaf: optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1), params))
    if MUON[name]:
        inner = zero_jax.whole_matrices(optax.contrib.muon(1e-3), mesh, MUON[name])
    return optax.partition({"matrix": inner, "rest": optax.adamw(1e-3)}, kernels)


def update_of(name, stage, args, mesh):
    """(jitted update of (grads, state, params), their shapes and shardings, bytes of optimizer state per device)."""
    optimizer = optimizer_of(name, mesh)
    config = gpt2.Config(args.layers, args.width, 4, vocab_size=256, max_length=64)
    step = zero_jax.make_zero_train_step(gpt2.build(config), stage, optimizer=optimizer, mesh=mesh)
    layout = step.layout({key: jax.ShapeDtypeStruct((mesh.size, 64), jnp.int32) for key in ("inputs", "targets")})

    def update(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return grads, state, optax.apply_updates(params, updates)

    shapes = (layout.state.params, layout.state.opt_state, layout.state.params)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    state_bytes = sum(row.device_bytes for row in layout.placements() if row.name.startswith("opt_state"))
    return jax.jit(update, donate_argnums=(0, 1, 2), out_shardings=shardings), shapes, state_bytes


def filled(optimizer, shapes):
    """Random gradients and parameters and the state that the optimizer begins with, laid out like `shapes`."""
    leaves, tree = jax.tree.flatten(shapes[0])

    def make():
        grads, params = (jax.tree.unflatten(tree, [
            0.02 * jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), leaf.shape, leaf.dtype)
            for i, leaf in enumerate(leaves)]) for seed in range(2))
        return grads, optimizer.init(params), params

    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()


def timed(update, arrays, num):
    """(seconds of each update, the arrays after them)."""
    seconds = []
    for _ in range(num):
        start = time.perf_counter()
        arrays = jax.block_until_ready(update(*arrays))
        seconds.append(time.perf_counter() - start)
    return seconds, arrays


def compiled_for(name, args):
    """(bytes sent, FLOPs of products) per device of the sharded update, compiled for --target."""
    mesh = zero_jax.make_mesh(devices=xla_devices.target_devices(args.target))
    update, shapes, _ = update_of(name, 3, args, mesh)
    text = update.lower(*shapes).compile(
        compiler_options=xla_devices.compiler_options(mesh.devices.flat[0])).as_text()
    return hlo.communication_bytes(text), sum(totals(schedule(text)).flops.values())


def main():
    known = [*OPTIMIZERS, *MUON]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", default=known, help=f"names or prefixes: {', '.join(known)}")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--target", help="a target topology to compile for, such as h100:8")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = [name for name in known if name.startswith(tuple(args.optimizers))]
    if not names:
        parser.error(f"--optimizers {' '.join(args.optimizers)}: there are {', '.join(known)}")

    zero_jax.simulate_devices(args.devices)
    mesh = zero_jax.make_mesh()
    print(f"jax {jax.__version__}, optax {optax.__version__}, {args.devices} simulated devices, GPT-2 {args.layers} x "
          f"{args.width}, fp32, {args.rounds} rounds\n")
    header = ["optimizer", "replicated ms", "sharded ms", "sharded / replicated", "paired", "state MiB / device"]
    header += [f"{args.target}: MiB sent", "GFLOP"] if args.target else []
    print(f"| {' | '.join(header)} |\n{'| --- ' * len(header)}|")
    rows = []
    for name in names:
        variants, state_bytes, seconds = {}, {}, {0: [], 3: []}
        for stage in seconds:
            update, shapes, state_bytes[stage] = update_of(name, stage, args, mesh)
            _, arrays = timed(update, filled(optimizer_of(name, mesh), shapes), 2)  # compile, warm up
            variants[stage] = update, arrays
        for turn in range(args.rounds):
            for stage in sorted(variants, reverse=bool(turn % 2)):
                update, arrays = variants[stage]
                spent, arrays = timed(update, arrays, 1)
                variants[stage] = update, arrays
                seconds[stage] += spent
        whole, part = (statistics.median(spent) for spent in seconds.values())
        paired = statistics.median(b / a for a, b in zip(seconds[0], seconds[3], strict=True))
        rows.append({"optimizer": name, "replicated_ms": 1e3 * whole, "sharded_ms": 1e3 * part, "ratio": part / whole,
                     "paired": paired, "state_bytes": state_bytes[3], "state_bytes_replicated": state_bytes[0]})
        if args.target:
            rows[-1]["sent_bytes"], rows[-1]["flops"] = compiled_for(name, args)
        row = rows[-1]
        cells = [row["optimizer"], *(f"{row[key]:.1f}" for key in ("replicated_ms", "sharded_ms")),
                 *(f"{row[key]:.2f}" for key in ("ratio", "paired")), f"{row['state_bytes'] / 2**20:.2f}"]
        cells += [f"{row['sent_bytes'] / 2**20:.2f}", f"{row['flops'] / 1e9:.2f}"] if args.target else []
        print(f"| {' | '.join(cells)} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "jax": jax.__version__}, indent=1))


if __name__ == "__main__":
    main()
