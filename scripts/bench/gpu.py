"""GPT-2 on one GPU: step time, MFU and memory of ZeRO's placements beside plain jit and torch's fully_shard.

    python scripts/bench/gpu.py --predict predicted.json       # anywhere, with the extras gpu-compiler and cudnn
    python scripts/bench/gpu.py --predicted predicted.json     # needs a GPU, and torch for its row
    python scripts/bench/gpu.py --measured scripts/bench/measured/h100.json --predicted predicted.json   # its table
    python scripts/bench/gpu.py --models tiny:4 --seq-len 64 --steps 3 --rows plain-jit stage-3   # does it run?

Each row is measured by a process of its own, so that its peak is its own. MFU is against a bf16 matrix product that the
same process measures, with 6 FLOPs per parameter and token plus attention's 12 x layers x width x length, recomputation
not counted. Figures are medians. A model is NAME:BATCH.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

REMAT = {"remat": "full"}
ROWS = {
    "stage-0": (0, {}),
    "stage-3": (3, {}),
    "remat": (3, REMAT),
    "pa-cpu": (3, {**REMAT, "partition_activations": "cpu"}),
    "pa-cpu-kernels": (3, {**REMAT, "partition_activations": "cpu"}),
    "optimizer-on-host": (3, {"offload": "optimizer"}),
    "optimizer-kernels": (3, {"offload": "optimizer"}),
    "parameters-on-host": (3, {"offload": "parameters"}),
    "parameters-kernels": (3, {"offload": "parameters"}),
}
"""Rows of this library: stage and options of `make_zero_train_step`. Rows without the library: plain-jit, torch.

kernels: that copy to and from host memory, in the place of copy engines, which jax has right from 0.11.2 on.
"""
ALL_ROWS = ("plain-jit", *ROWS, "torch")
DEFAULT_MODELS = ("124m:16", "774m:8", "1.5b:4")
MATMUL = 8192


def config_and_batch(model, length):
    """The configuration, without remat, and a NumPy batch of `model`, a preset and its number of rows."""
    from models import gpt2

    preset, _, rows = model.partition(":")
    config = dataclasses.replace(gpt2.PRESETS[preset], remat=False)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (int(rows or 8), length + 1)).astype(np.int32)
    return config, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def built(config, mesh):
    """The model with the attention kernel of the mesh's devices."""
    import zero_jax
    from models import gpt2

    return gpt2.build(dataclasses.replace(config, attention=zero_jax.attention(mesh)))


def model_flops(config, batch):
    """FLOPs of one training step, forward and backward."""
    tokens, length = batch["inputs"].size, batch["inputs"].shape[1]
    return tokens * (6 * config.num_params + 12 * config.num_layers * config.width * length)


def median_seconds(run, warm, num_steps):
    """The median seconds of `run()` after `warm` calls."""
    seconds = []
    for number in range(warm + num_steps):
        start = time.perf_counter()
        run()
        if number >= warm:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def matmul_rate(size):
    """FLOP/s of a `size` x `size` bfloat16 matrix product on random data."""
    import jax
    import jax.numpy as jnp

    left, right = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b)
    return 2 * size**3 / median_seconds(lambda: product(left, right).block_until_ready(), 3, 20)


