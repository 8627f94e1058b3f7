"""GPT-2 on one GPU: step time and MFU at stages 0 and 3, beside plain jit and torch's fully_shard with compile.

    python scripts/bench/gpu.py --models 124m 355m 774m 1.5b        # needs a GPU; about two minutes a model
    python scripts/bench/gpu.py --models tiny --seq-len 64 --steps 3 # anywhere: does the script run?

MFU is against a bf16 matrix product measured in the same run, with 6 FLOPs per parameter and token plus attention's
12 x layers x width x length, recomputation not counted. Figures are medians.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax
from models import gpt2


def matmul_flops(size, rounds=20):
    """FLOP/s of a `size` x `size` bfloat16 matrix product on random data."""
    left, right = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b)
    product(left, right).block_until_ready()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        product(left, right).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds)


def model_flops(config, batch, length):
    """FLOPs of one training step, forward and backward."""
    return batch * length * (6 * config.num_params + 12 * config.num_layers * config.width * length)


def plain_jit(model, batch):
    """A step without this library: fp32 parameters, bf16 compute, one device."""
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

    return jax.jit(step, donate_argnums=0), init


def zero(model, batch, stage):
    step = zero_jax.make_zero_train_step(
        model, stage, mesh=zero_jax.make_mesh(1), precision="bf16", optimizer=optax.adamw(1e-4))
    return step, lambda: step.init(jax.random.key(0), batch)


def measure(step, init, batch, num_steps):
    """(median seconds of a step after two, peak bytes of the device in this process or None, the last loss)."""
    state = init()
    seconds = []
    for i in range(num_steps + 2):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    stats = jax.local_devices()[0].memory_stats() or {}
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    return statistics.median(seconds), stats.get("peak_bytes_in_use"), float(metrics["loss"])


def torch_fully_shard(config, batch, num_steps):
    """The same decoder in torch: fully_shard with bf16 compute, compiled blocks, fused AdamW. Median seconds, peak."""
    import os

    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    import torch.utils.checkpoint
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    if not dist.is_initialized():
        dist.init_process_group("nccl", rank=0, world_size=1)

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

        def forward(self, tokens):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if config.remat else block(x)
            return self.ln_f(x) @ self.wte.weight.T

    torch.cuda.reset_peak_memory_stats()
    model = Decoder().cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = (torch.tensor(batch[name], dtype=torch.long).cuda() for name in ("inputs", "targets"))
    seconds = []
    for i in range(num_steps + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if i >= 3:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), torch.cuda.max_memory_allocated(), loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["124m", "355m", "774m", "1.5b"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--remat", action="store_true", help="checkpoint every block, in every variant")
    parser.add_argument("--torch", action="store_true", help="torch's fully_shard too; run it alone for its own peak")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()

    device = jax.devices()[0]
    rate = matmul_flops(8192 if device.platform == "gpu" else 512)
    print(f"{device.device_kind}, jax {jax.__version__}; matrix product in bf16: {rate / 1e12:.1f} TFLOP/s")
    print(f"{'model':8s}{'variant':24s}{'ms':>9s}{'ratio':>8s}{'MFU':>8s}{'peak GB':>9s}{'loss':>8s}")
    rows = []
    for preset in args.models:
        config = dataclasses.replace(gpt2.PRESETS[preset], remat=args.remat)
        shape = args.batch, args.seq_len + 1
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        model, base = gpt2.build(config), None
        variants = {"plain jit": plain_jit(model, batch), **{f"stage {s}": zero(model, batch, s) for s in (0, 3)}}
        for name in [*variants, *(["torch fully_shard"] if args.torch else [])]:
            run = (measure(*variants[name], batch, args.steps) if name in variants
                   else torch_fully_shard(config, batch, args.steps))
            seconds, peak, loss = run
            base = base or seconds
            row = {
                "model": preset, "variant": name, "ms": 1e3 * seconds, "ratio": seconds / base,
                "mfu": model_flops(config, args.batch, args.seq_len) / seconds / rate, "peak_bytes": peak, "loss": loss}
            rows.append(row)
            peak_text = f"{peak / 1e9:9.2f}" if peak else f"{'-':>9s}"
            figures = f"{row['ms']:9.1f}{row['ratio']:8.3f}{row['mfu']:8.3f}"
            print(f"{preset:8s}{name:24s}{figures}{peak_text}{loss:8.3f}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": device.device_kind, "jax": jax.__version__, "matmul_flops": rate, "rows": rows}, file)


if __name__ == "__main__":
    main()
