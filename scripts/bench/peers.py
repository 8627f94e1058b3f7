"""Step time of stages 0 to 3 beside other ways to train the same model, in one run.

    python scripts/bench/peers.py                                      # 8 simulated devices, minutes on 2 cores
    python scripts/bench/peers.py --devices 2 --torch-python PATH      # and torch's FSDP2, in as many processes (gloo)

Peers: plain jit data parallelism and plain annotation (`scripts/bench/stages.py`), Flax's recipe for NNX (`nnx.jit`,
`nnx.get_partition_spec` in place of a layout, `with_sharding_constraint` on model and optimizer: arrays sharded as the
second of these), and with --torch-python, an interpreter that has torch, `fully_shard` on every block of the same
decoder, not compiled. GPT-2 in float32 with AdamW on the same tokens.

The variants take turns, so that a busy machine slows all of them. A ratio is that of plain jit's step time over the
variant's, the fastest step of a round each, the median over the rounds: above 1 the variant is faster than plain jit.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from stages import hand_written, timed

import zero_jax
from models import gpt2, gpt2_nnx
from zero_jax.sharding.layout import choose_spec

BASE = "plain jit data parallelism"


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
    """Processes that train with FSDP2; `steps` runs some on all of them, and returns the seconds of each."""

    def __init__(self, python, config, rows, num_processes):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        worker = Path(__file__).with_name("torch_worker.py")
        shape = [config.num_layers, config.width, config.num_heads, config.vocab_size, config.max_length, rows]
        self.processes = [subprocess.Popen(
            [python, str(worker), str(rank), str(num_processes), str(port), json.dumps(shape)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            for rank in range(num_processes)]

    def steps(self, number):
        for process in self.processes:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self.processes]
        if not all(answers):
            sys.exit("A process of torch ended: its error is above.")
        return json.loads(answers[0])

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
    workers = Torch(args.torch_python, config, args.batch // args.devices, args.devices) if args.torch_python else None
    seconds = {name: [] for name in [*variants, *["torch FSDP2, gloo"] * bool(workers)]}
    for number in range(args.rounds + 1):  # the first compiles
        for name in seconds:
            if name in variants:
                step, state = variants[name]
                spent, state = timed(step, state, batch, args.steps)
                variants[name] = step, state
            else:
                spent = workers.steps(args.steps)
            seconds[name] += [min(spent)] * (number > 0)
    if workers:
        workers.close()

    rows = [{"variant": name, "median_ms": 1e3 * statistics.median(spent),
             "speed": float(np.median(np.array(seconds[BASE]) / spent))} for name, spent in seconds.items()]
    print(f"jax {jax.__version__}, {args.devices} simulated devices, GPT-2 {args.layers} x {args.width}, "
          f"batch {args.batch} x {args.seq_len}, fp32, {args.rounds} rounds; "
          f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| variant | median ms | speed over plain jit |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {row['variant']} | {row['median_ms']:.1f} | {row['speed']:.3f} |")
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": rows, "jax": jax.__version__}, indent=1))


if __name__ == "__main__":
    main()