def plain_jit(model, batch):
    """(step, state) without this library: fp32 parameters, bf16 compute, one device."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adamw(1e-4)

    @jax.jit
    def init():
        params = model.init(jax.random.key(0), batch["inputs"])["params"]
        return params, optimizer.init(params)

    def step(state, batch):
        def loss_of(params):
            weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
            logits = model.apply({"params": weights}, batch["inputs"]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return jax.jit(step, donate_argnums=0), init()


def measured_by_jax(row, config, batch, num_steps):
    """Milliseconds, peak and loss of a row; of the library's also the bytes of the program as compiled here."""
    import jax
    import optax

    import zero_jax
    from zero_jax.planning.host_link import measured_link

    device, mesh, found = jax.devices()[0], zero_jax.make_mesh(1), {}
    rate = matmul_rate(MATMUL if device.platform == "gpu" else 512)
    model = built(config, mesh)
    if row == "plain-jit":
        step, state = plain_jit(model, batch)
        found["host_link"] = measured_link([device])
    else:
        stage, options = ROWS[row]
        step = zero_jax.make_zero_train_step(
            model, stage, mesh=mesh, precision="bf16", optimizer=optax.adamw(1e-4), **options)
        if row.endswith("kernels"):
            step.functions.options = dataclasses.replace(step.options, copy_engines=False)
        step.verify(batch)
        state = step.init(jax.random.key(0), batch)
    losses = []

    def run():
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        losses.append(float(metrics["loss"]))

    start = time.perf_counter()
    run()
    found["compile_s"] = time.perf_counter() - start
    found |= {"ms": 1e3 * median_seconds(run, 2, num_steps), "loss": losses[-1], "matmul_flops": rate,
              "device": device.device_kind, "version": f"jax {jax.__version__}"}
    found["peak_bytes"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    if row != "plain-jit":
        found["compiled_bytes"] = step.compiled_step(batch).device_bytes
    return found


def measured_by_torch(config, batch, num_steps):
    """The same decoder in torch: fully_shard with bf16 compute, compiled blocks, fused AdamW."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if on_gpu else "cpu")
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=0, world_size=1, device_id=device if on_gpu else None)
    size = MATMUL if on_gpu else 512
    product = [torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2)]

    def multiply():
        torch.matmul(*product)
        synchronize()

    rate = 2 * size**3 / median_seconds(multiply, 3, 20)
    product.clear()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            width = config.width
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            qkv = self.qkv(self.ln_1(x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (config.num_heads, -1)).transpose(1, 2) for part in qkv)
            x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
            return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(config.vocab_size, config.width)
            self.wpe = nn.Embedding(config.max_length, config.width)
            self.blocks = nn.ModuleList(Block() for _ in range(config.num_layers))
            self.ln_f = nn.LayerNorm(config.width)
            for each in (self.wte, self.wpe):
                nn.init.normal_(each.weight, std=0.02)

        def forward(self, tokens):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return self.ln_f(x) @ self.wte.weight.T

    with device:
        model = Decoder()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = (torch.tensor(batch[name], dtype=torch.long, device=device) for name in ("inputs", "targets"))
    losses = []

    def run():
        loss = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        losses.append(loss.item())

    start = time.perf_counter()
    run()
    found = {"compile_s": time.perf_counter() - start, "matmul_flops": rate, "version": f"torch {torch.__version__}"}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    found |= {"ms": 1e3 * median_seconds(run, 2, num_steps), "loss": losses[-1]}
    return found | {"peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
                    "device": torch.cuda.get_device_name() if on_gpu else "cpu"}


def predicted(rows, config, batch, target):
    """By row, what `zero_jax.plan` says of the program compiled for `target`, without one."""
    import jax
    import optax

    import zero_jax
    from zero_jax.xla.devices import target_devices

    model = built(config, zero_jax.make_mesh(1, devices=target_devices(target)))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    found = {}
    for row in rows:
        if row in ROWS and not row.endswith("kernels"):
            stage, options = ROWS[row]
            plan = zero_jax.plan(model, stage, target, shapes, precision="bf16", optimizer=optax.adamw(1e-4), **options)
            found[row] = {"ms": 1e3 * plan.timing.seconds, "bytes": plan.needed_bytes, "host_bytes": plan.host_bytes,
                          "spent_ms": {name: 1e3 * value for name, value in plan.timing.spent.items()}}
            print(row, found[row], flush=True)
    return found


def measured(args, model, row):
    """What a process of its own measures of a row; its last words where it fails."""
    command = [sys.executable, __file__, "--models", model, "--measure", row, "--seq-len", str(args.seq_len),
               "--steps", str(args.steps)]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                   "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines and not done.returncode else {"failed": (done.stdout + done.stderr)[-1500:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=DEFAULT_MODELS)
    parser.add_argument("--rows", nargs="+", choices=ALL_ROWS, help="default: all but those of kernels",
                        default=[row for row in ALL_ROWS if not row.endswith("kernels")])
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", help="write figures there")
    parser.add_argument("--predict", metavar="FILE", help="measure nothing: write there what is predicted for --target")
    parser.add_argument("--target", default="h100:1")
    parser.add_argument("--predicted", metavar="FILE", help="what --predict wrote, to stand beside what is measured")
    parser.add_argument("--measured", metavar="FILE", nargs="+", default=[], help="the table of what --json wrote")
    parser.add_argument("--measure", metavar="ROW", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        config, batch = config_and_batch(args.models[0], args.seq_len)
        run = (measured_by_torch if args.measure == "torch" else
               lambda *rest: measured_by_jax(args.measure, *rest))
        print(json.dumps(run(config, batch, args.steps)))
        return
    if args.predict:
        found = {model: predicted(args.rows, *config_and_batch(model, args.seq_len), args.target)
                 for model in args.models}
        Path(args.predict).write_text(json.dumps(found, indent=1))
        return
    predictions = json.loads(Path(args.predicted).read_text()) if args.predicted else {}
    known = [json.loads(Path(file).read_text()) for file in args.measured]
    pairs = [(row["model"], row["row"], row) for rows in known for row in rows] or [
        (model, name, None) for model in args.models for name in args.rows]
    print_table(args, pairs, predictions)


def print_table(args, pairs, predictions):
    """A row of the table for each (model, row, what was measured of it or None), as soon as it is measured."""
    rows, bases = [], {}
    print("| model | row | ms | ratio | MFU | predicted ms | peak GB | compiled GB | predicted GB | compile s | loss |")
    print("| --- " * 11 + "|")
    for model, name, found in pairs:
        config, batch = config_and_batch(model, args.seq_len)
        found, plan = found or measured(args, model, name), predictions.get(model, {}).get(name, {})
        rows.append({"model": model, "row": name, **found})
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
        if "failed" in found:
            print(f"{model} {name} failed: {found['failed']}", flush=True)
            continue
        mfu = model_flops(config, batch) / found["ms"] * 1e3 / found["matmul_flops"]
        sizes = (found["peak_bytes"], found.get("compiled_bytes"), plan.get("bytes"))
        cells = [f"{found['ms']:.1f}", f"{found['ms'] / bases.setdefault(model, found['ms']):.2f}", f"{mfu:.2f}",
                 f"{plan['ms']:.1f}" if plan else "", *(f"{size / 1e9:.2f}" if size else "" for size in sizes),
                 f"{found['compile_s']:.1f}", f"{found['loss']:.3f}"]
        print(f"| {' | '.join([model, name, *cells])} |", flush=True)
    for kind in sorted({(row["device"], row["version"]) for row in rows if "device" in row}):
        rates = [row["matmul_flops"] / 1e12 for row in rows if (row.get("device"), row.get("version")) == kind]
        print(f"{', '.join(kind)}: matrix product of {min(rates):.0f} to {max(rates):.0f} TFLOP/s")
    print("".join(f"host link {row['host_link'] / 1e9:.1f} GB/s\n" for row in rows if "host_link" in row), end="")


if __name__ == "__main__":
    main()
