"""CPU time to trace and to compile a step of an unrolled model, over that of plain jit, as a Markdown table.

    python scripts/bench/compile_time.py                                       # 8 simulated devices
    python scripts/bench/compile_time.py --target h100:8 --layers 12 24 48     # minutes on 2 cores; no accelerator

GPT-2 of small width with every layer written out, trained by AdamW on one sequence for each device, in Linen. Plain jit
is data parallelism: replicated parameters, a batch that is split, and no library. Both are traced and compiled anew in
every round, in turns, in this one process, after a round of 2 layers that is not counted; a ratio is the median of the
rounds' ratios. CPU time is that of all threads: unlike seconds on the clock it hardly depends on what else runs.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plain_step import plain_step

import zero_jax
from models import gpt2
from zero_jax.xla.devices import compiled_for, target_devices

HEADER = """| target, stage, layers | trace, s | plain jit | ratio | compile, s | plain jit | ratio | both, ratio |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def plain(model, mesh, batch):
    """Plain jit's step, lowered."""
    optimizer = optax.adamw(3e-4)
    params = jax.eval_shape(model.init, jax.random.key(0), batch["inputs"])["params"]
    state = params, jax.eval_shape(optimizer.init, params)
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    jitted = jax.jit(plain_step(model, optimizer), donate_argnums=0, in_shardings=(everywhere, split),
                     out_shardings=everywhere)
    return jitted.lower(state, batch)


def zero(stage):
    """Our step at `stage`, lowered."""
    def lowered(model, mesh, batch):
        return zero_jax.make_zero_train_step(model, stage, mesh=mesh).lower(batch)

    return lowered


def seconds(lower, config, mesh):
    """CPU seconds (of the trace with the lowering, of the compilation) of a step that nothing has seen before."""
    tokens = jax.ShapeDtypeStruct((mesh.size, config.max_length), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    jax.clear_caches()
    start = time.process_time()
    lowered = lower(gpt2.build(config), mesh, batch)
    traced = time.process_time()
    compiled_for(lowered, mesh.devices.flat[0], {})
    return traced - start, time.process_time() - traced


def row(name, stage, config, mesh, rounds):
    """A row of the table."""
    times = []
    for number in range(rounds):
        pair = [("zero", zero(stage)), ("plain", plain)]
        found = {kind: seconds(lower, config, mesh) for kind, lower in (pair if number % 2 else pair[::-1])}
        times.append((*found["zero"], *found["plain"]))
    trace, compile_, plain_trace, plain_compile = (statistics.median(each) for each in zip(*times, strict=True))
    ratios = [statistics.median(each) for each in zip(
        *((ours[0] / ours[2], ours[1] / ours[3], sum(ours[:2]) / sum(ours[2:])) for ours in times), strict=True)]
    cells = (f"{name}, {stage}, {config.num_layers}", f"{trace:.1f}", f"{plain_trace:.1f}", f"{ratios[0]:.2f}",
             f"{compile_:.1f}", f"{plain_compile:.1f}", f"{ratios[1]:.2f}", f"{ratios[2]:.2f}")
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a target topology, as h100:8; default: 8 simulated devices")
    parser.add_argument("--stages", nargs="+", type=int, default=[3])
    parser.add_argument("--layers", nargs="+", type=int, default=[12, 24, 48])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.target is None:
        zero_jax.simulate_devices(8)
    mesh = zero_jax.make_mesh(devices=target_devices(args.target) if args.target else None)

    def config(layers):
        return gpt2.Config(layers, args.width, 4, vocab_size=512, max_length=64, scan_layers=False)

    for lower in (plain, zero(args.stages[0])):
        seconds(lower, config(2), mesh)
    print(HEADER)
    for stage in args.stages:
        for layers in args.layers:
            print(row(args.target or "simulated", stage, config(layers), mesh, args.rounds), flush=True)


if __name__ == "__main__":
    main()
