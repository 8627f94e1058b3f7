"""One process of torch's FSDP2, or of DeepSpeed's stage 3, for `scripts/bench/peers.py`, which starts it.

The interpreter is one that has torch, and deepspeed. It reads a number of steps from each line of its input, runs them,
and prints the seconds of each as JSON.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in qkv)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, num_layers, width, num_heads, vocab_size, max_length):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)


def fsdp2(model, rows):
    """(the model, a function of its loss that does the rest of the step)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)

    def finish(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, finish


def deepspeed_stage_3(model, rows):
    """As `fsdp2`; with torch's AdamW, since DeepSpeed's own has to be compiled."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config={
        "train_micro_batch_size_per_gpu": rows, "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False})

    def finish(loss):
        engine.backward(loss)
        engine.step()

    return engine, finish


LIBRARIES = {"fsdp2": fsdp2, "deepspeed": deepspeed_stage_3}


def main():
    library, (rank, num_processes, port) = sys.argv[1], map(int, sys.argv[2:5])
    *shape, rows = json.loads(sys.argv[5])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
                      WORLD_SIZE=str(num_processes), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_processes)
    torch.manual_seed(0)
    model, finish = LIBRARIES[library](Decoder(*shape), rows)
    tokens = torch.randint(0, shape[3], (rows, shape[4] + 1), generator=torch.Generator().manual_seed(rank))
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            finish(loss)
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
