"""Step time of stages 0 to 3 beside other ways to train the same model, in one run.

    python scripts/bench/peers.py                                      # 8 simulated devices, minutes on 2 cores
    python scripts/bench/peers.py --devices 2 --torch-python PATH      # and torch's FSDP2, in as many processes (gloo)
    python scripts/bench/peers.py --devices 2 --torch-python PATH --torch fsdp2 deepspeed

Peers: plain jit data parallelism and plain annotation of arrays, Flax's recipe for NNX (`nnx.jit`,
`nnx.get_partition_spec` in place of a layout, `with_sharding_constraint` on model and optimizer: arrays sharded as the
second of these), and with --torch-python, an interpreter that has torch, `fully_shard` on every block of the same
decoder, not compiled, and DeepSpeed's stage 3 with torch's AdamW. GPT-2 in float32 with AdamW on the same tokens.

The variants take turns, so that a busy machine slows all of them. A ratio is that of plain jit's step time over the
variant's, the fastest step of a round each, the median over the rounds: above 1 the variant is faster than plain jit.
Beside it the same of the CPU time of this process, all threads of all simulated devices: it does not count what other
processes took, nor the waits of devices for each other, which on a busy machine are most of a step's time.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plain_step import plain_step

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax.layout.layout import choose_spec

BASE = "plain jit data parallelism"
TORCH = {"fsdp2": "torch FSDP2, gloo", "deepspeed": "DeepSpeed stage 3, gloo"}
"""Name of the variant by what `torch_worker.py` calls it."""


def hand_written(model, optimizer, mesh, batch, *, annotated):
    """A step with jit alone; `annotated`: every array is sharded as at stage 3, with nothing else specified."""
    params = jax.eval_shape(model.init, jax.random.key(0), batch["inputs"])["params"]
    place = lambda leaf: NamedSharding(mesh, choose_spec(leaf.shape, dict(mesh.shape)) if annotated else P())  # noqa: E731
    shardings = jax.tree.map(place, (params, jax.eval_shape(optimizer.init, params)))

    def init():
        params = model.init(jax.random.key(0), batch["inputs"])["params"]
        return params, optimizer.init(params)

    jitted = jax.jit(plain_step(model, optimizer), donate_argnums=0,
                     in_shardings=(shardings, NamedSharding(mesh, P("data"))),
                     out_shardings=(shardings, NamedSharding(mesh, P())))
    return jitted, jax.jit(init, out_shardings=shardings)()


def timed(step, state, batch, num_steps):
    """((seconds of each step, CPU seconds of each), the last state)."""
    spent = []
    for _ in range(num_steps):
        start = time.perf_counter(), time.process_time()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        spent.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return tuple(zip(*spent, strict=True)), state


def call_overhead(step, state, batch, num_calls=200):
    """Median microseconds of a call of the step over calling its compiled function, dispatch only."""
    compiled = step._jit(batch)
    spent = {"step": [], "compiled": []}
    calls = [("step", step), ("compiled", compiled)]
    for i in range(num_calls):
        for name, call in calls if i % 2 else reversed(calls):
            start = time.perf_counter()
            state, metrics = call(state, batch)
            spent[name].append(time.perf_counter() - start)
            jax.block_until_ready((state, metrics))
    return 1e6 * (statistics.median(spent["step"]) - statistics.median(spent["compiled"]))


def flax_recipe(config, mesh, tx):
    """(step, state) of Flax's own recipe, in which XLA's partitioner chooses the collectives."""
    make = gpt2_nnx.build(config)

    @nnx.jit
    def create():
        model = make(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        state = nnx.state((model, optimizer))
        sharded = jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(
            leaf, NamedSharding(mesh, choose_spec(leaf.shape, dict(mesh.shape)))), state)
        nnx.update((model, optimizer), sharded)
        return model, optimizer

    @nnx.jit
    def train(model, optimizer, batch):
        def loss_of(model):
            logits = model(batch["inputs"]).astype(np.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    model, optimizer = create()

    def step(state, batch):
        metrics = train(model, optimizer, batch)
        jax.block_until_ready(nnx.state(model))
        return state, metrics

    return step, ()


class Torch:
    """Processes that train with a library of torch's; `steps` runs some on all of them, and returns seconds of each."""

    def __init__(self, python, library, config, rows, num_processes):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        worker = Path(__file__).with_name("torch_worker.py")
        shape = [config.num_layers, config.width, config.num_heads, config.vocab_size, config.max_length, rows]
        self.processes = [subprocess.Popen(
            [python, str(worker), library, str(rank), str(num_processes), str(port), json.dumps(shape)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            for rank in range(num_processes)]

    def steps(self, number):
        for process in self.processes:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        return [self._answer(process) for process in self.processes][0]

    def _answer(self, process):
        """The seconds of its steps; what the libraries print is none."""
        for line in process.stdout:
            if line.startswith("["):
                with contextlib.suppress(json.JSONDecodeError):
                    return json.loads(line)
        sys.exit("A process of torch ended: its error is above.")

    def close(self):
        for process in self.processes:
            process.stdin.close()
            process.wait(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps of each variant in a round")
    parser.add_argument("--torch-python", default=None, help="an interpreter that has torch")
    parser.add_argument("--torch", nargs="+", default=["fsdp2"], choices=list(TORCH))
    parser.add_argument("--json", default=None)
    args = parser.parse_args()

    zero_jax.simulate_devices(args.devices)
    mesh = zero_jax.make_mesh()
    config = gpt2.Config(args.layers, args.width, 4, vocab_size=256, max_length=args.seq_len)
    model, tx = gpt2.build(config), optax.adamw(1e-3)
    tokens = np.random.default_rng(0).integers(0, 256, (args.batch, args.seq_len + 1)).astype(np.int32)
    batch = jax.device_put({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, NamedSharding(mesh, P("data")))

    variants = {BASE: hand_written(model, tx, mesh, batch, annotated=False),
                "plain jit, arrays annotated": hand_written(model, tx, mesh, batch, annotated=True),
                "Flax's recipe for NNX": flax_recipe(config, mesh, tx)}
    for stage in range(4):
        step = zero_jax.make_zero_train_step(model, stage, optimizer=tx, mesh=mesh)
        variants[f"zero_jax stage {stage}"] = step, step.init(jax.random.key(0), batch)
    workers = {TORCH[each]: Torch(args.torch_python, each, config, args.batch // args.devices, args.devices)
               for each in args.torch} if args.torch_python else {}
    seconds = {name: [] for name in [*variants, *workers]}  # (of the clock, of the CPU)
    for number in range(args.rounds + 1):  # the first compiles
        for name in seconds:
            if name in variants:
                step, state = variants[name]
                spent, state = timed(step, state, batch, args.steps)
                variants[name] = step, state
            else:
                spent = workers[name].steps(args.steps), [float("nan")]  # of other processes
            seconds[name] += [tuple(min(each) for each in spent)] * (number > 0)
    for each in workers.values():
        each.close()

    rows = []
    for name, spent in seconds.items():
        (median, cpu), (speed, cpu_speed) = (
            np.median(each, axis=0).tolist() for each in (np.array(spent), np.array(seconds[BASE]) / spent))
        rows.append({"variant": name, "median_ms": 1e3 * median, "speed": speed, "cpu_ms": 1e3 * cpu,
                     "cpu_speed": cpu_speed})
    print(f"jax {jax.__version__}, {args.devices} simulated devices, GPT-2 {args.layers} x {args.width}, "
          f"batch {args.batch} x {args.seq_len}, fp32, {args.rounds} rounds; "
          f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| variant | median ms | speed over plain jit | CPU ms | by CPU time |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row['variant']} | {row['median_ms']:.1f} | {row['speed']:.3f} | {row['cpu_ms']:.1f} "
              f"| {row['cpu_speed']:.3f} |")
    tiny = gpt2.build(dataclasses.replace(gpt2.PRESETS["tiny"], max_length=8))
    step = zero_jax.make_zero_train_step(tiny, 3, mesh=zero_jax.make_mesh(1))
    small = {name: np.zeros((1, 8), np.int32) for name in ("inputs", "targets")}
    overhead = call_overhead(step, step.init(jax.random.key(0), small), small)
    print(f"A call of a step takes {overhead:.1f} microseconds more than one of its compiled function.")
    if args.json:
        found = {"rows": rows, "overhead_us": overhead, "jax": jax.__version__}
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
